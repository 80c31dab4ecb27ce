"""Fields that the requests of all generating endpoints share: their types with bounds, sampling, structured output,
tools, reasoning, and limits of pictures. Does not know the other fields of any endpoint, or whether a model, its
template or a grammar can do what they ask."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from hydra_engine.config import MAX_LIMIT_S, MAX_PRIORITY
from hydra_engine.core.call import MAX_CALL_ID_CHARS
from hydra_engine.core.call import MAX_NAME_CHARS as MAX_CALL_NAME_CHARS
from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from hydra_engine.core.prompting import (
    MAX_ARGUMENT_CHARS,
    MAX_PIXELS,
    MAX_TOOL_CHARS,
    TOOL_NAME,
    CheckedTools,
    PixelBudget,
)
from hydra_engine.core.request import Slo
from hydra_engine.core.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.strict_json import NO_NUL
from hydra_engine.server.tools.reasoning import Wish
from hydra_engine.server.tools.tool_grammars import check_parameters

logger = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 1 << 20
MAX_SALT_CHARS = 256
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 1 << 24  # of one text; a context holds less, and a body has its own limit
MAX_URL_CHARS = 1 << 28  # of a data URL; the bytes of pictures and videos are counted before decoding

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=NO_NUL)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
MediaUrl = Annotated[str, Meta(max_length=MAX_URL_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]  # an empty one has no effect
StopStrings = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Milliseconds = Annotated[float, Meta(ge=0.001, le=MAX_LIMIT_S * 1e3)]
# `$` would let a newline through at the end.
TokenName = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]  # an id as a key of a JSON object
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
RequestName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}\Z")]
# Fields of earlier calls.
CalledName = Annotated[str, Meta(min_length=1, max_length=MAX_CALL_NAME_CHARS, pattern=NO_NUL)]
ToolName = Annotated[str, Meta(pattern=rf"^{TOOL_NAME}\Z")]
Schema = Annotated[dict[str, Any], Meta(max_length=1024)]
CallId = Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID_CHARS, pattern=NO_NUL)]
ArgumentsText = Annotated[str, Meta(max_length=MAX_ARGUMENT_CHARS)]
Description = Annotated[str, Meta(max_length=MAX_TOOL_CHARS)]

_MAX_LOGGED_NAMES = 256
_logged_names: set[str] = set()

P = TypeVar("P")
C = TypeVar("C")


# ---- structured output: the fields of OpenAI, vLLM and SGLang, bounded in size

MAX_STRUCTURED_CHOICES = 4096
MAX_PATTERN_CHARS = 256

GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[
    list[Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]], Meta(min_length=1, max_length=MAX_STRUCTURED_CHOICES)
]
_NULL = msgspec.Raw(b"null")
SchemaName = Annotated[str, Meta(min_length=1, max_length=128)]


def no_schema() -> msgspec.Raw:
    """The default of an optional schema: msgspec reads `Raw | None` as null only, so the field's type is `Raw`."""
    return _NULL


class NamedSchema(msgspec.Struct, frozen=True):
    """A schema with a name. Output always follows it; `strict` changes nothing."""

    schema: msgspec.Raw
    name: SchemaName | None = None
    description: GrammarText | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of the output. `value` is the schema in TGI's form (huggingface_hub sends a `json_schema` that way),
    `schema` in llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    value: msgspec.Raw = msgspec.field(default_factory=no_schema)
    schema: msgspec.Raw = msgspec.field(default_factory=no_schema)


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. A schema may be JSON or its text."""

    json: msgspec.Raw = msgspec.field(default_factory=no_schema)
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # ignored: there is no fallback
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_CHARS)] | None = None
    structural_tag: None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=no_schema)
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=no_schema)
    ebnf: GrammarText | None = None


# ---- all generating endpoints


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(StructuredFields, frozen=True, kw_only=True):
    """The fields of all generating endpoints; null means the default everywhere."""

    model: Name | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    request_id: RequestName | None = None
    return_metrics: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS, pattern=NO_NUL)] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def answer_fields(self) -> str:
        """The fields that set the number of answers."""
        return "n"

    @property
    def num_prompt_copies(self) -> int:
        """Number of copies of the prompt's log probabilities in an answer."""
        return 1

    @property
    def logprob_fields(self) -> tuple[str, ...]:
        """The fields that set the number of log probabilities, the most important one last."""
        return "n", "max_tokens", "prompt_logprobs", "top_logprobs"

    @property
    def slo(self) -> Slo:
        return Slo(
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
        )


