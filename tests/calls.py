"""Short ways to a `GenerationCall`, and to typed messages."""

from collections.abc import Sequence
from typing import Any

from hydra_engine.core.call import ChatMessage, GenerationCall, ImagePart, MediaPart, TextPart
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.frontend.call import make_call, with_prompt


def asked(prompt: Any = None, *, messages: Any = None, images: Any = None, videos: Any = None, **options: Any) -> Any:
    """The call that a method of `Engine` makes of these arguments."""
    call: GenerationCall = make_call(options, SamplingParams())
    return with_prompt(call, messages if prompt is None else prompt, images, videos)


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Typed messages in OpenAI's form."""
    return [_plain(message) for message in messages]


def _plain(message: ChatMessage) -> dict[str, Any]:
    content = message.content if isinstance(message.content, str) else [_part(part) for part in message.content]
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    more = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    given = {name: value for name, value in more.items() if value}
    return {"role": message.role, "content": content, **given, **message.others}


def _part(part: TextPart | MediaPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    detail = {"detail": part.detail} if isinstance(part, ImagePart) and part.detail != "auto" else {}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.source, **detail}}
