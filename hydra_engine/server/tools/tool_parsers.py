"""Tool calls out of a model's text, as it grows, character by character.

Nothing that is not a call gets lost: what only looked like one, or calls a function that was not offered, is content.
Once a call has begun, with a known name and an object of arguments, its arguments are handed on as the model writes
them; whether they are valid JSON is known only at their end, and the API leaves that check to the caller. Reading costs
time in proportion to the text. Does not know schemas or requests.
"""

from __future__ import annotations

from hydra_engine.server.tools.tool_objects import SPACE, CallObject, Content, Event, Output

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class PlainText:
    """The parser of a model that is shown tools and whose calls are not read."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ForcedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._output = Output()
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        if not self._begun:
            self._begun = True
            self._output.start(self._name)
        self._output.arguments(text)
        return self._output.take()

    def finish(self) -> list[Event]:
        return self.feed("")


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` among text, as Hermes and Qwen models write."""

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        self._names = names
        self._output = Output(most)
        self._call: CallObject | None = None
        self._is_over = False  # the call has been read; its closing mark may follow
        self._held = ""  # may become the mark that is waited for

    def feed(self, text: str) -> list[Event]:
        index = 0
        while index < len(text):
            if self._call is None and not self._held:  # up to what may be a mark all is content
                place = text.find("<", index)
                end = place if place >= 0 else len(text)
                self._output.text(text[index:end])
                index = end
            if index < len(text):
                self._next(text[index])
                index += 1
        return self._output.take()

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._is_over:  # a part of its closing mark says nothing
            held = "" if CLOSING.startswith(held) else held
        for char in held:
            self._plain(char)
        if self._call is not None and not self._call.begun:
            self._output.text(OPENING + self._call.raw)
        return self._output.finish()

    def _next(self, char: str) -> None:
        if self._held or (char == "<" and self._may_be_mark()):
            self._mark(char)
        else:
            self._plain(char)

    def _mark(self, char: str) -> None:
        """A `<` and what follows it, as long as it may be a mark."""
        held = self._held + char
        mark = OPENING if self._call is None else CLOSING
        if held == mark:
            self._held = ""
            self._on_mark()
        elif mark.startswith(held):
            self._held = held
        else:
            self._held = ""
            if self._is_over:  # without its closing mark; another call may begin
                self._leave()
            else:
                self._plain(held[0])
                held = held[1:]
            for char in held:
                self._next(char)

    def _may_be_mark(self) -> bool:
        """Text in a JSON string is no mark, unless a line break before it, which no JSON string has, shows that the
        string was never closed."""
        call = self._call
        return call is None or self._is_over or not call.in_string or call.last == "\n"

    def _on_mark(self) -> None:
        call = self._call
        if call is None:
            self._call = CallObject(self._names, self._output)
            return
        if not call.begun:
            self._output.text(OPENING + call.raw + CLOSING)
        self._leave()

    def _leave(self) -> None:
        self._call, self._is_over = None, False

    def _plain(self, char: str) -> None:
        call = self._call
        if call is None:
            self._output.text(char)
        elif self._is_over:
            if char not in SPACE:
                self._leave()
                self._output.text(char)
        elif (state := call.feed(char)) == "done":
            self._is_over = True
        elif state == "failed":
            self._on_failure(call, char)

    def _on_failure(self, call: CallObject, char: str) -> None:
        """Before a call has begun all of it is content; behind its arguments, what is not expected there."""
        self._leave()
        self._output.text(char if call.begun else OPENING + call.raw)


class JsonParser:
    """A bare object `{"name": ..., "parameters": {...}}`, several of them, or a list of them, and nothing before."""

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        self._names = names
        self._output = Output(most)
        self._call: CallObject | None = None
        self._before = ""  # what has been read before the first call
        self._is_text = False
        self._num_read = 0

    def feed(self, text: str) -> list[Event]:
        for index, char in enumerate(text):
            if self._is_text:
                self._output.text(text[index:])
                break
            self._read(char)
        return self._output.take()

    def finish(self) -> list[Event]:
        if self._call is None:
            self._output.text(self._before)
        elif not self._call.begun:
            self._output.text(self._before + self._call.raw)
        return self._output.finish()

    def _read(self, char: str) -> None:
        if self._call is None:
            if char == "{":
                self._call = CallObject(self._names, self._output)
            elif (
                char in SPACE
                or (char in ",;]" and self._num_read)
                or (char == "[" and not (self._num_read or self._before.strip()))
            ):
                self._before += "" if self._num_read else char
                return
            else:
                self._give_up(self._before + char)
                return
        call = self._call
        state = call.feed(char)
        if state == "done":
            self._call, self._before = None, ""
            self._num_read += 1
        elif state == "failed":
            self._give_up(char if call.begun else self._before + call.raw)

    def _give_up(self, text: str) -> None:
        self._call, self._before, self._is_text = None, "", True
        self._output.text(text)
