"""Request and answer types of each route, for /openapi.json: with examples, and the errors that only this route has.

A route without an entry here is not documented, and a test fails. Does not know how the document is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra_engine.server import admin, generate, info
from hydra_engine.server.protocol import anthropic as messages
from hydra_engine.server.protocol import chat, completions, responses
from hydra_engine.server.protocol import tokenize as tokens

TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    description: str
    kind: Any = str  # a type that msgspec knows
    place: str = "path"  # or query
    default: Any = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A route's entry. `answer` is the JSON of a 200, None for text; `events` is the data of a stream's events, `done`
    is True if [DONE] ends it; `errors` are statuses besides those of every route; `others` maps statuses to answers
    with another form."""

    tag: str
    summary: str
    answer: Any
    body: Any = None
    events: Any = None
    done: bool = False
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    others: dict[int, Any] = field(default_factory=dict)
    examples: tuple[dict[str, Any], ...] = ()


_BODY = (400, 408, 413, 415)
_MODEL = (*_BODY, 404, 429, 503)
_GENERATION = (*_MODEL, 499)  # 499: ended by its id
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJg"
    "gg=="
)
_WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": _PICTURE.partition(",")[2]}
_HELLO = {"role": "user", "content": "Hello"}
_SAME_AS_HEALTH = Operation("server", "The same as /health", info.Health, others={503: info.NotServing})


def _about(picture: dict[str, Any], text_type: str) -> list[dict[str, Any]]:
    """A question about a picture, as messages of a dialect."""
    return [{"role": "user", "content": [picture, {"type": text_type, "text": "What is in the picture?"}]}]


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "generation",
        "An answer to chat messages with text and pictures",
        chat.ChatCompletion,
        chat.ChatCompletionRequest,
        chat.ChatChunk,
        done=True,
        errors=_GENERATION,
        examples=(
            {"messages": [_HELLO]},
            {
                "messages": _about({"type": "image_url", "image_url": {"url": _PICTURE}}, "text"),
                "max_tokens": 32,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
    ),
    ("POST", "/v1/completions"): Operation(
        "generation",
        "Text that continues a prompt, without a chat template",
        completions.TextCompletion,
        completions.CompletionRequest,
        completions.TextCompletion,
        done=True,
        errors=_GENERATION,
        examples=({"prompt": "One, two,"}, {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}),
    ),
    ("POST", "/v1/responses"): Operation(
        "generation",
        "OpenAI's Responses, without a memory: nothing is stored",
        responses.Response,
        responses.ResponsesRequest,
        responses.AnyResponseEvent,
        errors=_GENERATION,
        examples=(
            {"input": "Hello", "instructions": "Answer in one word."},
            {
                "input": _about({"type": "input_image", "image_url": _PICTURE, "detail": "auto"}, "input_text"),
                "max_output_tokens": 32,
                "stream": True,
            },
            {
                "input": "Is it raining in Rome?",
                "tools": [{"type": "function", "name": "weather", "parameters": _WEATHER}],
                "tool_choice": {"type": "function", "name": "weather"},
            },
        ),
    ),
    ("POST", "/v1/messages"): Operation(
        "generation",
        "Anthropic's Messages",
        messages.AnthropicMessage,
        messages.MessagesRequest,
        messages.AnyMessageEvent,
        errors=_GENERATION,
        examples=(
            {"max_tokens": 32, "messages": [_HELLO], "system": "Answer in one word."},
            {
                "max_tokens": 32,
                "messages": _about({"type": "image", "source": _SOURCE}, "text"),
                "stop_sequences": ["###"],
                "stream": True,
            },
            {
                "max_tokens": 64,
                "messages": [{"role": "user", "content": "Is it raining in Rome?"}],
                "tools": [{"name": "weather", "input_schema": _WEATHER}],
                "tool_choice": {"type": "tool", "name": "weather"},
            },
        ),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "tokens",
        "How many tokens the prompt of Anthropic's Messages has, pictures included",
        messages.TokensCount,
        messages.CountTokensRequest,
        errors=_MODEL,
        examples=({"messages": [_HELLO]},),
    ),
    ("DELETE", "/v1/requests/{id}"): Operation(
        "generation",
        "Ends running generations of this client by their id",
        generate.EndedRequests,
        parameters=(Parameter("id", "the `id` of an answer, or its X-Request-Id"),),
        errors=(404,),
    ),
    ("GET", "/v1/models"): Operation("models", "The model that is served", info.ModelList, errors=(503,)),
    ("GET", "/v1/models/{model}"): Operation(
        "models",
        "The same by its name",
        info.Model,
        parameters=(Parameter("model", "the name of the model"),),
        errors=(404, 503),
    ),
    ("POST", "/tokenize"): Operation(
        "tokens",
        "Token ids of a prompt or of messages, pictures included",
        tokens.Tokens,
        tokens.TokenizeRequest,
        errors=_MODEL,
        examples=({"prompt": "Hello"}, {"messages": [_HELLO]}),
    ),
    ("POST", "/detokenize"): Operation(
        "tokens",
        "Text of token ids",
        tokens.Text,
        tokens.DetokenizeRequest,
        errors=_MODEL,
        examples=({"tokens": [72, 105]},),
    ),
    ("GET", "/livez"): Operation("server", "Answers while the HTTP process lives", info.Alive),
    ("GET", "/health"): Operation(
        "server", "Whether requests are served and make progress", info.Health, others={503: info.NotServing}
    ),
    **{("GET", path): _SAME_AS_HEALTH for path in ("/ready", "/ping")},
    ("GET", "/load"): Operation("server", "How many generations run or wait", info.Load),
    ("GET", "/version"): Operation("server", "The version of the server", info.Version),
    ("GET", "/server_info"): Operation(
        "server", "Model, topology, devices, limits, caches and budgets", info.ServerInfo, errors=(503,)
    ),
    ("GET", "/metrics"): Operation("server", "Metrics in Prometheus's text format", None),
    ("GET", "/openapi.json"): Operation("server", "This document", dict[str, Any]),
    ("GET", "/admin/topology"): Operation(
        "admin", "Which instances serve which stages", admin.TopologyAnswer, errors=(503,)
    ),
    ("POST", "/admin/topology"): Operation(
        "admin",
        "Changes which instances serve which stages while requests are served",
        admin.TopologyAnswer,
        admin.TopologyRequest,
        errors=(*_BODY, 503),
        examples=({"topology": "EPD"},),
    ),
    ("POST", "/reset_prefix_cache"): Operation(
        "admin", "Forgets reusable KV; what running requests hold stays", info.Alive, errors=(503,)
    ),
    ("POST", "/reset_mm_cache"): Operation(
        "admin", "Forgets pictures and their features; what running requests hold stays", info.Alive, errors=(503,)
    ),
    ("GET", "/debug/trace"): Operation(
        "admin",
        "What happened to requests that have ended, as Chrome's trace format",
        admin.Trace,
        parameters=(Parameter("seconds", "how far back", admin.TraceSeconds, place="query", default=admin.TRACE_S),),
        errors=(400, 503),
    ),
}
