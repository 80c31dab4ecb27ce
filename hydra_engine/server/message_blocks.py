"""What a message of POST /v1/messages holds, block by block, as the text of its model grows: text and uses of tools,
and the events that tell of each. Does not know HTTP or how a call is read out of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hydra_engine.server.protocol.messages import (
    AnyMessageEvent,
    AnyOutputBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    OutputBlock,
    TextDelta,
    ToolUseOutput,
)
from hydra_engine.server.tool_objects import CallArguments, CallStart, Content, Event
from hydra_engine.server.tools import ToolParser


class MessageBlocks:
    """Of one message. `has_calls` once a tool is used."""

    def __init__(self, parser: ToolParser) -> None:
        self.has_calls = False
        self._parser = parser
        self._num_closed = 0
        self._open: AnyOutputBlock | None = None

    def feed(self, text: str) -> list[AnyMessageEvent]:
        return self._taken(self._parser.feed(text)) if text else []

    def begin_text(self) -> list[AnyMessageEvent]:
        """Nothing where a block of text is open already."""
        return [] if isinstance(self._open, OutputBlock) else self._begin(OutputBlock(""))

    def finish(self) -> list[AnyMessageEvent]:
        """Closes the last block; of nothing at all becomes an empty text."""
        found = self._taken(self._parser.finish())
        if self._open is None:
            found += self.begin_text()
        return found + self._close()

    def _taken(self, parsed: Iterable[Event]) -> list[AnyMessageEvent]:
        found: list[AnyMessageEvent] = []
        for one in parsed:
            match one:
                case Content(text):
                    found += [*self.begin_text(), ContentBlockDelta(TextDelta(text), self._num_closed)]
                case CallStart(_, id, name):
                    self.has_calls = True
                    found += self._begin(ToolUseOutput(use_id(id), name))
                case CallArguments(_, text):
                    found.append(ContentBlockDelta(InputJsonDelta(text), self._num_closed))
        return found

    def _begin(self, block: AnyOutputBlock) -> list[AnyMessageEvent]:
        found = self._close()
        self._open = block
        return [*found, ContentBlockStart(block, self._num_closed)]

    def _close(self) -> list[AnyMessageEvent]:
        if self._open is None:
            return []
        self._open = None
        self._num_closed += 1
        return [ContentBlockStop(self._num_closed - 1)]


def whole_blocks(events: Iterable[Event]) -> list[AnyOutputBlock]:
    """Of a whole answer. A call whose input is no JSON object, for it was cut off or not constrained, stays text:
    nobody is told to run what the model has not said."""
    found: list[AnyOutputBlock] = []
    for id, name, text in _spans(events):
        block: AnyOutputBlock = OutputBlock(text)
        if id and (given := _object(text)) is not None:
            block = ToolUseOutput(use_id(id), name, given)
        found.append(block)
    return found or [OutputBlock("")]


def _spans(events: Iterable[Event]) -> list[tuple[str, str, str]]:
    """(id of the call, its name, its arguments), of text both empty and the text."""
    spans: list[tuple[str, str, list[str]]] = []
    for one in events:
        match one:
            case Content(text):
                if not spans or spans[-1][0]:
                    spans.append(("", "", []))
                spans[-1][2].append(text)
            case CallStart(_, id, name):
                spans.append((id, name, []))
            case CallArguments(_, text):
                spans[-1][2].append(text)
    return [(id, name, "".join(texts)) for id, name, texts in spans]


def use_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
