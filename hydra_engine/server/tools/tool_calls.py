"""Tool calls: the calls that a request allows, the grammar that forces one, and calls as events.

Each endpoint shows the events in its API's terms. `tool_parsers.py` reads calls from a model's text. Does not know HTTP
or the requests of any endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.core.schemas.numbers import schema_text
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.function_blocks import FUNCTION
from hydra_engine.server.tools.reasoning import Thinking
from hydra_engine.server.tools.tool_grammars import calls_of, calls_schema, describes_calls, parameters_schema
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event, Reasoning, ToolParser
from hydra_engine.server.tools.tool_parsers import OPENING, ForcedCall, HermesParser, JsonParser, PlainText

TAGGED = frozenset({"hermes", "qwen3_coder"})  # dialects with calls between marks
_SAME = {"qwen3_xml": "qwen3_coder"}  # vLLM has two parsers for one format
NO_THINKING = Thinking()


class ParsedCall(NamedTuple):
    """A complete call. `arguments` is the model's text: JSON, unless it was cut off or not constrained."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request allows. `tools` are in OpenAI's form; `mode` is none, auto, required or named (then
    `name`); at most one call unless `parallel`. `dialect` is the model's own format of calls: hermes, qwen3_coder, json
    or none. Raises InvalidRequest, which names the fields of OpenAI's API."""

    tools: tuple[Mapping[str, Any], ...] = ()
    mode: str = "none"
    name: str = ""
    parallel: bool = True
    dialect: str = "none"

    def __post_init__(self) -> None:
        if self.mode in ("required", "named") and not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if self.mode == "named" and self.name not in self._names:
            raise InvalidRequest("tool_choice names a function that is not among the tools", param="tool_choice")

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def prompt_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools in the prompt; none if the mode is none."""
        return () if self.mode == "none" else self.tools

    def grammar(self) -> Grammar | None:
        """The grammar that forces a call, or None if no call is forced."""
        if self.mode == "named":
            tool = next(tool for tool in self.tools if tool["function"]["name"] == self.name)
            schema = parameters_schema(tool)
        elif self.mode == "required":
            schema = calls_schema(self.tools, self.parallel)
        else:
            return None
        return Grammar("json_schema", schema_text(schema), param="tools")

    def parser(self, thinking: Thinking = NO_THINKING) -> ToolParser | None:
        """Returns a new parser for one answer, or None if the text is the answer."""
        if thinking.reads:
            return thinking.parser(self._parser(thinking) or PlainText())
        return self._parser(thinking)

    def _parser(self, thinking: Thinking) -> ToolParser | None:
        if not self.prompt_tools:
            return None
        most = None if self.parallel else 1
        opened = thinking.is_opened and not thinking.reads  # the text begins inside the reasoning
        if self.mode == "named":
            return ForcedCall(self.name)
        if self.mode == "required":
            return JsonParser(self._names, most, required=True)
        if self.dialect in TAGGED:
            return HermesParser(
                self._names,
                most,
                parameters={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools},
                bare=self.dialect == "qwen3_coder",
                thinking=thinking.marks,
                opened=opened,
            )
        return JsonParser(self._names, most) if self.dialect == "json" and not opened else PlainText()

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Returns `params` changed to allow or force calls; a requested output form holds for answers without a call.
        Raises InvalidRequest."""
        forced = self.grammar()
        if forced is not None:
            return replace(params, grammar=forced)
        if self.mode != "auto" or not self.tools:
            return params
        if self.dialect in TAGGED:  # the marks of calls are special tokens of some models
            params = replace(params, skip_special_tokens=False)
        form = params.grammar
        if form is None or describes_calls(form, self.dialect):
            return params
        calls = calls_of(self.dialect, self.tools, self.parallel)
        if calls is None:
            raise InvalidRequest(
                "this server does not read calls of this model, so a model that may choose a tool cannot be kept to a "
                "form of the output; leave out tools, set tool_choice to none, required or a function, or start the "
                "server with --tool-parser hermes, qwen3_coder or json",
                param=form.param,
                code="unsupported_parameter",
            )
        return replace(params, grammar=form.with_calls(calls))

    def with_dialect(self, configured: str, chat_template: str | None) -> ToolUse:
        """Returns a copy with the dialect of the model. Raises InvalidRequest if its chat template ignores tools that
        it may call."""
        ignores_tools = configured == "auto" and chat_template is not None and "tools" not in chat_template
        if self.mode == "auto" and self.tools and ignores_tools:
            raise InvalidRequest(
                "the chat template of this model knows no tools, so the model cannot choose one; set tool_choice "
                "to required, a function or none",
                param="tools",
                code="unsupported_parameter",
            )
        return replace(self, dialect=dialect_of(configured, chat_template))


def dialect_of(configured: str, chat_template: str | None) -> str:
    """The dialect: hermes, qwen3_coder, json or none; the configured one, or the one that the chat template asks
    for."""
    if configured != "auto":
        return _SAME.get(configured, configured)
    template = chat_template or ""
    if OPENING not in template:
        return "none"
    return "qwen3_coder" if FUNCTION in template else "hermes"


def join_events(events: Iterable[Event]) -> list[str | Reasoning | ParsedCall]:
    """The texts, calls and reasoning of a complete answer, in order."""
    items: list[tuple[Event, list[str]]] = []
    for event in events:
        match event:
            case CallStart():
                items.append((event, []))
            case CallArguments(text=text):
                items[-1][1].append(text)
            case Content(text) | Reasoning(text) if items and type(items[-1][0]) is type(event):
                items[-1][1].append(text)
            case Content(text) | Reasoning(text):
                items.append((event, [text]))
    return [_whole(first, "".join(texts)) for first, texts in items]


def _whole(first: Event, text: str) -> str | Reasoning | ParsedCall:
    if isinstance(first, CallStart):
        return ParsedCall(first.id, first.name, text)
    return Reasoning(text) if isinstance(first, Reasoning) else text


class ReadAnswer(NamedTuple):
    text: str
    calls: tuple[ParsedCall, ...]
    reasoning: str


def collect(events: Iterable[Event]) -> ReadAnswer:
    """The text, calls and reasoning of a complete answer, each joined."""
    items = join_events(events)
    calls = tuple(item for item in items if isinstance(item, ParsedCall))
    reasoning = "".join(item.text for item in items if isinstance(item, Reasoning))
    return ReadAnswer("".join(item for item in items if isinstance(item, str)), calls, reasoning)
