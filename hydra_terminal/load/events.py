"""Server-sent events of a chat completion: from stamped chunks of bytes to stamped tokens. Runs after the run.

Parsing is kept out of the run so that the client is never what is measured; while a load runs it only notes when which
bytes came. Does not know sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer. `stamps[i]` is when the i-th event with tokens was complete, `counts[i]` how many tokens it
    brought. `ended`: the stream came to its `[DONE]`. `text`: the answer without its reasoning."""

    stamps: tuple[float, ...]
    counts: tuple[int, ...]
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None
    ended: bool = False
    text: str = ""


def parse(chunks: Iterable[tuple[float, bytes]]) -> Stream:
    """Raises ValueError where an event is no JSON object.

    Tokens per event are the growth of `usage.completion_tokens` where every event carries it. Elsewhere each event with
    text counts for one, and if the final usage names more, the rest is spread evenly over the events.
    """
    shown: list[float] = []  # events with text
    running: list[tuple[float, int]] = []  # (stamp, tokens so far)
    usage = metrics = finish_reason = error = None
    ended = False
    texts: list[str] = []
    for stamp, data in _events(chunks):
        if data == b"[DONE]":
            ended = True
            break
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError("an event of the stream is no JSON object")
        if chunk.get("error"):
            error = json.dumps(chunk["error"])[:300]
        usage = chunk.get("usage") or usage
        metrics = chunk.get("metrics") or metrics
        for choice in chunk.get("choices") or ():
            finish_reason = choice.get("finish_reason") or finish_reason
            if _text(choice):
                shown.append(stamp)
            texts.append((choice.get("delta") or {}).get("content") or "")
            if chunk.get("usage"):
                running.append((stamp, int(chunk["usage"].get("completion_tokens") or 0)))
    stamps, counts = _by_growth(running) if running else _by_events(shown, usage)
    return Stream(stamps, counts, usage, metrics, finish_reason, error, ended, "".join(texts))


def _events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each event, with the stamp of the chunk that completed it. Comments are dropped."""
    buffer = b""
    for stamp, chunk in chunks:
        buffer = (buffer + chunk).replace(b"\r\n", b"\n")
        *complete, buffer = buffer.split(b"\n\n")
        for event in complete:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield stamp, b"\n".join(lines)


def _text(choice: dict[str, Any]) -> str | None:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or choice.get("text")


def _by_growth(running: list[tuple[float, int]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    stamps, counts, so_far = [], [], 0
    for stamp, total in running:
        if total > so_far:
            stamps.append(stamp)
            counts.append(total - so_far)
            so_far = total
    return tuple(stamps), tuple(counts)


def _by_events(shown: list[float], usage: dict[str, Any] | None) -> tuple[tuple[float, ...], tuple[int, ...]]:
    counts = [1] * len(shown)
    missing = int((usage or {}).get("completion_tokens") or 0) - len(shown)
    if shown and missing > 0:
        each, left = divmod(missing, len(shown))
        # The i-th of `left` extra tokens goes to event i * n / left, so that they are spread evenly.
        extra = {index * len(shown) // left for index in range(left)}
        counts = [1 + each + (index in extra) for index in range(len(shown))]
    return tuple(shown), tuple(counts)