class SamplingFields(GenerationFields, frozen=True, kw_only=True):
    """The further fields of chat and completions."""

    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: StopStrings | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def content_of(content: list[P] | str, param: str, part_of: Callable[[P, str], C]) -> str | tuple[C, ...]:
    """A message's content for the engine. `part_of` converts a part, given its position as the error's `param`."""
    if isinstance(content, str):
        return content
    return tuple(part_of(part, f"{param}[{index}]") for index, part in enumerate(content))


def sampling_of(fields: GenerationFields, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
    """Sampling parameters: `chosen`, then the request's fields, then `defaults`. Raises InvalidRequest."""
    if (grammar := grammar_of(fields)) is not None:
        if chosen.get("grammar") is not None:
            raise InvalidRequest("output can have one form only; leave out one of them", param=grammar.param)
        chosen["grammar"] = grammar
    if fields.logit_bias:
        chosen["logit_bias"] = {int(token): bias for token, bias in fields.logit_bias.items()}
    for name in SamplingParams.__dataclass_fields__.keys() & fields.__struct_fields__:
        if name not in chosen and name != "logit_bias" and (value := getattr(fields, name)) is not None:
            chosen[name] = value
    if (stop := chosen.get("stop")) is not None:
        chosen["stop"] = tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)
    return defaults.with_fields(**{name: value for name, value in chosen.items() if value is not None})


def log_once(name: str) -> None:
    if name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
        _logged_names.add(name)
        logger.info("ignoring the request field %r", name[:64])


# ---- structured output as one `Grammar`


def grammar_of(fields: StructuredFields) -> Grammar | None:
    """The grammar of the output, None if it is free. Raises InvalidRequest for an invalid grammar, and for more than
    one."""
    outputs = fields.structured_outputs or StructuredOutputs()
    json_object = Grammar("json_object", param="structured_outputs.json_object") if outputs.json_object else None
    candidates = (
        _of_response_format(fields.response_format),
        _with_white_space(_of_schema(outputs.json, "structured_outputs.json"), outputs),
        _with_white_space(json_object, outputs),
        _of_text("regex", outputs.regex, "structured_outputs.regex"),
        _of_choices(outputs.choice, "structured_outputs.choice"),
        _of_rules(outputs.grammar, "structured_outputs.grammar"),
        _of_schema(fields.guided_json, "guided_json"),
        _of_text("regex", fields.guided_regex, "guided_regex"),
        _of_choices(fields.guided_choice, "guided_choice"),
        _of_rules(fields.guided_grammar, "guided_grammar"),
        _of_text("regex", fields.regex, "regex"),
        _of_schema(fields.json_schema, "json_schema"),
        _of_text("ebnf", fields.ebnf, "ebnf"),
    )
    grammars = [grammar for grammar in candidates if grammar is not None]
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars[:2])
        raise InvalidRequest(f"output can have one form only; leave out one of {names}", param=grammars[1].param)
    return grammars[0] if grammars else None


def _of_response_format(field: ResponseFormat | None) -> Grammar | None:
    if field is None:
        return None
    schemas = {"response_format.value": field.value, "response_format.schema": field.schema}
    if field.json_schema is not None:
        schemas["response_format.json_schema.schema"] = field.json_schema.schema
    nothing = (b"null", b"{}") if field.type == "json_object" else (b"null",)
    given = [(schema, param) for param, schema in schemas.items() if bytes(schema) not in nothing]
    if len(given) > 1 or (given and field.type == "text"):
        param, rest = given[0][1], "the other schema" if len(given) > 1 else "the type text"
        raise InvalidRequest(f"{param} and {rest} contradict each other; leave out one of them", param=param)
    if given:
        return schema_grammar(*given[0])
    if field.type == "json_schema":
        param = f"response_format.json_schema{'.schema' if field.json_schema else ''}"
        raise InvalidRequest(f"{param} is required", param=param)
    return Grammar("json_object", param="response_format") if field.type == "json_object" else None


def _with_white_space(grammar: Grammar | None, field: StructuredOutputs) -> Grammar | None:
    """A JSON grammar with the requested white space, written into the schema without parsing it."""
    if grammar is None:
        return None
    if field.disable_any_whitespace:
        options = '{"whitespace_flexible": false, "whitespace_pattern": null}'
    elif field.whitespace_pattern is not None:
        options = json.dumps({"whitespace_pattern": field.whitespace_pattern})
    else:
        return grammar
    head, brace, rest = (grammar.source or '{"type": "object"}').partition("{")
    if head.strip() or not brace:
        return grammar  # not a schema; compiling it reports the error
    comma = "" if rest.lstrip().startswith("}") else ","
    return Grammar("json_schema", f'{{"x-guidance": {options}{comma}{rest}', grammar.param)


