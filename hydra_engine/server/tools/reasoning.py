"""Reasoning: how a model marks what it thinks before it answers, whether the prompt has begun it, and the parser that
takes it out of a text as it grows.

Each endpoint shows it in its API's own words. Does not know HTTP, the requests of any endpoint, or how calls are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.tool_objects import Event, Reasoning, ToolParser
from hydra_engine.server.tools.tool_parsers import THINKING, PlainText

_MARKS = (THINKING, ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thinking on and off
EFFORT = "reasoning_effort"
_BLOCK = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TEXTS = frozenset({"choice", "regex", "lark", "ebnf"})  # grammars that can describe the reasoning too


class ReasoningParser:
    """Reasoning first, up to its mark, then what `inner` makes of the rest. It begins with its mark and nothing but
    white space before, unless the prompt has `opened` it. White space around it is left out. Events do not depend on
    where the text is cut."""

    def __init__(
        self, inner: ToolParser, marks: tuple[str, str], *, opened: bool, shown: bool = True, streamed: bool = True
    ) -> None:
        self.inner = inner
        self._start, self._end = marks
        self._empty = re.compile(rf"\s*(?:{re.escape(marks[0])}\s*)*")  # also once more behind the prompt's mark
        self._state = "thinking" if opened else "before"  # thinking, behind (in white space), answering
        self._shown = shown
        self._streamed = streamed
        self._thoughts: list[str] = []  # that are not sent yet
        self._space: list[str] = []  # before what is held, and not sent unless more than white space follows
        self._held = ""
        self._has_begun = False

    @property
    def is_cut(self) -> bool:
        return self.inner.is_cut

    @property
    def is_answering(self) -> bool:
        """Whether all that follows is `inner`'s."""
        return self._state == "answering"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is read in the answer itself."""
        return isinstance(self.inner, PlainText)

    def feed(self, text: str) -> list[Event]:
        if self._state == "answering":
            return self.inner.feed(text)
        self._held += text
        events: list[Event] = []
        if self._state == "before":
            events += self._before()
        if self._state == "thinking":
            events += self._thinking()
        if self._state == "behind":
            events += self._behind()
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == "before":
            events += self.inner.feed("".join(self._space) + self._held)
        elif self._state == "thinking":
            events += self._think(self._held.rstrip()) + self._flush()
        return events + self.inner.finish()

    def _before(self) -> list[Event]:
        text = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(text)])
        self._held = text
        if text.startswith(self._start):
            self._state, self._held = "thinking", text[len(self._start) :]
            self._space.clear()
        elif not self._start.startswith(text):
            return self._answer("".join(self._space) + text)
        return []

    def _thinking(self) -> list[Event]:
        if not self._has_begun:
            self._held = self._empty.sub("", self._held, count=1)
            if not self._held or self._start.startswith(self._held):
                return []
        place = self._held.find(self._end)
        if place >= 0:
            thought, self._held = self._held[:place], self._held[place + len(self._end) :]
            self._state = "behind"
            return self._think(thought.rstrip()) + self._flush()
        more, self._held = _cut(self._held, len(self._held) - _overlap(self._held, self._end))
        thought, space = _cut(more, len(more.rstrip()))
        events = self._think(thought)
        self._space.append(space)
        return events

    def _behind(self) -> list[Event]:
        self._held = self._held.lstrip()
        return self._answer(self._held) if self._held else []

    def _answer(self, text: str) -> list[Event]:
        self._state, self._held = "answering", ""
        return self.inner.feed(text)

    def _think(self, text: str) -> list[Event]:
        """`text` follows the white space, which is no part of the reasoning where nothing does."""
        if not text:
            return []
        self._has_begun = True
        text = "".join(self._space) + text
        self._space.clear()
        if not self._shown:
            return []
        if self._streamed:
            return [Reasoning(text)]
        self._thoughts.append(text)
        return []

    def _flush(self) -> list[Event]:
        text = "".join(self._thoughts)
        self._thoughts.clear()
        return [Reasoning(text)] if text else []


def _cut(text: str, place: int) -> tuple[str, str]:
    return text[:place], text[place:]


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


# ---- what a request and a chat template say of it


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request says of reasoning. `effort`: none to max. `required`: a model that cannot be kept from thinking is
    no answer to a request for none. `read`: reasoning is taken out of the text; `shown` and `streamed`: how it is
    given."""

    on: bool | None = None
    effort: str | None = None
    param: str = EFFORT
    required: bool = True
    read: bool = True
    shown: bool = True
    streamed: bool = True

    @property
    def wants(self) -> bool | None:
        """Whether the model is to think; None: as it does by itself."""
        if self.on is not None:
            return self.on
        return None if self.effort is None else self.effort != "none"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the model that answers a request thinks. `place` is where a prompt ends: opened (inside the reasoning),
    closed (behind it) or free. `known`: reasoning is no part of the answer, and what constrains the output begins
    behind it; `reads`: it is taken out of the text; `shown` and `streamed` say how it is given."""

    marks: tuple[str, str] = THINKING
    place: str = "free"
    known: bool = False
    reads: bool = False
    shown: bool = True
    streamed: bool = True

    @property
    def opened(self) -> bool:
        return self.place == "opened"

    def parser(self, inner: ToolParser) -> ReasoningParser:
        return ReasoningParser(inner, self.marks, opened=self.opened, shown=self.shown, streamed=self.streamed)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params`, with what constrains the output behind the reasoning."""
        if not self.known:
            return params
        params = replace(params, skip_special_tokens=False)  # the marks are special tokens of some models
        grammar = params.grammar
        if grammar is None or self.place == "closed" or self._describes_all(grammar.kind, grammar.source):
            return params
        return replace(params, grammar=grammar.after_reasoning(*self.marks, opened=self.opened))

    def _describes_all(self, kind: str, source: str) -> bool:
        """Whether a grammar names marks itself."""
        plain = source.replace("\\", "")
        return kind in _TEXTS and any(mark in plain for mark in self.marks)


