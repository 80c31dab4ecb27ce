"""Chat messages to the text of a prompt, through the model's own template, and to the media they name, in order.

Knows OpenAI's message format and its looser relatives. Does not know token ids, and opens nothing: a picture stays
the reference that the user gave.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from hydra_engine.core.prompting import DETAILS, TemplateOptions, texts_of
from hydra_engine.errors import InvalidRequest
from hydra_engine.intake.tokenizer import Tokenizer
from hydra_engine.intake.tool_history import parse_tool_answer, parse_tool_calls, with_text_arguments

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_FPS = 1000

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = ("text", "image_url", "image", "video_url", "video")
_PROBE = "hydra9probe"
_PROBE_ID = "hydra9pro"  # nine letters and digits, as some templates demand
# What operations inside a template raise when a conversation is not what it expects.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_DEFAULTS = TemplateOptions()
_PROBING = TemplateOptions(add_generation_prompt=False)


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A picture or a video as the user gave it; `param` is where, for error messages. `fps` is that of a video given as
    a list of frames, `detail` OpenAI's of a picture."""

    value: Any
    param: str
    kind: str = "image"  # or "video"
    fps: float | None = None
    detail: str = "auto"


@dataclass(slots=True)
class Conversation:
    """Checked messages in the form that templates read. `texts` holds what users (and tools) wrote with its place."""

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
        calls = parse_tool_calls(message, role, path)
        conversation.texts.extend((f"{path}.tool_calls", text) for text in texts_of(calls))
        known: dict[str, Any] = {"role": role, "content": content, **parse_tool_answer(message, role, path)}
        conversation.messages.append(known | ({"tool_calls": calls} if calls else {}))
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
    value, fps, detail = part.get(name), None, "auto"
    if isinstance(value, Mapping):
        fps, detail = _fps(value, param, kind), _detail(value, param, kind)
        value, param = value.get("url"), f"{param}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string: a URL or a data URL", param=param)
    return MediaRef(value, param, kind, fps, detail)


def _embedded(part: Mapping[str, Any], path: str, kind: str) -> MediaRef:
    """{"type": "image" or "video", ...} with a URL, a path or an object of the caller's."""
    for name in (kind, "url", "path"):
        if part.get(name) is not None:
            return MediaRef(part[name], f"{path}.{name}", kind, _fps(part, path, kind), _detail(part, path, kind))
    raise InvalidRequest(f"{path}.{kind} is missing", param=f"{path}.{kind}")


def _detail(values: Mapping[str, Any], path: str, kind: str) -> str:
    detail = values.get("detail") if kind == "image" else None
    if detail is None:
        return "auto"
    if not isinstance(detail, str) or detail not in DETAILS:
        raise InvalidRequest(f"{path}.detail must be one of {', '.join(DETAILS)}", param=f"{path}.detail")
    return detail


def _fps(values: Mapping[str, Any], path: str, kind: str) -> float | None:
    fps = values.get("fps") if kind == "video" else None
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise InvalidRequest(f"{path}.fps must be a number above 0 and up to {MAX_FPS}", param=f"{path}.fps")
    return float(fps)


