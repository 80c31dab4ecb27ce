"""Reasoning: how a model marks its thinking before the answer, whether the prompt has opened it, and the parser that
separates it from a growing text.

Each endpoint shows it in its API's terms. Does not know HTTP, the requests of any endpoint, or how calls are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.tool_objects import Event, Reasoning, ToolParser
from hydra_engine.server.tools.tool_parsers import THINKING, PlainText

_MARKS = (THINKING, ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_SWITCHES = ("enable_thinking", "thinking")  # variables with which templates turn thinking on and off
EFFORT = "reasoning_effort"
_BLOCK = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TEXTS = frozenset({"choice", "regex", "lark", "ebnf"})  # grammars that can describe the reasoning too


class ReasoningParser:
    """A parser of reasoning up to its end mark; the rest goes to `inner`. Reasoning begins with its start mark, after
    white space only, unless the prompt has `opened` it. White space around it is dropped. Events do not depend on how
    the text is split."""

    def __init__(
        self, inner: ToolParser, marks: tuple[str, str], *, opened: bool, shown: bool = True, streamed: bool = True
    ) -> None:
        self.inner = inner
        self._start, self._end = marks
        self._empty = re.compile(rf"\s*(?:{re.escape(marks[0])}\s*)*")  # also a repeat of the prompt's mark
        self._state = "thinking" if opened else "before"  # before, thinking, behind (white space after it), answering
        self._shown = shown
        self._streamed = streamed
        self._thoughts: list[str] = []  # not sent yet
        self._space: list[str] = []  # white space before the held text; sent only if other text follows
        self._held = ""
        self._has_begun = False

    @property
    def is_cut(self) -> bool:
        return self.inner.is_cut

    @property
    def is_answering(self) -> bool:
        """True if all further text goes to `inner`."""
        return self._state == "answering"

    @property
    def is_plain(self) -> bool:
        """True if the answer itself is not parsed."""
        return isinstance(self.inner, PlainText)

    def parse(self, text: str) -> list[Event]:
        if self._state == "answering":
            return self.inner.parse(text)
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
            events += self.inner.parse("".join(self._space) + self._held)
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
        return self.inner.parse(text)

    def _think(self, text: str) -> list[Event]:
        """Events for more reasoning, preceded by the held white space; trailing white space is dropped."""
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
    """Number of characters at the end of `text` that may begin `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


# ---- reasoning in requests and chat templates


@dataclass(frozen=True, slots=True)
class Wish:
    """A request's wish about reasoning. `effort` is none to max. `required`: a request for no reasoning is refused if
    the model always thinks. `read`: reasoning is separated from the text; `shown`, `streamed`: how the client gets
    it."""

    enabled: bool | None = None
    effort: str | None = None
    param: str = EFFORT
    required: bool = True
    read: bool = True
    shown: bool = True
    streamed: bool = True

    @property
    def wants_thinking(self) -> bool | None:
        """True if the model is to think, None for its default."""
        if self.enabled is not None:
            return self.enabled
        return None if self.effort is None else self.effort != "none"


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking of the model that answers a request. `place` is the state at the end of the prompt: opened (inside
    the reasoning), closed (after it) or free. `known`: reasoning is not part of the answer, and output constraints
    begin after it. `reads`: it is separated from the text. `shown`, `streamed`: how the client gets it."""

    marks: tuple[str, str] = THINKING
    place: str = "free"
    known: bool = False
    reads: bool = False
    shown: bool = True
    streamed: bool = True

    @property
    def is_opened(self) -> bool:
        return self.place == "opened"

    def parser(self, inner: ToolParser) -> ReasoningParser:
        return ReasoningParser(inner, self.marks, opened=self.is_opened, shown=self.shown, streamed=self.streamed)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` with output constraints that begin after the reasoning."""
        if not self.known:
            return params
        params = replace(params, skip_special_tokens=False)  # the marks are special tokens of some models
        grammar = params.grammar
        if grammar is None or self.place == "closed" or self._describes_all(grammar.kind, grammar.source):
            return params
        return replace(params, grammar=grammar.after_reasoning(*self.marks, opened=self.is_opened))

    def _describes_all(self, kind: str, source: str) -> bool:
        """True if a grammar names the marks itself."""
        plain = source.replace("\\", "")
        return kind in _TEXTS and any(mark in plain for mark in self.marks)


@lru_cache(maxsize=64)
def marks_of(parser: str, template: str | None) -> tuple[str, str] | None:
    """The marks in the template, else the configured parser's; None if the model does not think."""
    known = next((marks for marks in _MARKS if any(mark in (template or "") for mark in marks)), None)
    return known if parser in ("auto", "none") else known or THINKING


def apply_wish(variables: Mapping[str, Any], wish: Wish, template: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(variables of the template with the wish applied, names of wishes that the template ignores); variables given by
    the client win."""
    chosen, ignored = dict(variables), []
    switch = switch_of(template)
    if wish.wants_thinking is not None and switch is not None:
        chosen.setdefault(switch, wish.wants_thinking)
    if wish.effort is not None and _reads(template, EFFORT):
        chosen.setdefault(EFFORT, wish.effort)
    elif wish.effort is not None and (switch is None or wish.effort != "none"):
        ignored.append(wish.param)
    if wish.enabled is not None and switch is None:
        ignored.append(wish.param)
    return chosen, tuple(ignored)


def switch_of(template: str) -> str | None:
    """The variable with which a template turns thinking on and off, or None."""
    return next((name for name in _SWITCHES if _reads(template, name)), None)


def place_of(prompt_end: str, marks: tuple[str, str], parser: str) -> str:
    """The state in which an answer begins, from the text at the end of its prompt: opened, closed or free."""
    start, end = (prompt_end.rfind(mark) for mark in marks)
    if start < 0 and end < 0:
        return "opened" if parser == "deepseek_r1" else "free"
    return "opened" if start > end else "closed"


def always_thinks(wish: Wish, place: str, template: str) -> InvalidRequest | None:
    """The error for a wish for no reasoning that the model cannot meet, or None."""
    if not wish.required or wish.wants_thinking is not False or place != "opened":
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
    """True if the template's blocks read a variable of this name. Assignments and argument names do not count."""
    variable = re.compile(rf"(?<![\w.'\"]){name}(?![\w'\"]|\s*=[^=])")
    return any(variable.search(block) for block in _BLOCK.findall(template))
