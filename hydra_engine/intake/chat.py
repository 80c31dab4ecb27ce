"""Chat messages to the text of a prompt, through the model's own template, and to the media they name, in order.

Knows OpenAI's message format and its looser relatives. Does not know token ids, and opens nothing: a picture stays
the reference that the user gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from hydra_engine.errors import InvalidRequest
from hydra_engine.intake.tokenizer import Tokenizer

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_FPS = 1000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = ("text", "image_url", "image", "video_url", "video")
_DETAILS = ("auto", "low", "high")
_PROBE = "hydra9probe"
# What operations inside a template raise when a conversation is not what it expects.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A picture or a video as the user gave it; `param` is where, for error messages. `fps` is that of a video given as
    a list of frames."""

    value: Any
    param: str
    kind: str = "image"  # or "video"
    fps: float | None = None


@dataclass(slots=True)
class Conversation:
    """Checked messages in the form that templates read. `texts` holds the users' words with their place."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaRef] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)  # (param, text)

    @property
    def num_chars(self) -> int:
        return sum(len(text) for _, text in self.texts)


def parse_messages(messages: object) -> Conversation:
    """Raises InvalidRequest with the path of the field."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are allowed", param="messages")
    conversation = Conversation()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{path} must be an object with role and content", param=path)
        role = _role(message, path)
        content = _content(message.get("content"), role, f"{path}.content", conversation)
        conversation.messages.append({"role": role, "content": content})
    return conversation


def user_message(text: str, media: Sequence[MediaRef]) -> Conversation:
    """One message of a user: pictures and videos first, then the text."""
    parts = [*({"type": ref.kind} for ref in media), {"type": "text", "text": text}]
    content = parts if media else text
    return Conversation([{"role": "user", "content": content}], list(media), [("prompt", text)])


def _role(message: Mapping[str, Any], path: str) -> str:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise InvalidRequest(f"{path}.{name} is not supported", param=f"{path}.{name}")
    return _ROLES[role]


def _content(content: object, role: str, path: str, conversation: Conversation) -> str | list[dict[str, Any]]:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        conversation.texts.append((path, content))
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise InvalidRequest(f"{path} must be a string or a list of content parts", param=path)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{path} may have at most {MAX_PARTS} parts", param=path)
    return [_part(part, f"{path}[{index}]", conversation) for index, part in enumerate(content)]


def _part(part: object, path: str, conversation: Conversation) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _PARTS:
        raise InvalidRequest(f"{path} must be an object of type {', '.join(_PARTS)}", param=path)
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
        conversation.texts.append((f"{path}.text", text))
        return {"type": "text", "text": text}
    ref = _url(part, path, kind) if kind.endswith("_url") else _embedded(part, path, kind)
    conversation.media.append(ref)
    return {"type": ref.kind}


def _url(part: Mapping[str, Any], path: str, name: str) -> MediaRef:
    """{"type": "image_url" or "video_url", the same: {"url": ...}}"""
    param, kind = f"{path}.{name}", name.removesuffix("_url")
    value, fps = part.get(name), None
    if isinstance(value, Mapping):
        if kind == "image" and value.get("detail") not in (None, *_DETAILS):
            raise InvalidRequest(f"{param}.detail must be one of {', '.join(_DETAILS)}", param=f"{param}.detail")
        fps = _fps(value, param, kind)
        value, param = value.get("url"), f"{param}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string: a URL or a data URL", param=param)
    return MediaRef(value, param, kind, fps)


def _embedded(part: Mapping[str, Any], path: str, kind: str) -> MediaRef:
    """{"type": "image" or "video", ...} with a URL, a path or an object of the caller's."""
    for name in (kind, "url", "path"):
        if part.get(name) is not None:
            return MediaRef(part[name], f"{path}.{name}", kind, _fps(part, path, kind))
    raise InvalidRequest(f"{path}.{kind} is missing", param=f"{path}.{kind}")


def _fps(values: Mapping[str, Any], path: str, kind: str) -> float | None:
    fps = values.get("fps") if kind == "video" else None
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise InvalidRequest(f"{path}.fps must be a number above 0 and up to {MAX_FPS}", param=f"{path}.fps")
    return float(fps)


class ChatTemplate:
    """Renders conversations. Some templates read a message's content as a string, some as a list of parts, some differ
    by role: which of them is found out by rendering a probe once per role."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, image_token: str | None, video_token: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tokens = {"image": image_token, "video": video_token}
        self._reads: dict[tuple[str, type], bool] = {}

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises InvalidRequest; also where a user's text holds the image token."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; use completions (raw prompts) or give one with --chat-template"
            )
        for param, text in conversation.texts:
            for kind, token in self._tokens.items():
                if token is not None and token in text:
                    raise InvalidRequest(
                        f"the text holds the model's {kind} placeholder; give {kind}s as {kind} parts instead",
                        param=param,
                    )
        messages = [self._fitting(message) for message in conversation.messages]
        return self._apply(messages, add_generation_prompt=add_generation_prompt)

    def _fitting(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in a form that the template reads for this role."""
        role, content = message["role"], message["content"]
        if self._reads_form(role, type(content)):
            return message
        if isinstance(content, str):
            if self._reads_form(role, list):
                content = [{"type": "text", "text": content}]
            return {"role": role, "content": content}
        texts = [part["text"] for part in content if part["type"] == "text"]
        media = [self._tokens[part["type"]] or "" for part in content if part["type"] != "text"]
        return {"role": role, "content": "\n".join([*media, *texts])}

    def _reads_form(self, role: str, form: type) -> bool:
        known = self._reads.get((role, form))
        if known is None:
            known = self._reads[role, form] = self._probe(role, form)
        return known

    def _probe(self, role: str, form: type) -> bool:
        content = _PROBE if form is str else [{"type": "text", "text": _PROBE}]
        messages: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != "user":  # most templates insist on a user's turn before an assistant's and after a system's
            other = {"role": "user", "content": "" if self._reads_form("user", str) else []}
            messages = [*messages, other] if role == "system" else [other, *messages]
        try:
            text = self._tokenizer.apply_template(messages, self._template or "", add_generation_prompt=False)
        except (TemplateError, *_RENDER_ERRORS):
            return False
        return _PROBE in text and "{'type'" not in text

    def _apply(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_template(
                messages, self._template or "", add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            # Exactly this class is what a template raises by itself, in words meant for the user.
            words = " ".join((error.message or "").split())[:200] if type(error) is TemplateError else ""
            raise InvalidRequest(
                f"the chat template refused the messages: {words}" if words else "the chat template cannot be rendered"
            ) from error
        except _RENDER_ERRORS as error:
            raise InvalidRequest("the chat template cannot render these messages") from error