class ChatTemplate:
    """Renders conversations. Some templates read a message's content as a string, some as a list of parts, some differ
    by role, and arguments of tool calls are objects to some and text to others: which of them is found out by rendering
    a probe once per role."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, image_token: str | None, video_token: str | None = None
    ) -> None:
        self.text = template
        self._tokenizer = tokenizer
        self._tokens = {"image": image_token, "video": video_token}
        self._reads: dict[tuple[str, type], bool] = {}

    def render(self, conversation: Conversation, options: TemplateOptions = _DEFAULTS) -> str:
        """The prompt's text. Raises InvalidRequest; also where a user's text holds the image token."""
        if self.text is None:
            raise InvalidRequest(
                "the model has no chat template; use completions (raw prompts) or give one with --chat-template"
            )
        self._check_texts(conversation, options)
        if options.continue_final_message:
            _check_last(conversation.messages[-1])
        messages = [self._fitting(message, index) for index, message in enumerate(conversation.messages)]
        return self._apply(messages, options)

    def _check_texts(self, conversation: Conversation, options: TemplateOptions) -> None:
        asked = [("tools", text) for text in texts_of(options.tools)]
        asked += [("chat_template_kwargs", text) for text in texts_of(options.variables)]
        for param, text in (*conversation.texts, *asked):
            for kind, token in self._tokens.items():
                if token is not None and token in text:
                    raise InvalidRequest(
                        f"the text holds the model's {kind} placeholder; give {kind}s as {kind} parts instead",
                        param=param,
                    )

    def _fitting(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        """The message with its content, and what it calls, in a form that the template reads for this role."""
        role, content = message["role"], message["content"]
        fitting = message | {"content": self._fitting_content(role, content)}
        if "tool_calls" in message and not self._reads_form("tool_calls", dict):
            if not self._reads_form("tool_calls", str):
                param = f"messages[{index}].tool_calls"
                raise InvalidRequest(
                    "the model's chat template has no place for tool calls; leave them out",
                    param=param,
                    code="unsupported_parameter",
                )
            fitting["tool_calls"] = with_text_arguments(message["tool_calls"])
        return fitting

    def _fitting_content(self, role: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if self._reads_form(role, type(content)):
            return content
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._reads_form(role, list) else content
        texts = [part["text"] for part in content if part["type"] == "text"]
        media = [self._tokens[part["type"]] or "" for part in content if part["type"] != "text"]
        return "\n".join([*media, *texts])

    def _reads_form(self, role: str, form: type) -> bool:
        """`role` may be tool_calls, whose forms are those of arguments: dict and str."""
        known = self._reads.get((role, form))
        if known is None:
            probe = self._call_probe(form) if role == "tool_calls" else self._probe(role, form)
            known = self._reads[role, form] = self._shows(probe)
        return known

    def _probe(self, role: str, form: type) -> list[dict[str, Any]]:
        content = _PROBE if form is str else [{"type": "text", "text": _PROBE}]
        messages: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != "user":  # most templates insist on a user's turn before an assistant's and after a system's
            messages = [*messages, self._empty_turn()] if role == "system" else [self._empty_turn(), *messages]
        return messages

    def _call_probe(self, form: type) -> list[dict[str, Any]]:
        """The call is answered, because some templates count the answers."""
        arguments = {_PROBE: _PROBE} if form is dict else json.dumps({_PROBE: _PROBE})
        call = {"id": _PROBE_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        asked: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = self._fitting_content("tool", "")
        told = {"role": "tool", "content": answer, "tool_call_id": _PROBE_ID, "name": "probe"}
        return [self._empty_turn(), asked, told]

    def _empty_turn(self) -> dict[str, Any]:
        return {"role": "user", "content": "" if self._reads_form("user", str) else []}

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        try:
            text = self._tokenizer.apply_template(messages, self.text or "", _PROBING)
        except (TemplateError, *_RENDER_ERRORS):
            return False
        return _PROBE in text and "{'type'" not in text and f"{{'{_PROBE}" not in text

    def _apply(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        try:
            return self._tokenizer.apply_template(messages, self.text or "", options)
        except TemplateError as error:
            # Exactly this class is what a template raises by itself, in words meant for the user.
            words = " ".join((error.message or "").split())[:200] if type(error) is TemplateError else ""
            raise InvalidRequest(
                f"the chat template refused the messages: {words}" if words else "the chat template cannot be rendered"
            ) from error
        except _RENDER_ERRORS as error:
            hint = ", or not so that the last one goes on" if options.continue_final_message else ""
            raise InvalidRequest(f"the chat template cannot render these messages{hint}") from error


def _check_last(message: Mapping[str, Any]) -> None:
    """What an answer can go on with ends in text."""
    content = message["content"]
    ends_in_text = isinstance(content, str) or content[-1]["type"] == "text"
    if message["role"] != "assistant" or not ends_in_text or "tool_calls" in message:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant that ends in text and calls no tools",
            param="continue_final_message",
        )
