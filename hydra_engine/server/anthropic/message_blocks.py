"""What a message of POST /v1/messages holds, block by block, as the text of its model grows: text and uses of tools,
and the events that tell of each. Does not know HTTP or how a call is read out of a text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hydra_engine.server.protocol.anthropic import (
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
from hydra_engine.server.tools.tool_calls import ToolParser, parsed
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event


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
        emitted = self._taken(self._parser.finish())
        if self._open is None:
            emitted += self.begin_text()
        return emitted + self._close()

    def _taken(self, parsed: Iterable[Event]) -> list[AnyMessageEvent]:
        emitted: list[AnyMessageEvent] = []
        for event in parsed:
            match event:
                case Content(text):
                    emitted += [*self.begin_text(), ContentBlockDelta(TextDelta(text), self._num_closed)]
                case CallStart(_, id, name):
                    self.has_calls = True
                    emitted += self._begin(ToolUseOutput(use_id(id), name))
                case CallArguments(_, text):
                    emitted.append(ContentBlockDelta(InputJsonDelta(text), self._num_closed))
        return emitted

    def _begin(self, block: AnyOutputBlock) -> list[AnyMessageEvent]:
        emitted = self._close()
        self._open = block
        return [*emitted, ContentBlockStart(block, self._num_closed)]

    def _close(self) -> list[AnyMessageEvent]:
        if self._open is None:
            return []
        self._open = None
        self._num_closed += 1
        return [ContentBlockStop(self._num_closed - 1)]


def whole_blocks(events: Iterable[Event]) -> list[AnyOutputBlock]:
    """Of a whole answer. A call whose input is no JSON object, for it was cut off or not constrained, stays text:
    nobody is told to run what the model has not said."""
    blocks: list[AnyOutputBlock] = []
    for item in parsed(events):
        if isinstance(item, str):
            blocks.append(OutputBlock(item))
        elif (arguments := _object(item.arguments)) is not None:
            blocks.append(ToolUseOutput(use_id(item.id), item.name, arguments))
        else:
            blocks.append(OutputBlock(item.arguments))
    return blocks or [OutputBlock("")]


def use_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
