"""The slash commands of `chat`: attach, set, show, save, start over. A command returns what `chat` does next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from hydra_engine.errors import ConfigError
from hydra_terminal.conversation import Conversation, Turn
from hydra_terminal.screen import Screen

HELP = """\
  /image PATH...    attach pictures to the next question (paths, quoted or with ~, or http addresses); alone: list them
  /video PATH       attach a video, for models that support videos
  /system TEXT      set the system prompt; alone: show it; `/system off` removes it
  /set NAME VALUE   temperature, top_p, top_k, seed, max_tokens, ...; alone: show them; VALUE off: the server's default
  /retry            send the last question again
  /new              start over, with the same system prompt and settings
  /history          show the conversation
  /save FILE        write the conversation as JSON
  /timeline on|off  show the time of each stage after an answer
  /help, /quit      this text; quit (also /bye, Ctrl-D)
A line that ends with \\ continues on the next one. Ctrl-C stops an answer. // sends a line that begins with a slash."""


class Next(Enum):
    READ = "read"  # the next line
    SEND = "send"  # the open question
    LEAVE = "leave"


class Commands:
    """The slash commands. `model`: the name in saved conversations; `timeline`: True if timelines are shown."""

    def __init__(self, conversation: Conversation, screen: Screen, *, model: str, timeline: bool) -> None:
        self._conversation = conversation
        self._screen = screen
        self._model = model
        self.timeline = timeline

    def do(self, line: str) -> Next:
        """Executes a line that is not empty. Raises ConfigError with a message for the user."""
        if not line.startswith("/") or line.startswith("//"):
            self._conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
            return Next.SEND
        name, _, rest = line.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise ConfigError(f"there is no command {name[:40]}; /help lists them")
        return command(self, rest.strip()) or Next.READ

    def attach(self, given: list[str], kind: str) -> None:
        for word in given:
            self._screen.note(f"attached {self._conversation.attach(word, kind).described}")
        if not given:
            shown = ", ".join(item.described for item in self._conversation.attached)
            self._screen.say(shown or f"nothing is attached; /{kind} PATH attaches something to the next question")

    def help(self, _: str) -> None:
        self._screen.say(HELP)

    def system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "off" else rest
            self._screen.note("system prompt " + ("removed" if rest == "off" else "set"))
        else:
            self._screen.say(self._conversation.system or "there is no system prompt")

    def set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if value.strip():
            self._conversation.set(name, value.strip())
        elif name:
            raise ConfigError("give a value: /set temperature 0.7")
        settings = self._conversation.settings
        self._screen.note(" ".join(f"{name}={value}" for name, value in settings.items()) or "the server's defaults")

    def retry(self, _: str) -> Next:
        if not self._conversation.take_back():
            raise ConfigError("there is no question to repeat")
        return Next.SEND

    def new(self, _: str) -> None:
        self._conversation.clear()
        self._screen.note("a new conversation")

    def history(self, _: str) -> None:
        turns = self._conversation.turns
        if not turns:
            self._screen.say("the conversation is empty")
        for turn in turns:
            self._screen.say(_shown(turn))

    def save(self, rest: str) -> None:
        names = _words(rest)
        if len(names) != 1:
            raise ConfigError("give one file name: /save talk.json")
        path = Path(names[0]).expanduser()
        document = {
            "model": self._model,
            "settings": self._conversation.settings,
            "messages": self._conversation.messages(),
        }
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(document, file, ensure_ascii=False, indent=1)
                file.write("\n")
        except FileExistsError as error:
            raise ConfigError(f"{path} exists already; choose another name") from error
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._screen.note(f"written to {path}")

    def show_timeline(self, rest: str) -> None:
        if rest not in ("on", "off", ""):
            raise ConfigError("/timeline on, or /timeline off")
        self.timeline = rest == "on" if rest else not self.timeline
        self._screen.note(f"timeline {'on' if self.timeline else 'off'}")


COMMANDS: dict[str, Callable[[Commands, str], Next | None]] = {
    "/image": lambda commands, rest: commands.attach(_words(rest), "image"),
    "/video": lambda commands, rest: commands.attach(_words(rest), "video"),
    "/system": Commands.system,
    "/set": Commands.set,
    "/retry": Commands.retry,
    "/new": Commands.new,
    "/history": Commands.history,
    "/save": Commands.save,
    "/timeline": Commands.show_timeline,
    "/help": Commands.help,
    "/quit": lambda *_: Next.LEAVE,
    "/exit": lambda *_: Next.LEAVE,
    # As in Ollama:
    "/bye": lambda *_: Next.LEAVE,
    "/clear": Commands.new,
    "/?": Commands.help,
}


def _words(text: str) -> list[str]:
    """Words as a shell splits them; an unclosed quote is part of a name."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _shown(turn: Turn) -> str:
    names = "".join(f"[{item.name}] " for item in turn.attachments)
    return f"{turn.role}: {names}{turn.text}{' (stopped)' if turn.stopped else ''}"