@lru_cache(maxsize=64)
def marks_of(parser: str, template: str | None) -> tuple[str, str] | None:
    """The marks of the template, else of the configured parser; None: the model does not think."""
    known = next((marks for marks in _MARKS if any(mark in (template or "") for mark in marks)), None)
    return known if parser in ("auto", "none") else known or THINKING


def with_wish(variables: Mapping[str, Any], wish: Wish, template: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables with what is wished, unless they say it already, and what the template does not read."""
    chosen, ignored = dict(variables), []
    switch = switch_of(template)
    if wish.wants is not None and switch is not None:
        chosen.setdefault(switch, wish.wants)
    if wish.effort is not None and _reads(template, EFFORT):
        chosen.setdefault(EFFORT, wish.effort)
    elif wish.effort is not None and (switch is None or wish.effort != "none"):
        ignored.append(wish.param)
    if wish.on is not None and switch is None:
        ignored.append(wish.param)
    return chosen, tuple(ignored)


def switch_of(template: str) -> str | None:
    """The variable by which a template turns thinking on and off."""
    return next((name for name in _SWITCHES if _reads(template, name)), None)


def place_of(prompt_end: str, marks: tuple[str, str], parser: str) -> str:
    """Says where an answer begins, by the text that ends its prompt: opened, closed or free."""
    start, end = (prompt_end.rfind(mark) for mark in marks)
    if start < 0 and end < 0:
        return "opened" if parser == "deepseek_r1" else "free"
    return "opened" if start > end else "closed"


def always_thinks(wish: Wish, place: str, template: str) -> InvalidRequest | None:
    """Why a wish for no reasoning cannot be met."""
    if not wish.required or wish.wants is not False or place != "opened":
        return None
    if switch_of(template) is not None or _reads(template, EFFORT):
        return None
    return InvalidRequest(
        "the chat template of this model begins the reasoning in any case, and no variable turns it off; leave out "
        f"{wish.param}, or take the answer without its reasoning (include_reasoning: false in a chat)",
        param=wish.param,
        code="unsupported_parameter",
    )


@lru_cache(maxsize=64)
def _reads(template: str, name: str) -> bool:
    """Whether blocks of a template read a variable of this name. One that is set, or the name of an argument, is not
    read."""
    variable = re.compile(rf"(?<![\w.'\"]){name}(?![\w'\"]|\s*=[^=])")
    return any(variable.search(block) for block in _BLOCK.findall(template))
