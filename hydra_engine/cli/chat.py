"""`hydra-engine chat`: a conversation with a running server, streamed to the terminal, with pictures and timelines.

Ctrl-C stops an answer, a second one leaves. With standard input from a pipe each line is a question and nothing but
answers is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing
from typing import Any

import msgspec

from hydra_engine.cli.options import SAMPLING, add_sampling_options
from hydra_engine.cli.timeline import timeline_lines
from hydra_engine.config import environment_api_keys
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.errors import ConfigError, RequestFailed

DEFAULT_URL = "http://127.0.0.1:8000"
_BAR_ROOM = 62  # columns of a timeline's line that are no bar
_MIN_BAR, _MAX_BAR = 16, 60


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--model", default=None, metavar="NAME", help="one of the server's models; default: its first")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="the server's API key (default: HYDRA_API_KEY)")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture for the first question; may be repeated"
    )
    parser.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        help="show what each stage took and what delayed tokens (default: on a terminal)",
    )
    parser.add_argument("--plain", action="store_true", help="text as it comes: no Markdown, no colours")
    add_sampling_options(parser, temperature=0.0)


def run(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` of other commands needs none of it.
    from hydra_engine.cli.talk.client import Client, ServerError

    keys = environment_api_keys()
    client = Client(arguments.url, arguments.api_key or (keys[0] if keys else None))
    with asyncio.Runner() as runner:
        try:
            runner.run(client.open())
            found = runner.run(client.model(lambda words: _tell(f"waiting: {words}")))
            return _Chat(arguments, runner, client, arguments.model or found).run()
        except ServerError as error:
            raise RequestFailed(error.message) from error
        finally:
            runner.run(client.close())


def _tell(text: str) -> None:
    sys.stderr.write(f"hydra-engine: {text}\n")
    sys.stderr.flush()


class _Chat:
    def __init__(self, arguments: argparse.Namespace, runner: asyncio.Runner, client: Any, model: str) -> None:
        from rich.console import Console

        from hydra_engine.cli.talk.commands import Commands
        from hydra_engine.cli.talk.conversation import Conversation
        from hydra_engine.cli.talk.prompt import Prompt
        from hydra_engine.cli.talk.screen import PlainScreen, Screen, TerminalScreen

        self._runner = runner
        self._client = client
        self._model = model
        self._typed = sys.stdin.isatty() and sys.stdout.isatty()
        self._screen: Screen = PlainScreen()
        if sys.stdout.isatty():
            console = Console(no_color=arguments.plain or None, highlight=False, markup=False, emoji=False)
            self._screen = TerminalScreen(console, markdown=not arguments.plain)
        self._conversation = Conversation(arguments.system, _settings(arguments))
        timeline = self._typed if arguments.timeline is None else arguments.timeline
        self._commands = Commands(self._conversation, self._screen, model=model, timeline=timeline)
        self._prompt = Prompt(self._typed, Commands.NAMES, Commands.WITH_PATHS)
        if arguments.image:
            self._commands.attach(arguments.image, "image")

    def run(self) -> int:
        self._screen.note(f"{self._model} at {self._client.url}. /help lists the commands, /quit leaves.")
        failed = leaving = False
        try:
            while True:
                try:
                    line = self._prompt.read()
                    step = None if line is None else self._take(line)
                except KeyboardInterrupt:
                    if not self._typed:
                        return 130
                    self._screen.say("")
                    if leaving:
                        return 130
                    self._screen.note("Ctrl-C again or Ctrl-D leaves")
                    leaving = True
                    continue
                leaving = False
                failed |= step is False
                if step is None:
                    break
        finally:
            self._prompt.close()
        if self._typed:
            self._screen.say("")
        return 1 if failed and not self._typed else 0

    def _take(self, line: str) -> bool | None:
        """None to leave, False where the line could not be done."""
        from hydra_engine.cli.talk.commands import Next

        if not line:
            return True
        try:
            step = self._commands.take(line)
        except ConfigError as error:
            self._screen.error(error.message)
            return False
        if step is Next.SEND:
            return self._send()
        return None if step is Next.LEAVE else True

    def _send(self) -> bool:
        """Asks the open question. What was stopped stays in the conversation as far as it had come."""
        from hydra_engine.cli.talk.client import Answer, ServerError

        answer = Answer()
        try:
            self._runner.run(self._receive(answer))
        except ServerError as error:
            self._screen.error(error.message)
            return False
        except KeyboardInterrupt:
            if answer.text:
                self._conversation.answered(answer.text, stopped=True)
            self._screen.note("stopped; Ctrl-D leaves" if self._typed else "stopped")
            if not self._typed:
                raise
            return True
        self._conversation.answered(answer.text)
        self._screen.note(told(answer))
        if self._commands.timeline and answer.metrics:
            self._screen.timeline(self._timeline_of(answer.metrics))
        return True

    async def _receive(self, answer: Any) -> None:
        body = {
            **self._conversation.settings,
            "model": self._model,
            "messages": self._conversation.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_metrics": True,
        }
        async with aclosing(self._client.stream(body, answer)) as pieces:
            with self._screen.answer() as write:
                async for piece in pieces:
                    write(piece)

    def _timeline_of(self, metrics: dict[str, Any]) -> list[str]:
        try:
            slo = msgspec.convert(metrics.get("slo") or {}, SloReport)
            spans = msgspec.convert(metrics.get("timeline") or [], list[StageSpan])
        except msgspec.ValidationError:
            return []  # another server's idea of metrics
        return timeline_lines(spans, slo, width=max(_MIN_BAR, min(self._screen.width - _BAR_ROOM, _MAX_BAR)))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [name for name, _, _ in SAMPLING]
    chosen = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return chosen | ({"stop": arguments.stop} if arguments.stop else {})


def told(answer: Any) -> str:
    """The line below an answer: tokens, time to the first one, tokens a second, why it ended. `answer`: Answer."""
    usage, metrics = answer.usage, answer.metrics
    parts = []
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        of = [f"{details[name]} {word}" for name, word in _DETAILS if details.get(name)]
        read = f"{usage.get('prompt_tokens', 0)} tokens in" + (f" ({', '.join(of)})" if of else "")
        parts += [read, f"{usage.get('completion_tokens', 0)} out"]
    first_s = metrics.get("ttft_s") or answer.first_s
    if first_s is not None:
        parts.append(f"first after {first_s:.3f} s" if first_s < 1 else f"first after {first_s:.1f} s")
    if metrics.get("tpot_s"):
        parts.append(f"{1 / metrics['tpot_s']:.1f} tok/s")
    parts.append(answer.finish_reason or "no reason given")
    return " · ".join(parts)


_DETAILS = (("image_tokens", "of pictures"), ("cached_tokens", "cached"))
