"""Parsers of tool calls in a model's growing text, character by character.

Text that is not a call is never lost: what only looked like one, or calls a function that was not offered, is content.
Once a call has begun, with a known name and an object of arguments, its arguments are passed on as the model writes
them; whether they are valid JSON is known only at their end, and the API leaves that check to the caller. Time is
linear in the text. Does not know schemas or requests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hydra_engine.server.tools.function_blocks import FUNCTION, FunctionBlock
from hydra_engine.server.tools.tool_objects import SPACE, CallObject, Content, Event, Output, object_text

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THINKING = "<think>", "</think>"


class PlainText:
    """A parser that returns all text as content, for a model whose calls are not read."""

    is_cut = False

    def parse(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ForcedCall:
    """A parser for text that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._output = Output()
        self._texts: list[str] = []

    @property
    def is_cut(self) -> bool:
        return bool(self._texts) and object_text("".join(self._texts)) is None

    def parse(self, text: str) -> list[Event]:
        if text and not self._texts:
            self._output.start(self._name)
        self._texts += [text] if text else []
        self._output.arguments(text)
        return self._output.drain()

    def finish(self) -> list[Event]:
        return []


class HermesParser:
    """A parser of calls among text, between `<tool_call>` and `</tool_call>`: `{"name": ..., "arguments": {...}}` as
    Hermes and Qwen models write them, or `<function=NAME>` as Qwen3-Coder and Qwen3.5 do (`FunctionBlock`); with `bare`
    the latter also without the marks. Text between the `thinking` marks calls nothing; with `opened` it begins inside
    them."""

    def __init__(
        self,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        bare: bool = False,
        thinking: tuple[str, str] = THINKING,
        opened: bool = False,
    ) -> None:
        self._names = names
        self._parameters = parameters or {}
        self._output = Output(max_calls)
        self._thinking = thinking
        self._openings = (OPENING, thinking[0], *((FUNCTION,) if bare else ()))
        self._first = re.compile("[" + re.escape("".join({mark[0] for mark in (*self._openings, thinking[1])})) + "]")
        self._thinks = opened
        self._call: CallObject | FunctionBlock | None = None
        self._is_over = False  # the call has been read; its closing mark may follow
        self._held = ""  # may become the next mark
        self._is_ended = False  # no more text follows, so no mark can complete
        self.is_cut = False

    def parse(self, text: str) -> list[Event]:
        index = 0
        while index < len(text):
            if self._call is None and not self._held:  # all text before a possible mark is content
                found = self._first.search(text, index)
                end = found.start() if found else len(text)
                self._output.text(text[index:end])
                index = end
            elif isinstance(self._call, FunctionBlock) and not self._is_over:
                index = self._call.skip(text, index)
            if index < len(text):
                self._next(text[index])
                index += 1
        return self._output.drain()

    def finish(self) -> list[Event]:
        held, self._held, self._is_ended = self._held, "", True
        if self._is_over:  # part of its closing mark is dropped
            held = "" if CLOSING.startswith(held) else held
        for char in held:
            self._plain(char)
        call = self._call
        if isinstance(call, FunctionBlock):
            call.finish()
        if call is not None and not call.begun:
            self._output.text(_raw(call))
        self.is_cut = call is not None and call.is_cut and self._output.is_wanted
        return self._output.finish()

    def _next(self, char: str) -> None:
        if self._held or self._may_be_mark(char):
            self._mark(char)
        else:
            self._plain(char)

    @property
    def _marks(self) -> tuple[str, ...]:
        if self._call is None:
            return (self._thinking[1],) if self._thinks else self._openings
        is_empty = isinstance(self._call, CallObject) and self._call.is_empty
        return (CLOSING, FUNCTION) if is_empty else (CLOSING,)

    def _mark(self, char: str) -> None:
        """Reads a character of a possible mark. If it cannot become one, its characters are read as text."""
        held, marks = self._held + char, self._marks
        if held in marks:
            self._held = ""
            self._on_mark(held)
        elif any(mark.startswith(held) for mark in marks):
            self._held = held
        else:
            self._held = ""
            if self._is_over:  # no closing mark came; another call may begin
                self._leave()
            else:
                self._plain(held[0])
                held = held[1:]
            for char in held:
                self._next(char)

    def _may_be_mark(self, char: str) -> bool:
        """True if `char` may begin a mark. Text in a JSON string does not, unless it follows a line break, which JSON
        strings cannot have: then the string was never closed."""
        call = self._call
        if call is None:
            return self._first.match(char) is not None and not self._is_ended
        if char != "<":
            return False
        if isinstance(call, FunctionBlock):  # the block reads marks itself
            return self._is_over
        return self._is_over or not call.in_string or call.last == "\n"

    def _on_mark(self, mark: str) -> None:
        call = self._call
        if call is not None:
            if mark == FUNCTION:
                self._begin_block(_raw(call))
                return
            if not call.begun:
                self._output.text(_raw(call) + CLOSING)
            self._leave()
        elif mark == OPENING:
            self._call = CallObject(self._names, self._output)
        elif mark == FUNCTION:
            self._begin_block("")
        else:
            self._thinks = not self._thinks
            self._output.text(mark)

    def _begin_block(self, before: str) -> None:
        self._call = FunctionBlock(self._names, self._parameters, self._output, before)
        for char in FUNCTION:
            self._call.parse(char)

    def _leave(self) -> None:
        self._call, self._is_over = None, False

    def _plain(self, char: str) -> None:
        call = self._call
        if call is None:
            self._output.text(char)
        elif self._is_over:
            if char not in SPACE:
                self._leave()
                self._next(char)
        elif (state := call.parse(char)) == "done":
            self._is_over = True
        elif state == "failed":
            self._on_failure(call, char)

    def _on_failure(self, call: CallObject | FunctionBlock, char: str) -> None:
        """Leaves a call that `char` does not fit. Before it has begun all of it is content, afterwards only the
        unexpected rest. `char` may begin a mark."""
        self._leave()
        if not call.begun:
            self._output.text(_raw(call)[:-1])
        self._next(char)


