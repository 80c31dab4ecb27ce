"""`hydra-engine chat`: a conversation with a running server, streamed to the terminal, with pictures and timelines.

Ctrl-C stops an answer, a second one quits. If standard input is a pipe, each line is a question and only answers are
printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec

from hydra_engine.cli.options import DEFAULT_URL, add_sampling_options, sampling_from
from hydra_engine.cli.summary import timeline_lines
from hydra_engine.config import MediaConfig, environment_api_keys
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.errors import ConfigError, RequestFailed
from hydra_terminal.client import Answer, Client, ServerError
from hydra_terminal.commands import COMMANDS, Commands, Next
from hydra_terminal.conversation import Conversation
from hydra_terminal.prompt import Prompt
from hydra_terminal.screen import Screen


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--model", default=None, metavar="NAME", help="one of the server's models; default: its first")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="the server's API key (default: HYDRA_API_KEY)")
    add_chat_options(parser)


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a conversation, wherever its server is."""
    parser.add_argument("--system", default=None, metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture for the first question; can be repeated"
    )
    parser.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        help="show the time of each stage and the causes of late tokens (default: on a terminal)",
    )
    parser.add_argument("--plain", action="store_true", help="no colours")
    add_sampling_options(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.words:
        model = shlex.quote(arguments.words[0][:60])
        hint = f"give its address with --url; `hydra-engine run {model}` starts one"
        raise ConfigError(f"chat talks to a running server: {hint}")
    keys = environment_api_keys()
    client = Client(arguments.url, arguments.api_key or (keys[0] if keys else None))
    conversation = conversation_from(arguments)
    try:
        first = client.model(lambda message: sys.stderr.write(f"hydra-engine: {message}\n"))
        model = arguments.model or first
        return Session(conversation, client, model, arguments, greeting=f"{model} at {client.url}").run()
    except ServerError as error:
        raise RequestFailed(error.message) from error


def conversation_from(
    arguments: argparse.Namespace, videos: Sequence[str] = (), limits: MediaConfig | None = None
) -> Conversation:
    """Returns the conversation that the options begin, with what is attached to its first question. Raises ConfigError
    and InvalidRequest."""
    settings = {name: value for name, value in sampling_from(arguments).items() if value != ()}
    conversation = Conversation(arguments.system, settings)
    if limits is not None:
        conversation.limits = limits
    for kind, words in (("image", arguments.image), ("video", videos)):
        for word in words:
            conversation.attach(word, kind)
    return conversation


_OTHER_COLUMNS = 62  # of a timeline's line, besides the bar
_MIN_BAR, _MAX_BAR = 16, 60
_DETAILS = (("image_tokens", "of pictures"), ("cached_tokens", "cached"))


class Session:
    """The loop: reads a line, executes a command or sends a question, and shows the answer as it arrives."""

    def __init__(
        self, conversation: Conversation, client: Client, model: str, arguments: argparse.Namespace, *, greeting: str
    ) -> None:
        self._client = client
        self._model = model
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._screen = Screen(sys.stdout, plain=arguments.plain)
        self._conversation = conversation
        timeline = self._interactive if arguments.timeline is None else arguments.timeline
        self._commands = Commands(conversation, self._screen, model=model, timeline=timeline)
        self._greeting = greeting

    def ask(self, question: str) -> int:
        """Asks one question and returns the exit code. An interrupt ends the answer and is raised."""
        self._interactive = False
        self._conversation.ask(question)
        return 0 if self._send() else 1

    def run(self) -> int:
        """Talks until the user leaves; returns the exit code."""
        self._prompt = Prompt(self._interactive, tuple(COMMANDS))
        self._screen.note(f"{self._greeting}. /help lists the commands, /quit leaves.")
        for item in self._conversation.attached:
            self._screen.note(f"attached {item.described}")
        failed = leaving = False
        try:
            while True:
                try:
                    line = self._prompt.read()
                    done = None if line is None else self._do(line)
                except KeyboardInterrupt:
                    if not self._interactive:
                        return 130
                    self._screen.say("")
                    if leaving:
                        return 130
                    self._screen.note("Ctrl-C again or Ctrl-D leaves")
                    leaving = True
                    continue
                leaving = False
                failed |= done is False
                if done is None:
                    break
        finally:
            self._prompt.close()
        if self._interactive:
            self._screen.say("")
        return 1 if failed and not self._interactive else 0

    def _do(self, line: str) -> bool | None:
        """Executes a line; None to quit, False if the line failed."""
        if not line:
            return True
        try:
            step = self._commands.do(line)
        except ConfigError as error:
            self._screen.error(error.message)
            return False
        if step is Next.SEND:
            return self._send()
        return None if step is Next.LEAVE else True

    def _send(self) -> bool:
        """Sends the open question. The received part of a stopped answer stays in the conversation."""
        answer = Answer()
        try:
            self._receive(answer)
        except ServerError as error:
            self._screen.error(error.message)
            return False
        except KeyboardInterrupt:
            if answer.text:
                self._conversation.answered(answer.text, stopped=True)
            self._screen.note("stopped; Ctrl-D leaves" if self._interactive else "stopped")
            if not self._interactive:
                raise
            return True
        self._conversation.answered(answer.text)
        self._screen.note(_summary(answer))
        if self._commands.timeline and answer.metrics:
            self._screen.timeline(self._timeline(answer.metrics))
        return True

    def _receive(self, answer: Answer) -> None:
        body = {
            **self._conversation.settings,
            "model": self._model,
            "messages": self._conversation.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_metrics": True,
        }
        thinks = False
        try:
            with closing(self._client.stream(body, answer)) as pieces:
                for piece in pieces:
                    if thinks and not piece.is_thought:
                        self._screen.note("")
                    thinks = piece.is_thought
                    if thinks:
                        self._screen.think(piece.text)
                    else:
                        self._screen.write(piece.text)
        finally:
            if answer.text:
                self._screen.say("")
            elif thinks:
                self._screen.note("")

    def _timeline(self, metrics: dict[str, Any]) -> list[str]:
        try:
            slo = msgspec.convert(metrics.get("slo") or {}, SloReport)
            spans = msgspec.convert(metrics.get("timeline") or [], list[StageSpan])
            clock_error_s = msgspec.convert(metrics.get("clock_error_s", 0.0), float)
        except msgspec.ValidationError:
            return []  # another server's metrics have another form
        width = max(_MIN_BAR, min(self._screen.width - _OTHER_COLUMNS, _MAX_BAR))
        return timeline_lines(spans, slo, width=width, clock_error_s=clock_error_s)


def _summary(answer: Answer) -> str:
    """The line below an answer: tokens, time to the first one, tokens per second, finish reason."""
    usage, metrics = answer.usage, answer.metrics
    parts = []
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        of = [f"{details[name]} {word}" for name, word in _DETAILS if details.get(name)]
        prompt = f"{usage.get('prompt_tokens', 0)} tokens in" + (f" ({', '.join(of)})" if of else "")
        parts += [prompt, f"{usage.get('completion_tokens', 0)} out"]
    first_s = metrics.get("ttft_s") or answer.first_s
    if first_s is not None:
        parts.append(f"first after {first_s:.3f} s" if first_s < 1 else f"first after {first_s:.1f} s")
    if metrics.get("tpot_s"):
        parts.append(f"{1 / metrics['tpot_s']:.1f} tok/s")
    parts.append(answer.finish_reason or "no reason given")
    return " · ".join(parts)
