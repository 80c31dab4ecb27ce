"""Tables of fields of other APIs that no struct here has, per body and object: refused ones, with what to use instead,
and ignored ones, which cannot change the answer.

Does not know how unknown names are found (`http/body.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import msgspec

from hydra_engine.server.protocol import anthropic, chat, fields, response_input, responses
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from hydra_engine.server.protocol.top_level import IGNORED, INSTEAD, REFUSED, Harmless


@dataclass(frozen=True, slots=True)
class OtherNames:
    """The unknown names of one type. `instead` ends the error about a refused name. Names in no table are ignored too;
    `ignored` lists those that docs/api.md promises to ignore."""

    refused: Mapping[str, Harmless] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


_NOWHERE = OtherNames()


# ---- objects inside a body

_CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_PIXELS = ("min_pixels", "max_pixels", "resized_width", "resized_height", "max_dynamic_patch", "min_dynamic_patch")
_BUDGET = "all pictures of a request have one budget, mm_processor_kwargs.min_pixels and max_pixels"
_FRAMES = (
    *("fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end", "start", "end"),
    *("min_pixels", "max_pixels", "total_pixels", "resized_width", "resized_height", "max_dynamic_patch", "detail"),
)
_SAMPLED = "the model's processor chooses frames and their sizes: leave it out"
_AS_PARTS = "send it as parts of content"
_MEDIA = ("images", "videos", "audios", "image_url", "video_url", "attachments", "experimental_attachments", "files")
_DESCRIBE = "say it in the description"

_PICTURE = OtherNames(
    {**dict.fromkeys(_PIXELS, ()), "modalities": ("image", "multi-images")},
    dict.fromkeys(_PIXELS, _BUDGET),
    _CACHE_MARKS | {"uuid", "id", "format", "media_type", "mime_type"},
)
_VIDEO = OtherNames(
    dict.fromkeys(_FRAMES, ()), dict.fromkeys(_FRAMES, _SAMPLED), _CACHE_MARKS | {"uuid", "id", "format"}
)
_SCHEMA_BESIDE = {"schema": (), "json_schema": (), "name": (), "strict": ()}
_TEXT = OtherNames(ignored=_CACHE_MARKS | {"annotations", "logprobs", "citations", "id", "uuid"})
_FUNCTION = OtherNames(
    dict.fromkeys(("return", "returns", "response", "output_schema", "input_examples", "examples"), ())
    | {"defer_loading": (False,), "allowed_callers": (["direct"],), "async": (False,), "input_schema": ()},
    dict.fromkeys(("return", "returns", "response", "output_schema", "input_examples", "examples"), _DESCRIBE)
    | {"input_schema": "use parameters", "defer_loading": "all tools are in the prompt: send it when it is needed"},
    _CACHE_MARKS | {"title", "id", "eager_input_streaming"},
)
_CALLED = {"caller": ({"type": "direct"},), "toolset_name": (), "namespace": (), "async": (False,)}

_OBJECTS: dict[type, OtherNames] = {
    fields.ResponseFormat: OtherNames(
        {"regex": (), "pattern": (), "grammar": (), "structures": (), "triggers": ()},
        {
            "regex": "use structured_outputs.regex",
            "pattern": "use structured_outputs.regex",
            "grammar": "use structured_outputs.grammar",
        },
        frozenset({"name", "strict", "description"}),
    ),
    fields.NamedSchema: OtherNames(
        dict.fromkeys(("properties", "required", "$defs", "items", "anyOf"), ()),
        dict.fromkeys(("properties", "required", "$defs", "items", "anyOf"), "put it into schema"),
        frozenset({"type"}),
    ),
    fields.StreamOptions: OtherNames(ignored=frozenset({"include_obfuscation"})),
    # chat
    chat.Message: OtherNames(
        dict.fromkeys(("audio", "tool_name", *_MEDIA), ()),
        {"tool_name": "use name", **dict.fromkeys(_MEDIA, _AS_PARTS)},
        _CACHE_MARKS | {"annotations", "id", "weight", "provider_specific_fields", "citations", "metadata", "parsed"},
    ),
    chat.TextContent: _TEXT,
    chat.RefusalContent: _TEXT,
    chat.ImageContent: OtherNames(
        {**_PICTURE.refused, "detail": ("auto",)},
        {**_PICTURE.instead, "detail": "use image_url.detail"},
        _PICTURE.ignored,
    ),
    chat.ImageUrl: _PICTURE,
    chat.VideoContent: _VIDEO,
    chat.VideoUrl: _VIDEO,
    chat.Tool: OtherNames(
        {**_FUNCTION.refused, "parameters": ()},
        {**_FUNCTION.instead, "parameters": "use function.parameters"},
        _FUNCTION.ignored | {"strict", "name", "description"},
    ),
    chat.FunctionDefinition: _FUNCTION,
    chat.NamedTool: OtherNames(
        {"disable_parallel_tool_use": (False,), "allowed_tools": (), "name": ()},
        {"disable_parallel_tool_use": "use parallel_tool_calls", "name": "use function.name"},
    ),
    chat.PastCall: OtherNames(ignored=_CACHE_MARKS | {"index", "provider_specific_fields", "extra_content"}),
    chat.PastFunction: OtherNames(ignored=frozenset({"parsed_arguments", "description", "strict", "parameters"})),
    # Responses
    response_input.InputItem: OtherNames(
        {**_CALLED, **dict.fromkeys(("tool_calls", "tool_call_id", *_MEDIA), ())},
        {
            "tool_calls": "send items of the type function_call",
            "tool_call_id": "use call_id",
            **dict.fromkeys(_MEDIA, _AS_PARTS),
        },
        _CACHE_MARKS | {"id", "status", "phase", "parsed_arguments"},
    ),
    response_input.InputText: _TEXT,
    response_input.EarlierText: OtherNames(ignored=_TEXT.ignored | {"parsed"}),
    response_input.RefusalText: _TEXT,
    response_input.InputImage: OtherNames(
        {**_PICTURE.refused, "file_id": ()},
        {**_PICTURE.instead, "file_id": "use image_url"},
        _PICTURE.ignored,
    ),
    responses.FunctionTool: _FUNCTION,
    responses.TextConfig: OtherNames(),
    responses.TextFormat: OtherNames(_SCHEMA_BESIDE, {"schema": "use the type json_schema"}),
    responses.JsonObjectFormat: OtherNames(_SCHEMA_BESIDE, {"schema": "use the type json_schema"}),
    responses.JsonSchemaFormat: OtherNames({"json_schema": ()}, {"json_schema": "use schema"}),
    responses.ResponseStreamOptions: OtherNames(ignored=frozenset({"include_usage", "continuous_usage_stats"})),
    # reasoning
    fields.ReasoningConfig: OtherNames(
        {"context": ("auto",), "mode": ("standard",), "max_tokens": (), "exclude": (False,), "enabled": ()},
        {"max_tokens": "use effort", "enabled": "use effort"},
    ),
    fields.ThinkingConfig: OtherNames(
        {"clear_thinking": (True,), "keep": ()},
        {"clear_thinking": "use chat_template_kwargs, if the template knows it"},
        frozenset({"block_binding"}),
    ),
    # Messages
    anthropic.InputMessage: OtherNames(
        {"clear_at": ("never",), **dict.fromkeys(("tool_calls", "tool_call_id", *_MEDIA), ())},
        {
            "tool_calls": "send blocks of the type tool_use",
            "tool_call_id": "send blocks of the type tool_result",
            **dict.fromkeys(_MEDIA, _AS_PARTS),
        },
        _CACHE_MARKS
        | {"id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container", "name"}
        | {"output_config", "metrics"},
    ),
    anthropic.TextBlock: _TEXT,
    anthropic.ImageBlock: OtherNames(
        {**_PICTURE.refused, "transformations": ({"oversized_image": "downsize"},)}, _PICTURE.instead, _PICTURE.ignored
    ),
    anthropic.Base64Source: OtherNames({"url": (), "file_id": ()}),
    anthropic.UrlSource: OtherNames({"data": (), "file_id": ()}, ignored=frozenset({"media_type"})),
    anthropic.ToolUseBlock: OtherNames(_CALLED, ignored=_CACHE_MARKS),
    anthropic.ToolResultBlock: OtherNames(_CALLED, ignored=_CACHE_MARKS | {"name"}),
    anthropic.ThinkingBlock: OtherNames(ignored=_CACHE_MARKS | {"signature"}),
    anthropic.RedactedThinkingBlock: OtherNames(ignored=_CACHE_MARKS | {"data"}),
    anthropic.OutputConfig: OtherNames(ignored=frozenset({"task_budget"})),
    anthropic.JsonSchemaOutput: OtherNames(
        {"json_schema": ()}, {"json_schema": "use schema"}, frozenset({"name", "strict", "description"})
    ),
    anthropic.InputTool: OtherNames(
        {**_FUNCTION.refused, "parameters": ()},
        {**_FUNCTION.instead, "parameters": "use input_schema"},
        _FUNCTION.ignored,
    ),
    anthropic.ToolChoice: OtherNames(
        {"function": (), "allowed_tools": ()},
        {"function": "use name", "allowed_tools": "offer these tools only"},
    ),
}

_BODIES: dict[type, OtherNames] = {
    chat.ChatCompletionRequest: OtherNames(),
    CompletionRequest: OtherNames(),
    responses.ResponsesRequest: OtherNames(),
    anthropic.MessagesRequest: OtherNames({"parallel_tool_calls": (True,)}),
    # Ignored: fields that shape the answer do not change the prompt's length.
    anthropic.CountTokensRequest: OtherNames(ignored=frozenset(anthropic.MessagesRequest.__struct_fields__)),
    TokenizeRequest: OtherNames(
        {
            "tool_choice": lambda choice: choice != "none",
            "content": (),
            "add_special": (),
            "parse_special": (True,),
            "with_pieces": (False,),
        },
        {
            "content": "use prompt",
            "inputs": "use prompt",
            "add_special": "use add_special_tokens",
            "with_pieces": "use return_token_strs",
        },
        frozenset(chat.ChatCompletionRequest.__struct_fields__ + CompletionRequest.__struct_fields__) - {"tool_choice"},
    ),
    DetokenizeRequest: OtherNames({"skip_special_tokens": (False,), "ids": ()}, {"ids": "use tokens"}),
}


@cache
def other_names_of(kind: type[msgspec.Struct]) -> OtherNames:
    """The tables for a body or object; types without an entry refuse nothing."""
    if kind not in _BODIES:
        return _OBJECTS.get(kind, _NOWHERE)
    own, has = _BODIES[kind], frozenset(kind.__struct_fields__)
    candidates = {name: values for name, values in REFUSED.items() if name not in own.ignored} | dict(own.refused)
    refused = {name: values for name, values in candidates.items() if name not in has}
    instead = {name: hint for name in refused if (hint := _hint(own.instead.get(name, INSTEAD.get(name, ())), has))}
    return OtherNames(refused, instead, (IGNORED | own.ignored) - has - refused.keys())


def _hint(instead: str | tuple[str, ...], has: frozenset[str]) -> str:
    if isinstance(instead, str):
        return instead
    found = [other for other in instead if other.replace("[", ".").split(".")[0] in has]
    return f"use {found[0]}" if found else ""
