"""What a response holds, item by item, as the text of its model grows: messages and function calls, and the events
that tell of each. Does not know HTTP or how a call is read out of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_engine.core.logprobs import TextLogprob, gathered
from hydra_engine.server.http.encoding import Slices
from hydra_engine.server.protocol import response_events as events
from hydra_engine.server.protocol.chat import token_logprobs
from hydra_engine.server.protocol.response_events import AnyResponseEvent
from hydra_engine.server.protocol.responses import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
)
from hydra_engine.server.tools.tool_calls import ToolParser
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event


@dataclass(slots=True)
class _Message:
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: Sequence[TextLogprob] = ()  # what is sent at the end holds them once more

    def part(self, slices: Slices) -> OutputText:
        return OutputText("".join(self.texts), logprobs=token_logprobs(self.logprobs, slices))


@dataclass(slots=True)
class _Call:
    id: str
    call_id: str
    name: str
    texts: list[str] = field(default_factory=list)

    def as_item(self, status: Status) -> FunctionCall:
        return FunctionCall(self.id, self.call_id, self.name, "".join(self.texts), status)


class OutputItems:
    """Of one response; `number` gives each event the next one. Log probabilities come with the text behind them."""

    def __init__(self, name: str, parser: ToolParser, number: Callable[[], int], slices: Slices) -> None:
        self.closed: list[OutputItem] = []
        self._name = name
        self._parser = parser
        self._number = number
        self._open: _Message | _Call | None = None
        self._slices = slices
        self._logprobs: Sequence[TextLogprob] = ()
        self._num_messages = 0

    def feed(self, text: str, logprobs: Sequence[TextLogprob] | None) -> list[AnyResponseEvent]:
        self._logprobs = gathered(self._logprobs, logprobs or ())
        return self._taken(self._parser.feed(text)) if text else []

    def finish(self, status: Status) -> list[AnyResponseEvent]:
        """Closes the last item; of nothing at all becomes an empty message."""
        emitted = self._taken(self._parser.finish())
        if self._open is None or (self._logprobs and isinstance(self._open, _Message)):
            emitted += self._text("")
        return emitted + self._close(status)

    def _taken(self, parsed: Iterable[Event]) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        for event in parsed:
            match event:
                case Content(text):
                    emitted += self._text(text)
                case CallStart(_, id, name):
                    emitted += self._close("completed") + self._begin(_Call(id.replace("call_", "fc_", 1), id, name))
                case CallArguments(_, text):
                    assert isinstance(self._open, _Call)
                    self._open.texts.append(text)
                    emitted.append(self._event(events.ArgumentsDelta, item_id=self._open.id, delta=text))
        return emitted

    def _text(self, text: str) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        if not isinstance(self._open, _Message):
            self._num_messages += 1
            number = f"_{self._num_messages}" if self._num_messages > 1 else ""
            emitted += self._close("completed") + self._begin(_Message(self._name + number))
        message, logprobs = self._open, self._logprobs
        assert isinstance(message, _Message)
        if text or logprobs:
            self._logprobs = ()
            message.texts.append(text)
            message.logprobs = gathered(message.logprobs, logprobs)
            shown = token_logprobs(logprobs, self._slices)
            emitted.append(self._event(events.OutputTextDelta, item_id=message.id, delta=text, logprobs=shown))
        return emitted

    def _event(self, kind: Callable[..., AnyResponseEvent], **fields: Any) -> AnyResponseEvent:
        """The next event, of the item that is open."""
        return kind(sequence_number=self._number(), output_index=len(self.closed), **fields)

    def _begin(self, item: _Message | _Call) -> list[AnyResponseEvent]:
        self._open = item
        if isinstance(item, _Call):
            return [self._event(events.OutputItemAdded, item=item.as_item("in_progress"))]
        return [
            self._event(events.OutputItemAdded, item=OutputMessage(item.id, "in_progress", [])),
            self._event(events.ContentPartAdded, item_id=item.id, part=OutputText("")),
        ]

    def _close(self, status: Status) -> list[AnyResponseEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        done: OutputItem
        if isinstance(item, _Call):
            done = item.as_item(status)
            emitted = [self._event(events.ArgumentsDone, item_id=item.id, name=item.name, arguments=done.arguments)]
        else:
            part = item.part(self._slices)
            done = OutputMessage(item.id, status, [part])
            emitted = [
                self._event(events.OutputTextDone, item_id=item.id, text=part.text, logprobs=part.logprobs),
                self._event(events.ContentPartDone, item_id=item.id, part=part),
            ]
        emitted.append(self._event(events.OutputItemDone, item=done))
        self.closed.append(done)
        return emitted
