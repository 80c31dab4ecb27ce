"""What a response holds, item by item, as the text of its model grows: messages and function calls, and the events
that tell of each. Does not know HTTP or how a call is read out of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hydra_engine.core.outputs import TextLogprob
from hydra_engine.server.protocol import response_events as events
from hydra_engine.server.protocol.chat import TokenLogprob
from hydra_engine.server.protocol.response_events import AnyResponseEvent
from hydra_engine.server.protocol.responses import (
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    Status,
    token_logprobs,
)
from hydra_engine.server.tool_objects import CallArguments, CallStart, Content, Event
from hydra_engine.server.tools import ToolParser


@dataclass(slots=True)
class _Message:
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def part(self) -> OutputText:
        return OutputText("".join(self.texts), logprobs=self.logprobs)


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

    def __init__(self, name: str, parser: ToolParser, number: Callable[[], int]) -> None:
        self.closed: list[OutputItem] = []
        self._name = name
        self._parser = parser
        self._number = number
        self._open: _Message | _Call | None = None
        self._logprobs: list[TokenLogprob] = []
        self._num_messages = 0

    def feed(self, text: str, logprobs: Sequence[TextLogprob] | None) -> list[AnyResponseEvent]:
        self._logprobs += token_logprobs(logprobs)
        return self._taken(self._parser.feed(text)) if text else []

    def finish(self, status: Status) -> list[AnyResponseEvent]:
        """Closes the last item; of nothing at all becomes an empty message."""
        found = self._taken(self._parser.finish())
        if self._open is None or (self._logprobs and isinstance(self._open, _Message)):
            found += self._text("")
        return found + self._close(status)

    def _taken(self, parsed: Iterable[Event]) -> list[AnyResponseEvent]:
        found: list[AnyResponseEvent] = []
        for one in parsed:
            match one:
                case Content(text):
                    found += self._text(text)
                case CallStart(_, id, name):
                    found += self._close("completed") + self._begin(_Call(id.replace("call_", "fc_", 1), id, name))
                case CallArguments(_, text):
                    assert isinstance(self._open, _Call)
                    self._open.texts.append(text)
                    found.append(
                        events.ArgumentsDelta(
                            sequence_number=self._number(), item_id=self._open.id, output_index=self._index, delta=text
                        )
                    )
        return found

    def _text(self, text: str) -> list[AnyResponseEvent]:
        found: list[AnyResponseEvent] = []
        if not isinstance(self._open, _Message):
            self._num_messages += 1
            number = f"_{self._num_messages}" if self._num_messages > 1 else ""
            found += self._close("completed") + self._begin(_Message(self._name + number))
        message, logprobs = self._open, self._logprobs
        assert isinstance(message, _Message)
        if text or logprobs:
            self._logprobs = []
            message.texts.append(text)
            message.logprobs += logprobs
            found.append(
                events.OutputTextDelta(
                    sequence_number=self._number(),
                    item_id=message.id,
                    output_index=self._index,
                    delta=text,
                    logprobs=logprobs,
                )
            )
        return found

    @property
    def _index(self) -> int:
        return len(self.closed)

    def _begin(self, item: _Message | _Call) -> list[AnyResponseEvent]:
        self._open = item
        if isinstance(item, _Call):
            return [self._added(item.as_item("in_progress"))]
        begun = events.ContentPartAdded
        added = self._added(OutputMessage(item.id, "in_progress", []))
        part = begun(sequence_number=self._number(), item_id=item.id, output_index=self._index, part=OutputText(""))
        return [added, part]

    def _added(self, item: OutputItem) -> AnyResponseEvent:
        return events.OutputItemAdded(sequence_number=self._number(), output_index=self._index, item=item)

    def _close(self, status: Status) -> list[AnyResponseEvent]:
        item, index = self._open, self._index
        if item is None:
            return []
        self._open = None
        done: OutputItem
        found: list[AnyResponseEvent]
        if isinstance(item, _Call):
            done = item.as_item(status)
            found = [
                events.ArgumentsDone(
                    sequence_number=self._number(),
                    item_id=item.id,
                    output_index=index,
                    name=item.name,
                    arguments=done.arguments,
                )
            ]
        else:
            part = item.part
            done = OutputMessage(item.id, status, [part])
            found = [
                events.OutputTextDone(
                    sequence_number=self._number(),
                    item_id=item.id,
                    output_index=index,
                    text=part.text,
                    logprobs=part.logprobs,
                ),
                events.ContentPartDone(sequence_number=self._number(), item_id=item.id, output_index=index, part=part),
            ]
        self.closed.append(done)
        last = events.OutputItemDone(sequence_number=self._number(), output_index=index, item=done)
        return [*found, last]