def _raw(call: CallObject | FunctionBlock) -> str:
    return call.raw if isinstance(call, FunctionBlock) else OPENING + call.raw


class JsonParser:
    """A parser of a bare object `{"name": ..., "parameters": {...}}`, several of them, or a list of them, without text
    before. `required`: the output is only calls, so the beginning of a call that was cut off is not text."""

    def __init__(self, names: Collection[str], max_calls: int | None = None, *, required: bool = False) -> None:
        self._names = names
        self._output = Output(max_calls)
        self._required = required
        self._call: CallObject | None = None
        self._before: list[str] = []  # characters before the first call
        self._is_list = False
        self._is_text = False
        self._num_read = 0

    @property
    def is_cut(self) -> bool:
        return self._call is not None and self._call.is_cut and self._output.is_wanted

    def parse(self, text: str) -> list[Event]:
        for index, char in enumerate(text):
            if self._is_text:
                self._output.text(text[index:])
                break
            self._read(char)
        return self._output.drain()

    def finish(self) -> list[Event]:
        call = self._call
        if not self._required and (call is None or not call.begun):
            self._output.text("".join(self._before) + ("" if call is None else call.raw))
        return self._output.finish()

    def _read(self, char: str) -> None:
        if self._call is None:
            if char == "{":
                self._call = CallObject(self._names, self._output)
            elif (
                char in SPACE
                or (char in ",;]" and self._num_read)
                or (char == "[" and not (self._num_read or self._is_list))
            ):
                self._is_list = self._is_list or char == "["
                if not self._num_read:
                    self._before.append(char)
                return
            else:
                self._give_up("".join(self._before) + char)
                return
        call = self._call
        state = call.parse(char)
        if state == "done":
            self._call = None
            self._before.clear()
            self._num_read += 1
        elif state == "failed":
            self._give_up(char if call.begun else "".join(self._before) + call.raw)

    def _give_up(self, text: str) -> None:
        self._call, self._is_text = None, True
        self._before.clear()
        self._output.text(text)
