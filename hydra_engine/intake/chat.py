"""Chat messages to the text of a prompt, through the model's own template, and to the pictures they name, in order.

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

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_DETAILS = ("auto", "low", "high")
_PROBE = "hydra9probe"
# What operations inside a template raise when a conversation is not what it expects.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture as the user gave it; `param` is where, for error messages."""

    value: Any
    param: str


@dataclass(slots=True)
class Conversation:
    """Checked messages in the form that templates read. `texts` holds the users' words with their place."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)
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


def user_message(text: str, images: Sequence[ImageRef]) -> Conversation:
    """One message of a user: pictures first, then the text."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    content = parts if images else text
    return Conversation([{"role": "user", "content": content}], list(images), [("prompt", text)])


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
    if not isinstance(part, Mapping) or kind not in ("text", "image_url", "image"):
        raise InvalidRequest(f"{path} must be an object of type text, image_url or image", param=path)
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")
        conversation.texts.append((f"{path}.text", text))
        return {"type": "text", "text": text}
    conversation.images.append(_image_url(part, path) if kind == "image_url" else _image(part, path))
    return {"type": "image"}


def _image_url(part: Mapping[str, Any], path: str) -> ImageRef:
    param = f"{path}.image_url"
    value = part.get("image_url")
    if isinstance(value, Mapping):
        if value.get("detail") not in (None, *_DETAILS):
            raise InvalidRequest(f"{param}.detail must be one of {', '.join(_DETAILS)}", param=f"{param}.detail")
        value, param = value.get("url"), f"{param}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string: a URL or a data URL", param=param)
    return ImageRef(value, param)


def _image(part: Mapping[str, Any], path: str) -> ImageRef:
    for name in ("image", "url", "path"):
        if part.get(name) is not None:
            return ImageRef(part[name], f"{path}.{name}")
    raise InvalidRequest(f"{path}.image is missing", param=f"{path}.image")


class ChatTemplate:
    """Renders conversations. Some templates read a message's content as a string, some as a list of parts, some differ
    by role: which of them is found out by rendering a probe once per role."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, image_token: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._image_token = image_token
        self._reads: dict[tuple[str, type], bool] = {}

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises InvalidRequest; also where a user's text holds the image token."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; use completions (raw prompts) or give one with --chat-template"
            )
        for param, text in conversation.texts:
            if self._image_token is not None and self._image_token in text:
                raise InvalidRequest(
                    "the text holds the model's image placeholder; give images as image parts instead", param=param
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
        images = [self._image_token or ""] * (len(content) - len(texts))
        return {"role": role, "content": "\n".join([*images, *texts])}

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