def _of_schema(raw: msgspec.Raw, param: str) -> Grammar | None:
    """The grammar of a schema that is JSON or a string of JSON; None for null."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return None if text == "null" else Grammar("json_schema", text, param)


def schema_grammar(schema: msgspec.Raw, param: str) -> Grammar:
    """The grammar of a required schema. Raises InvalidRequest, naming `param`."""
    grammar = _of_schema(schema, param)
    if grammar is None:
        raise InvalidRequest(f"{param} is required", param=param)
    if not grammar.source.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return grammar


def _of_text(kind: str, source: str | None, param: str) -> Grammar | None:
    return None if source is None else Grammar(kind, source, param)


def _of_choices(choices: list[str] | None, param: str) -> Grammar | None:
    return None if choices is None else Grammar("choice", json.dumps(choices, ensure_ascii=False), param)


def _of_rules(source: str | None, param: str) -> Grammar | None:
    """A grammar in Lark's form, or in EBNF if it contains `::=`."""
    return _of_text("ebnf" if source is not None and "::=" in source else "lark", source, param)


# ---- tools as the engine takes them


class GivenFunction(NamedTuple):
    """A function as a client declares it; `param` is the request's field of its parameters."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    param: str


def plain_functions(functions: Iterable[GivenFunction]) -> tuple[Mapping[str, Any], ...]:
    """Tools in the one form and field order that chat templates were trained with. Raises InvalidRequest."""
    tools = CheckedTools()
    for one in functions:
        described = {"description": one.description, "parameters": one.parameters}
        given = {key: value for key, value in described.items() if value is not None}
        tools.add({"type": "function", "function": {"name": one.name, **given}}, one.param.partition(".")[0])
        check_parameters(one.parameters, one.name, one.param)
    return tuple(tools)


def unsupported_tool(param: str, kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: tools of type {kind!r} are not supported by this server; offer functions only",
        param=f"{param}.type",
        code="unsupported_parameter",
    )


# ---- reasoning

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]


class ThinkingConfig(msgspec.Struct, frozen=True):
    """Anthropic's `thinking`, and the chat field of DeepSeek, GLM and Kimi. The budget is not enforced; it is only a
    target in those APIs too."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_enabled(self) -> bool:
        if self.budget_tokens is not None:
            log_once("thinking.budget_tokens")
        return self.type != "disabled"


class ReasoningConfig(msgspec.Struct, frozen=True):
    """`reasoning` of Responses; reasoning is returned in full, never as a summary."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def wish(self) -> Wish:
        for name in ("summary", "generate_summary"):
            if getattr(self, name) is not None:
                log_once(f"reasoning.{name}")
        return Wish(effort=self.effort, param="reasoning.effort")


# ---- `mm_processor_kwargs`: limits for the number of pixels of each picture of a request

ProcessorSettings = Annotated[dict[str, Any], Meta(max_length=16)]
PixelCount = Annotated[int, Meta(ge=1, le=MAX_PIXELS)]


class _PixelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


def pixel_budget(settings: dict[str, Any] | None) -> PixelBudget:
    """The pixel limits in `mm_processor_kwargs`, which may hold nothing else. Raises InvalidRequest."""
    param = "mm_processor_kwargs"
    names = _PixelSettings.__struct_fields__
    if other := next((name for name in settings or {} if name not in names), None):
        raise InvalidRequest(
            f"{param} may have {' and '.join(names)} only; leave out {other[:64]!r}",
            param=f"{param}.{other[:64]}",
            code="unsupported_parameter",
        )
    try:
        chosen = msgspec.convert(settings or {}, _PixelSettings)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{' and '.join(names)} of {param} must be integers from 1 to {MAX_PIXELS}", param=param
        ) from None
    if chosen.min_pixels is not None and chosen.max_pixels is not None and chosen.min_pixels > chosen.max_pixels:
        raise InvalidRequest(f"{param}: min_pixels must not exceed max_pixels", param=f"{param}.min_pixels")
    return PixelBudget(chosen.min_pixels, chosen.max_pixels)
