"""Tables of fields of other APIs that no struct here has, per body and object: refused ones, because they would change
the answer unless they have a neutral value, with what to use instead, and ignored ones, which cannot change it.

Does not know how unknown names are found (`http/body.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from hydra_engine.server.protocol import anthropic, chat, fields, responses
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

EMPTY: tuple[Any, ...] = (None, "", [], {})
# Values without effect, besides those of EMPTY; or a function that returns True for one.
Harmless = tuple[Any, ...] | Callable[[Any], bool]

# ---- the top level of a body: refused by all routes that generate or count, except fields that the request's type has


def _only_clears_thinking(value: Any) -> bool:
    """True if the edits only clear earlier thinking, which the chat template keeps or drops by itself."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return value == {"edits": []} or (
        isinstance(edits, list)
        and value.keys() == {"edits"}
        and all(isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking_") for edit in edits)
    )


_TOP_LEVEL = "send its fields at the top level of the body"
REFUSED: dict[str, Harmless] = {
    # of OpenAI's and Anthropic's APIs
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "reasoning": (),
    "thinking": ({"type": "disabled"},),
    "moderation": (),
    "image": ({"context_compression": "auto"}, {"context_compression": "disabled"}),
    "prompt": (),
    "messages": (),
    "input": (),
    "instructions": (),
    "system": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "stop": (),
    "stop_sequences": (),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "include": (),
    "text": ({"format": {"type": "text"}},),
    "output_config": (),
    "output_format": (),
    "tools": (),
    "tool_choice": ("none", "auto", {"type": "auto"}, {"type": "none"}),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "truncation": ("disabled", "auto"),  # a prompt that is too long is an error with both
    "context_management": _only_clears_thinking,
    "mcp_servers": (),
    "container": (),
    "compaction": (),
    "thread": ({"type": "create"},),
    "disable_parallel_tool_use": (False,),
    # of vLLM
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "chat_template": (),
    "chat_template_kwargs": (),
    "mm_processor_kwargs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "documents": (),
    "bad_words": (),
    "truncate_prompt_tokens": (-1,),
    "truncation_side": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_routed_experts": (False,),
    "logprob_token_ids": (),
    "detokenize": (True,),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "lora_path": (),
    "logits_processors": (),
    "thinking_token_budget": (),
    "vllm_xargs": (),
    "media_io_kwargs": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "structural_tag": (),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    # of SGLang
    "input_ids": (),
    "sampling_params": (),
    "stop_regex": (),
    "no_stop_trim": (False,),
    "sampling_seed": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "session_params": (),
    "extra_key": (),
    "images_config": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "logprob_start_len": (-1,),
    "token_ids_logprob": (),
    "return_meta_info": (False,),
    "return_prompt_token_ids": (False,),
    "image_data": (),
    # of llama.cpp
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "repeat_penalty": (1, 1.0),
    "repeat_last_n": (-1, 64),
    "penalize_nl": (True,),
    "typical_p": (1, 1.0),
    "typ_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "min_keep": (0,),
    "mirostat": (0,),
    "samplers": (),
    "dynatemp_range": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "adaptive_target": (-1, -1.0),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "n_indent": (0,),
    "grammar": (),
    "grammar_lazy": (False,),
    "grammar_triggers": (),
    "preserved_tokens": (),
    "parse_tool_calls": (True,),
    "generation_prompt": (),
    "lora": (),
    "multimodal_data": (),
    # of Ollama
    "options": (),
    "format": (),
    "raw": (False,),
    "template": (),
    "context": (),
    "images": (),
    "num_predict": (-1,),
    "num_ctx": (),
    # of TGI and transformers
    "inputs": (),
    "parameters": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "max_length": (),
    "min_length": (0,),
    "do_sample": (True,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
    "eos_token_id": (),
    "suppress_tokens": (),
    "bad_words_ids": (),
    "penalty_alpha": (0, 0.0),
    "watermark": (False,),
    "top_n_tokens": (0,),
    "decoder_input_details": (False,),
    "return_full_text": (False,),
    "truncate": (False,),
    "adapter_id": (),
    "tool_prompt": (),
    "guideline": (),
    # of others
    "extra_body": (),
    "enable_thinking": (),
    "random_seed": (),
    "safe_prompt": (False,),
    "enable_search": (False,),
    "search_options": (),
    "search_parameters": (),
    "vl_high_resolution_images": (False,),
    "plugins": (),
    "transforms": (),
    "deferred": (False,),
    "prompt_truncate_len": (),
    "context_length_exceeded_behavior": ("error",),
}
_MAX_TOKENS = ("max_tokens", "max_output_tokens")
_CONTENT = ("messages[].content", "input[].content")
_NEVER_CUT = "a prompt is never cut: shorten it and leave this out"
# name -> the end of the error about it, or fields of which the first that the request has is named
INSTEAD: dict[str, str | tuple[str, ...]] = {
    "repeat_penalty": ("repetition_penalty",),
    "grammar": ("structured_outputs.grammar",),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), _MAX_TOKENS),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _MAX_TOKENS),
    "min_new_tokens": ("min_tokens",),
    "min_length": ("min_tokens",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "images": _CONTENT,
    "image_data": _CONTENT,
    "multimodal_data": _CONTENT,
    "prompt": ("messages", "input"),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "inputs": ("messages", "prompt", "input"),
    "input_ids": ("prompt",),
    "system": ("instructions", "messages[] with the role system"),
    "instructions": ("system", "messages[] with the role system"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "logprobs": ("top_logprobs",),
    "top_logprobs": ("logprobs",),
    "n_probs": ("top_logprobs", "logprobs"),
    "top_n_tokens": ("top_logprobs", "logprobs"),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "return_logprob": ("logprobs", "top_logprobs"),
    "include": ("logprobs",),
    "logprob_start_len": ("prompt_logprobs",),
    "decoder_input_details": ("prompt_logprobs",),
    "return_full_text": ("echo",),
    "return_tokens": ("return_token_ids",),
    "return_prompt_token_ids": ("return_token_ids",),
    "text": ("output_config.format", "response_format"),
    "format": ("output_config.format", "text.format", "response_format"),
    "output_config": ("text.format", "response_format"),
    "output_format": ("text.format", "response_format"),
    "guided_json_object": ("response_format",),
    "guided_whitespace_pattern": ("structured_outputs.whitespace_pattern",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "disable_parallel_tool_use": ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    "no_stop_trim": ("include_stop_str_in_output",),
    "sampling_seed": ("seed",),
    "random_seed": ("seed",),
    "extra_key": ("cache_salt",),
    "num_return_sequences": ("n",),
    "eos_token_id": ("stop_token_ids",),
    "do_sample": "use temperature 0 for the most likely tokens",
    **dict.fromkeys(("max_dynamic_patch", "min_dynamic_patch"), ("mm_processor_kwargs.max_pixels",)),
    "vl_high_resolution_images": ("mm_processor_kwargs.max_pixels",),
    **dict.fromkeys(("options", "parameters", "sampling_params", "extra_body"), _TOP_LEVEL),
    **dict.fromkeys(("truncate_prompt_tokens", "truncate", "prompt_truncate_len"), _NEVER_CUT),
}

# Labels, hints about speed, cost and location, and parameters of samplers that are refused where they are turned on.
IGNORED = frozenset(
    {
        # of OpenAI's and Anthropic's APIs
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "prediction", "verbosity", "max_tool_calls", "access_programs", "stream_options"),
        *(
            "parallel_tool_calls",
            "cache_control",
            "speed",
            "inference_geo",
            "diagnostics",
            "billing_policy",
            "fallbacks",
        ),
        *("fallback_credit_token", "user_profile_id", "workspace_id", "betas", "anthropic_beta"),
        "anthropic_version",
        # of vLLM and SGLang
        *("session_id", "stream_interval", "data_parallel_rank", "return_token_offsets", "return_mm_kwargs", "rid"),
        *("routed_experts_prompt_start", "guided_decoding_backend", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("return_cached_tokens_details", "log_metrics"),
        # of llama.cpp
        *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token", "return_progress"),
        *("verbose", "response_fields", "sse_ping_interval", "speculative.n_max", "speculative.n_min"),
        *(
            "speculative.p_min",
            "speculative.type",
            "dynatemp_exponent",
            "xtc_threshold",
            "mirostat_tau",
            "mirostat_eta",
        ),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay"),
        # of others
        *("keep_alive", "use_cache", "details", "provider", "models", "route", "usage", "perf_metrics_in_response"),
    }
)


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
    responses.InputItem: OtherNames(
        {**_CALLED, **dict.fromkeys(("tool_calls", "tool_call_id", *_MEDIA), ())},
        {
            "tool_calls": "send items of the type function_call",
            "tool_call_id": "use call_id",
            **dict.fromkeys(_MEDIA, _AS_PARTS),
        },
        _CACHE_MARKS | {"id", "status", "phase", "parsed_arguments"},
    ),
    responses.InputText: _TEXT,
    responses.EarlierText: OtherNames(ignored=_TEXT.ignored | {"parsed"}),
    responses.InputImage: OtherNames(
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
