"""`hydra-engine chat`: a conversation with a running server, streamed; `/image FILE` adds a picture to what follows."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import mimetypes
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from hydra_engine.cli.options import add_sampling_options
from hydra_engine.cli.timeline import timeline_lines
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.errors import ResourceError

_HELP = "Type a message. /image FILE adds a picture, /new starts over, /quit leaves.\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", default=None, help="the server's API key, if it has one")
    parser.add_argument("--system", default=None, help="system prompt")
    parser.add_argument("--timeline", action="store_true", help="print what each stage took and what delayed tokens")
    add_sampling_options(parser, temperature=0.0)


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_chat(arguments))


async def _chat(arguments: argparse.Namespace) -> int:
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    async with aiohttp.ClientSession(arguments.url, headers=headers) as session:
        try:
            async with session.get("/v1/models") as response:
                response.raise_for_status()
                model = (await response.json())["data"][0]["id"]
        except aiohttp.ClientError as error:
            raise ResourceError(f"no server answers at {arguments.url}; start one with `hydra-engine serve`") from error
        sys.stdout.write(f"connected to {model}. {_HELP}")
        await _converse(session, model, arguments)
    return 0


async def _converse(session: aiohttp.ClientSession, model: str, arguments: argparse.Namespace) -> None:
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages: list[dict[str, Any]] = list(first)
    pictures: list[dict[str, Any]] = []
    while True:
        try:
            line = (await asyncio.to_thread(input, "> ")).strip()
        except EOFError:
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            messages, pictures = list(first), []
        elif line.startswith("/image "):
            pictures.extend(_picture(line.removeprefix("/image ").strip()))
        elif line.startswith("/"):
            sys.stdout.write(_HELP)
        elif line:
            content: Any = [*pictures, {"type": "text", "text": line}] if pictures else line
            messages.append({"role": "user", "content": content})
            pictures = []
            answer = await _answer(session, model, messages, arguments)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _picture(name: str) -> list[dict[str, Any]]:
    path = Path(name).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        sys.stdout.write(f"cannot read {path}: {error.strerror}\n")
        return []
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}]


async def _answer(
    session: aiohttp.ClientSession, model: str, messages: list[dict[str, Any]], arguments: argparse.Namespace
) -> str | None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    body = {n: getattr(arguments, n) for n in names if getattr(arguments, n) is not None}
    body |= {"model": model, "messages": messages, "stream": True}
    if arguments.timeline:
        body["return_metrics"] = True
    text = ""
    lines: list[str] = []
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            sys.stdout.write((await response.json())["error"]["message"] + "\n")
            return None
        async for event in _events(response):
            if "error" in event:
                sys.stdout.write("\n" + event["error"]["message"] + "\n")
                return None
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
            if "metrics" in event:
                lines = _timeline(event["metrics"])
    sys.stdout.write("\n".join(["", *lines, ""]))
    return text


def _timeline(metrics: dict[str, Any]) -> list[str]:
    slo = msgspec.convert(metrics["slo"] or {}, SloReport)
    return timeline_lines(msgspec.convert(metrics["timeline"], list[StageSpan]), slo)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])
