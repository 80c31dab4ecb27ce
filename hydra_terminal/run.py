"""`hydra-engine run MODEL [PICTURE..] [QUESTION]`: starts an engine and chats with it in the terminal.

The engine serves HTTP on a free port of this machine, for a random key that never leaves this process, so that answers,
reasoning and errors are those of a server. Its instances are child processes, which Linux ends with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import mimetypes
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra_engine import log
from hydra_engine.cli.generate import check_media
from hydra_engine.cli.options import add_engine_options
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import EngineConfig, ServerConfig
from hydra_engine.errors import ConfigError
from hydra_engine.preprocess.model_files import check_tower, find_model_files
from hydra_engine.preprocess.text.template_files import check_template
from hydra_terminal.chat import Session, add_chat_options, conversation_from
from hydra_terminal.client import Client

if TYPE_CHECKING:
    from hydra_engine.core.reports import InstanceSummary

_SKIP = frozenset({"seed"})  # here the flag is the request's seed
_SERVER_OPTIONS = frozenset({"reasoning_parser"})
_MAX_BODY_BYTES = 1 << 30  # the limits of pictures hold
_ADDRESSES = ("http://", "https://", "file://", "data:")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [PICTURE ...] [QUESTION] [options]"
    model = "model directory, GGUF file, hub id, or `demo` (the default)"
    parser.add_argument("place", nargs="?", metavar="MODEL", help=model)
    words = "pictures and videos for the first question; other words are a question, whose answer ends the command"
    parser.add_argument("words", nargs="*", metavar="PICTURE or QUESTION", help=words)
    parser.add_argument("--model", metavar="MODEL", help="the same as MODEL")
    add_chat_options(parser)
    add_engine_options(parser, _SKIP, also=_SERVER_OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    words = list(arguments.words)
    if arguments.model is None:
        arguments.model = _checked_model(arguments.place)
    elif arguments.place is not None:
        words.insert(0, arguments.place)
    media, question = sort_words(words)
    if question is not None and arguments.timeline is None:
        arguments.timeline = False  # on a terminal a chat shows it
    arguments.image += media["image"]
    settings = read_settings(arguments, _SKIP)
    config, server = settings.engine(), settings.server()
    if "log_level" not in settings.chosen:
        config = replace(config, log_level="warning")  # lines would stand between answers
    log.configure(config.log_level, log_format=config.log_format)
    check_media(arguments.image, media["video"], replace(config.media, local_files=True))
    conversation = conversation_from(arguments, media["video"], config.media)
    config = find_model_files(config)
    if conversation.attached:
        check_tower(config)
    check_template(config.model_path, config.chat_template)
    began_s = time.monotonic()
    with _serving(config, server.reasoning_parser) as (summaries, client):
        ready = f"{_described(config.model_name, summaries)} · ready in {time.monotonic() - began_s:.1f} s"
        session = Session(conversation, client, config.model_name, arguments, greeting=ready)
        return session.run() if question is None else session.ask(question)


def _checked_model(word: str | None) -> str | None:
    """Raises ConfigError for a first word that is a picture or a question."""
    if word is not None and not Path(word).is_dir() and (_kind(word) is not None or " " in word):
        raise ConfigError(f"the model comes first, as in `hydra-engine run demo {word[:60]!r}`")
    return word


def sort_words(words: Sequence[str]) -> tuple[dict[str, list[str]], str | None]:
    """Returns the files and addresses among the words by their kind ("image", "video"), and the other words as one
    question, None if there are none."""
    media: dict[str, list[str]] = {"image": [], "video": []}
    question = []
    for word in words:
        if word == "-":  # a pipe is read without being named
            continue
        kind = _kind(word)
        question.append(word) if kind is None else media[kind].append(word)
    return media, " ".join(question) or None


def _kind(word: str) -> str | None:
    """Returns "image" or "video" for a name of such a file, an address or an existing file; else None."""
    is_address = word.startswith(_ADDRESSES)
    guessed = (mimetypes.guess_type(word)[0] or "").partition("/")[0]
    if guessed in ("image", "video") and (is_address or not any(map(str.isspace, word))):
        return guessed
    try:
        return "image" if is_address or (Path(word).is_file() and not word.endswith(".gguf")) else None
    except OSError:  # longer than a name can be
        return None


def _described(name: str, summaries: Sequence[InstanceSummary]) -> str:
    first, more = summaries[0], len(summaries) - 1
    threads = f", {first.threads} thread{'s' if first.threads > 1 else ''}" if first.device == "cpu" else ""
    return f"{name} · {first.device}{threads}" + (f" and {more} more" if more else "")


@contextmanager
def _serving(config: EngineConfig, reasoning_parser: str) -> Iterator[tuple[Sequence[InstanceSummary], Client]]:
    """Yields the summaries of a running engine and its client. Ends the engine."""
    # Imported here: errors of the configuration come before the imports.
    from hydra_engine.engine import Engine, LoopThread
    from hydra_engine.server.app import build_app
    from hydra_engine.server.http.access_control import KeyRing
    from hydra_engine.server.http.listening import Listening, listen

    key = secrets.token_urlsafe(32)
    server = ServerConfig(
        port=0,
        reasoning_parser=reasoning_parser,
        ui=False,
        max_body_bytes=_MAX_BODY_BYTES,
        max_inflight_body_bytes=2 * _MAX_BODY_BYTES,
    )
    engine = Engine.create_unstarted(config)
    starting: asyncio.Task[None] | None = None
    listening: Listening | None = None

    async def start() -> str:
        nonlocal starting, listening
        starting = asyncio.create_task(engine.astart())
        await starting
        app = build_app(engine, server, keys=KeyRing((key,), None, None, secrets.token_bytes(32)))
        listening = await listen(app, server.host, server.port)
        return listening.url

    async def end() -> None:
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        if listening is not None:
            await listening.close()
        await engine.aclose()

    thread = LoopThread("hydra-engine")
    try:
        url = thread.run(start())
        yield engine.summaries, Client(url, key)
    finally:
        thread.end(end)
