"""Renders messages as the text of a prompt, with the model's own chat template, and tokenises that or raw text.

Template and tokenizer are model files, so a served model's run in a child process (`sandbox/text_child.py`). Turns that
the template refuses are rearranged first (`arrange_turns`). Control tokens that a message quotes stay text (`Quoting`).
Opens nothing but the template that a user names: a picture is a placeholder here. Does not know requests, pixels or
processes.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from hydra_engine.core.call import MAX_FIELD_CHARS, REASONING, ChatMessage, MediaPart, Role, TextPart, ToolCall
from hydra_engine.core.prompting import TemplateOptions, check_json, texts_of
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, ProcessorSpec
from hydra_engine.preprocess.text.template_files import NO_TEMPLATE, read_template
from hydra_engine.preprocess.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Prompt:
    """A prompt: one of `messages`, `text` and `token_ids`, with its media."""

    media: list[MediaPart]
    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    quoting: Quoting | None = None  # whose spellings the text has
    token_ids: list[int] | None = None
    num_chars: int = 0
    add_special_tokens: bool = False
    param: str = "prompt"
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class TextSpec:
    """The fields of a model's spec that texts need."""

    placeholder_id: int | None
    video_token_id: int | None
    image_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer_class: str | None
    has_vision: bool
    processor: ProcessorSpec | None
    pictures_in_place: bool = False

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> TextSpec:
        return cls(
            spec.placeholder_id,
            spec.video_token_id,
            spec.image_token_id,
            spec.eos_token_ids,
            spec.tokenizer_class,
            spec.vision is not None,
            spec.processor,
            spec.pictures_in_place,
        )


class Writer:
    """A renderer and tokeniser of one model's prompts. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, spec: TextSpec, chat_template_path: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._processor = spec.processor
        image_token, video_token, feature_token = (
            None if id is None else tokenizer.token(id)
            for id in (spec.placeholder_id, spec.video_token_id, spec.image_token_id)
        )
        self.eos_token_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_ids)))
        ends = [tokenizer.token(id) or "" for id in self.eos_token_ids if id in tokenizer.special_ids]
        templates = (tokenizer.chat_template, tokenizer.tool_template or tokenizer.chat_template)
        if chat_template_path is not None:
            templates = (read_template(chat_template_path),) * 2
        self.template, self.tool_template = (
            ChatTemplate(
                tokenizer,
                text,
                image_token,
                video_token,
                other_marks=ends if feature_token is None else (feature_token, *ends),
                has_processor=spec.has_vision,
                pictures_in_place=spec.pictures_in_place,
            )
            for text in templates
        )

    def template_for(self, options: TemplateOptions) -> ChatTemplate:
        return self.tool_template if options.tools else self.template

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns token ids; stores a conversation's rendered text in the prompt. Raises InvalidRequest."""
        if prompt.messages:
            template, options = self.template_for(prompt.template), prompt.template
            messages = template.arrange(prompt.messages)
            prompt.quoting = quoting = template.quoting_of(messages, options)
            prompt.text = template.render(messages, options, quoting)
            prompt.add_special_tokens = template.adds_special_tokens(prompt.text, options, quoting)
        encode = self.tokenizer.encode if prompt.quoting is None else prompt.quoting.encode
        return encode(prompt.text, add_special_tokens=prompt.add_special_tokens)

    def encode_with_media(self, prompt: Prompt, plans: Sequence[MediaPlan]) -> list[int]:
        """Returns token ids with the texts that the model's processor writes around pictures."""
        self.encode(prompt)
        assert self._processor is not None, "models of other kinds take features alone"
        return place_in_text(
            prompt.text,
            plans,
            self._processor,
            self.tokenizer,
            quoting=prompt.quoting,
            add_special_tokens=prompt.add_special_tokens,
        )

    def parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text between pictures."""
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def generation_prompt(self, options: TemplateOptions, role: Role) -> str:
        return self.template_for(options).generation_prompt(options, role)


def place_in_text(
    text: str,
    plans: Sequence[MediaPlan],
    processor: ProcessorSpec,
    tokenizer: Tokenizer,
    *,
    quoting: Quoting | None = None,
    add_special_tokens: bool,
) -> list[int]:
    """Returns the token ids of `text`, in which each placeholder is replaced by the texts and image tokens of a plan.
    `text` has one placeholder per picture and no image tokens, all spelled for `quoting` if given."""
    image_token = tokenizer.token(processor.image_token_id)
    spelled = (lambda own: own) if quoting is None else quoting.spell
    encode = tokenizer.encode if quoting is None else quoting.encode
    pieces = text.split(spelled(processor.placeholder))
    assert image_token is not None and len(pieces) == len(plans) + 1, "placeholders were counted"
    written = [pieces[0]]
    for plan, piece in zip(plans, pieces[1:], strict=True):
        texts = [part if isinstance(part, str) else image_token for part in plan.parts]
        written += [*map(spelled, texts), piece]
    return encode("".join(written), add_special_tokens=add_special_tokens)


# ---- chat templates

_MAX_LOGGED_NAMES = 256
_WORD = re.compile(r"[A-Za-z_]\w*")
_PROBE = "hydra9probe"
_PROBE_ID = "hydra9pro"  # nine letters and digits, as some templates demand
# Raised by operations inside a template if a conversation is not what it expects.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_DEFAULTS = TemplateOptions()
_MAX_ENDS = 256  # cached generation prompts
_MAX_KEY_CHARS = 1024
_PROBING = TemplateOptions(add_generation_prompt=False)


class ChatTemplate:
    """A model's chat template. Some templates read a message's content as a string, some as a list of parts, some
    differ by role, and some read arguments of tool calls as objects, others as text: rendering a probe once per role
    finds out which. `has_processor`: transformers would use a processor, not only the tokenizer.
    `pictures_in_place`: see `ModelSpec`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        image_token: str | None,
        video_token: str | None = None,
        *,
        other_marks: Sequence[str] = (),
        has_processor: bool = True,
        pictures_in_place: bool = False,
    ) -> None:
        self.text = template
        self._pictures_in_place = pictures_in_place
        self._has_processor = has_processor
        self._tokenizer = tokenizer
        self._tokens = {"image": image_token, "video": video_token}
        self._known_marks = (image_token, video_token, *other_marks)
        self._reads: dict[tuple[str, type], bool] = {}
        self._taken: dict[tuple[Role, ...], bool | None] = {}
        self._ends: dict[tuple[str, bool, bool, bool], str] = {}
        self._words = frozenset(_WORD.findall(template or ""))
        self._ignored: set[str] = set()

    def with_known_fields(self, message: ChatMessage) -> ChatMessage:
        """Returns the message with only those extra fields that the template mentions. Raises InvalidRequest if one of
        these is no JSON or too large."""
        if not message.others:
            return message
        others = dict(message.others)
        given = next((name for name in REASONING if name in others), None)
        if given is not None:  # templates differ in the name, and so do clients
            others = dict.fromkeys(REASONING, others[given]) | others
        read = {name: value for name, value in others.items() if name in self._words}
        ignored = message.others.keys() - read.keys()
        self._log_ignored(ignored.difference(REASONING) if read.keys() & set(REASONING) else ignored)
        for name, value in read.items():
            check_json(value, message.place_of(name if name in message.others else given or name), MAX_FIELD_CHARS)
        return replace(message, others=read)

    def arrange(self, messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
        """Returns the turns rearranged so that the template takes them; see `arrange_turns`."""
        return tuple(messages) if self.text is None else arrange_turns(messages, self._takes)

    def render(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = _DEFAULTS,
        quoting: Quoting | None = None,
    ) -> str:
        """Returns the prompt's text, spelled for `quoting` if given. Raises InvalidRequest."""
        if self.text is None:
            raise InvalidRequest(f"{NO_TEMPLATE}, or use completions (raw prompts)")
        if options.continue_final_message:
            _check_last(messages[-1])
        if quoting is None:
            return self._apply([self._fitting(message) for message in messages], options)
        hidden = [self._fitting(hide_marks(message, quoting)) for message in messages]
        return quoting.spell_rendered(self._apply(hidden, options, quoting.hide))

    def generation_prompt(self, options: TemplateOptions = _DEFAULTS, role: Role = "user") -> str:
        """The text that the template adds after a last message of the user or a tool, to start the answer. Empty
        without a template, or if that cannot be rendered."""
        is_result = role == "tool"
        key = (
            json.dumps(options.variables, sort_keys=True),
            bool(options.tools),
            options.add_generation_prompt,
            is_result,
        )
        if self.text is None:
            return ""
        known = self._ends.get(key)
        if known is None:
            known = self._render_end(options, is_result)
            if len(self._ends) < _MAX_ENDS and len(key[0]) < _MAX_KEY_CHARS:
                self._ends[key] = known
        return known

    def _render_end(self, options: TemplateOptions, is_result: bool) -> str:
        turns: list[dict[str, Any]] = [{"role": "user", "content": self._fitting_text("user", _PROBE)}]
        form = next((form for form in (dict, str) if is_result and self._reads_form("tool_calls", form)), None)
        if form is not None:
            turns = self._call_probe(form)
            turns[-1]["content"] = self._fitting_text("tool", _PROBE)
        try:
            text = self._tokenizer.apply_template(
                turns, self.text or "", replace(options, continue_final_message=False)
            )
        except (TemplateError, *_RENDER_ERRORS):
            return ""
        return text.rpartition(_PROBE)[2]

    def quoting_of(self, messages: Sequence[ChatMessage], options: TemplateOptions = _DEFAULTS) -> Quoting | None:
        """The `Quoting` to render and encode a conversation with, None if it quotes no control token of this
        template."""
        if self.text is None:
            return None
        texts = [[text] for text in texts_of((options.tools, options.variables))]
        texts += [each for message in messages for each in adjacent_texts(message)]
        return self._quoting if any(map(self._quoting.quotes, texts)) else None

    def adds_special_tokens(
        self, rendered: str, options: TemplateOptions = _DEFAULTS, quoting: Quoting | None = None
    ) -> bool:
        """True if the rendered conversation is tokenised with special tokens around it (BOS as a rule). As in
        transformers: its processors add them unless BOS is there, its tokenizers never do."""
        if options.add_special_tokens is not None:
            return options.add_special_tokens
        bos = self._tokenizer.bos_token
        if bos is not None and quoting is not None:
            bos = quoting.spell(bos)
        return self._has_processor and (bos is None or not rendered.startswith(bos))

    @cached_property
    def _quoting(self) -> Quoting:
        """The marks are placeholders, BOS, EOS and the special tokens that the template writes; others, such as those
        of boxes and regions, are for users too."""
        written = "".join([self.text or "", *self._samples()])
        around = (self._tokenizer.bos_token, self._tokenizer.eos_token)
        special = [token for token in self._tokenizer.special_tokens if token in around or token in written]
        marks = {token for token in special if not token.isspace()}
        return Quoting(self._tokenizer, marks.union(token for token in self._known_marks if token))

    def _samples(self) -> Iterator[str]:
        """Yields what the template makes of a turn of each role that it takes."""
        for role in ("system", "user", "assistant", "tool"):
            with suppress(TemplateError, *_RENDER_ERRORS):
                turns = self._probe(role, str if self._reads_form(role, str) else list)
                yield self._tokenizer.apply_template(turns, self.text or "", _DEFAULTS)
        with suppress(TemplateError, *_RENDER_ERRORS):
            yield self._tokenizer.apply_template(self._call_probe(dict), self.text or "", _DEFAULTS)

    def _log_ignored(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if name not in self._ignored and len(self._ignored) < _MAX_LOGGED_NAMES:
                self._ignored.add(name)
                logger.info("the chat template does not read %r of messages; it is ignored", name[:64])

    def _fitting(self, message: ChatMessage) -> dict[str, Any]:
        """Returns the message in the form that the template reads. Raises InvalidRequest if it cannot show tool
        calls."""
        fitting: dict[str, Any] = {"role": message.role, "content": self._fitting_content(message)}
        about = {"tool_call_id": message.tool_call_id, "name": message.name}
        fitting |= {name: value for name, value in about.items() if value is not None}
        fitting.update(message.others)
        if message.tool_calls:
            as_text = not self._reads_form("tool_calls", dict)
            if as_text and not self._reads_form("tool_calls", str):
                raise InvalidRequest(
                    "the model's chat template has no place for tool calls; leave them out",
                    param=message.place_of("tool_calls"),
                    code="unsupported_parameter",
                )
            fitting["tool_calls"] = [_tool_call(call, as_text=as_text) for call in message.tool_calls]
        return fitting

    def _fitting_content(self, message: ChatMessage) -> str | list[dict[str, Any]]:
        role, content = message.role, message.content
        if isinstance(content, str):
            return self._fitting_text(role, content)
        if self._reads_form(role, list):
            return [_part(part.text) if isinstance(part, TextPart) else {"type": part.kind} for part in content]
        order = content if self._pictures_in_place else sorted(content, key=lambda part: isinstance(part, TextPart))
        return "\n".join(part.text if isinstance(part, TextPart) else self._tokens[part.kind] or "" for part in order)

    def _fitting_text(self, role: str, text: str) -> str | list[dict[str, Any]]:
        return [_part(text)] if not self._reads_form(role, str) and self._reads_form(role, list) else text

    def _reads_form(self, role: str, form: type) -> bool:
        """True if the template shows this form: str or list for content of `role`, dict or str for arguments if `role`
        is tool_calls."""
        known = self._reads.get((role, form))
        if known is None:
            probe = self._call_probe(form) if role == "tool_calls" else self._probe(role, form)
            known = self._reads[role, form] = self._shows(probe)
        return known

    def _takes(self, roles: tuple[Role, ...]) -> bool | None:
        if roles not in self._taken:
            words = [f"{_PROBE}{number}x" for number in range(len(roles))]
            turns: list[dict[str, Any]] = [
                {"role": role, "content": self._fitting_text(role, word)}
                for role, word in zip(roles, words, strict=True)
            ]
            for turn, result in pairwise(turns):
                if result["role"] == "tool":
                    called = self._call_probe(dict if self._reads_form("tool_calls", dict) else str)[1:]
                    turn["tool_calls"] = called[0]["tool_calls"]
                    result.update(called[1] | {"content": result["content"]})
            try:
                text = self._tokenizer.apply_template(turns, self.text or "", _PROBING).lower()
                # Text beside a call may be left out.
                shown = (word for word, turn in zip(words, turns, strict=True) if "tool_calls" not in turn)
                self._taken[roles] = all(word in text for word in shown)
            except (TemplateError, *_RENDER_ERRORS):
                self._taken[roles] = None
            if not self._taken[roles]:
                logger.info("the chat template does not take turns in the order %s", ", ".join(roles))
        return self._taken[roles]

    def _probe(self, role: str, form: type) -> list[dict[str, Any]]:
        content = _PROBE if form is str else [_part(_PROBE)]
        messages: list[dict[str, Any]] = [{"role": role, "content": content}]
        if role != "user":  # most templates require a user turn before the assistant's and after the system's
            messages = [*messages, self._user_turn()] if role == "system" else [self._user_turn(), *messages]
        return messages

    def _call_probe(self, form: type) -> list[dict[str, Any]]:
        """A call with its answer, because some templates count the answers."""
        arguments = {_PROBE: _PROBE} if form is dict else json.dumps({_PROBE: _PROBE})
        call = {"id": _PROBE_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = self._fitting_text("tool", "")
        result = {"role": "tool", "content": answer, "tool_call_id": _PROBE_ID, "name": "probe"}
        return [self._user_turn(), turn, result]

    def _user_turn(self) -> dict[str, Any]:
        """A user turn that is not empty, because some templates look at its first part."""
        return {"role": "user", "content": self._fitting_text("user", "x")}

    def _shows(self, messages: list[dict[str, Any]]) -> bool:
        try:
            text = self._tokenizer.apply_template(messages, self.text or "", _PROBING)
        except (TemplateError, *_RENDER_ERRORS):
            return False
        return _PROBE in text and "{'type'" not in text and f"{{'{_PROBE}" not in text

    def _apply(
        self, messages: list[dict[str, Any]], options: TemplateOptions, hide: Callable[[Any], Any] | None = None
    ) -> str:
        try:
            return self._tokenizer.apply_template(messages, self.text or "", options, hide)
        except TemplateError as error:
            # A template's own exceptions have exactly this class, and words meant for the user.
            words = " ".join((error.message or "").split())[:200] if type(error) is TemplateError else ""
            raise InvalidRequest(
                f"the chat template refused the messages: {words}" if words else "the chat template cannot be rendered"
            ) from error
        except _RENDER_ERRORS as error:
            hint = ", or not so that the last one goes on" if options.continue_final_message else ""
            raise InvalidRequest(f"the chat template cannot render these messages{hint}") from error


def adjacent_texts(message: ChatMessage) -> Iterator[list[str]]:
    """Yields all texts of a message; texts of one list may be adjacent in a prompt."""
    content = message.content
    yield [content] if isinstance(content, str) else [part.text for part in content if isinstance(part, TextPart)]
    named = (message.name, message.tool_call_id, message.others)
    yield from ([text] for call in message.tool_calls for text in call.texts())
    yield from ([text] for text in texts_of(named))


def hide_marks(message: ChatMessage, quoting: Quoting) -> ChatMessage:
    content = message.content
    if isinstance(content, str):
        content = quoting.hide(content)
    else:
        hidden = iter(quoting.hide_each([part.text for part in content if isinstance(part, TextPart)]))
        content = tuple(TextPart(next(hidden)) if isinstance(part, TextPart) else part for part in content)
    calls = (
        ToolCall(quoting.hide(call.name), quoting.hide(call.arguments), quoting.hide(call.id), "tool_calls")
        for call in message.tool_calls
    )
    return replace(
        message,
        content=content,
        tool_calls=tuple(calls),
        tool_call_id=quoting.hide(message.tool_call_id),
        name=quoting.hide(message.name),
        others=quoting.hide(message.others),
    )


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    """The call in the OpenAI API's format; with arguments `as_text` for templates that join them to other text."""
    arguments = call.arguments
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    id = {} if call.id is None else {"id": call.id}
    return {**id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _check_last(message: ChatMessage) -> None:
    """Raises InvalidRequest unless an answer can continue the message: it must be the assistant's and end in text."""
    ends_in_text = isinstance(message.content, str) or isinstance(message.content[-1], TextPart)
    if message.role != "assistant" or not ends_in_text or message.tool_calls:
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant that ends in text and calls no tools",
            param="continue_final_message",
        )


# ---- turns that the template refuses, or drops

# True: the template writes all texts of a conversation of these roles; False: it drops some; None: it refuses. An
# assistant before a tool calls it.
Takes = Callable[[tuple[Role, ...]], bool | None]
_CALL: tuple[Role, ...] = ("user", "assistant", "tool")


def arrange_turns(messages: Sequence[ChatMessage], takes: Takes) -> tuple[ChatMessage, ...]:
    """Rearranges turns that a chat template refuses, or drops, in the order given; turns that it takes are unchanged.

    A later system turn becomes a user turn in the same position, so that the prompt before it is unchanged and may be
    cached. Adjacent turns of one role are joined, and a user turn after a tool result becomes part of that result.
    """
    turns = list(messages)
    first = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if first and takes(("system", "user")) is None and takes(("user",)):
        first = 0
    if first > 1 and not takes(("system", "system", "user")):
        turns[:first] = _joined(turns[:first], "system", "system")
        first = 1
    late = [turn for turn in turns[first:] if turn.role == "system"]
    if late and not (first == len(turns) or takes(("user", "system", "assistant", "system", "user"))):
        turns[first:] = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns[first:]]
    if _meet(turns, "user", "user") and not takes(("user", "user")):
        turns = _joined(turns, "user", "user")
    if _meet(turns, "assistant", "assistant") and not takes(("user", "assistant", "assistant")):
        turns = _joined(turns, "assistant", "assistant")
    if _meet(turns, "tool", "user") and takes(_CALL) and not takes((*_CALL, "user")):
        turns = _joined(turns, "tool", "user")
    return tuple(turns)


def _meet(turns: Sequence[ChatMessage], role: Role, behind: Role) -> bool:
    return any((one.role, other.role) == (role, behind) for one, other in pairwise(turns))


def _joined(turns: Sequence[ChatMessage], role: Role, behind: Role) -> list[ChatMessage]:
    """Returns the turns with each `behind` turn joined to the `role` turn before it."""
    found: list[ChatMessage] = []
    for turn in turns:
        if found and (found[-1].role, turn.role) == (role, behind):
            found[-1] = _one_turn(found[-1], turn)
        else:
            found.append(turn)
    return found


def _one_turn(turn: ChatMessage, more: ChatMessage) -> ChatMessage:
    return replace(
        turn,
        content=_content(turn.content, more.content),
        tool_calls=turn.tool_calls + more.tool_calls,
        others={**turn.others, **more.others, **_texts_of_both(turn.others, more.others)},
    )


Content = str | tuple[TextPart | MediaPart, ...]


def _content(content: Content, more: Content) -> Content:
    if not content or not more:
        return content or more
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n\n{more}"
    *before, last = (TextPart(content),) if isinstance(content, str) else content
    first, *behind = (TextPart(more),) if isinstance(more, str) else more
    if isinstance(last, TextPart) and isinstance(first, TextPart):
        return (*before, TextPart(f"{last.text}\n\n{first.text}"), *behind)
    return (*before, last, first, *behind)


def _texts_of_both(others: Any, more: Any) -> dict[str, str]:
    """Joins the texts of fields that both turns have, such as reasoning."""
    names = [name for name in others if isinstance(others[name], str) and isinstance(more.get(name), str)]
    return {name: f"{others[name]}\n\n{more[name]}" for name in names if name != "name"}


# ---- control tokens that a text quotes

_NONCE_DIGITS = 20  # of the random spellings


class Quoting:
    """Tells control tokens that a text quotes from those that one template writes. Thread-safe.

    `marks` are the control tokens that the template writes around texts, and placeholders of pictures and videos. A
    mark in a conversation's text is hidden while the template is rendered; then the template's own marks get random
    spellings, and a tokenizer that knows only these encodes the whole. So quoted marks become plain-text tokens, and
    the text around them keeps its tokens.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        # Templates leave digits unchanged, whatever else they do with texts.
        nonce = str(10**_NONCE_DIGITS + secrets.randbelow(10**_NONCE_DIGITS))
        numbers = {mark: f"{nonce}{number:06}" for number, mark in enumerate(sorted(marks), 1)}
        self._hidden = {mark: f"{number}0" for mark, number in numbers.items()}
        self._own = {mark: f"{number}1" for mark, number in numbers.items()}
        self._border = f"{nonce}{0:06}0"
        self._shown = {hidden: mark for mark, hidden in self._hidden.items()} | {self._border: ""}
        self._marks, self._stand_ins = _any_of(marks), _any_of(self._shown)
        self._respelled = tokenizer.with_spellings(self._own)

    def quotes(self, texts: Sequence[str]) -> bool:
        """True if these texts hold a mark, also across adjacent texts, trimmed or not."""
        joined = {"".join(texts), "".join(text.strip() for text in texts)}
        return any(self._marks.search(text) for text in joined)

    def hide(self, value: Any) -> Any:
        """Returns plain JSON with the marks in its strings and names hidden."""
        if isinstance(value, str):
            return self._marks.sub(lambda found: self._hidden[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(inner) for name, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def hide_each(self, texts: Sequence[str]) -> list[str]:
        """Hides marks in adjacent texts, also marks that they form together."""
        hidden: list[str] = [self.hide(text) for text in texts]
        return [self._with_border(text) for text in hidden] if self.quotes(hidden) else hidden

    def spell_rendered(self, text: str) -> str:
        """Returns a rendered conversation with its own marks spelled for `encode`, and the hidden ones shown."""
        return self._stand_ins.sub(lambda found: self._shown[found[0]], self.spell(text))

    def spell(self, text: str) -> str:
        """Returns the text of a template or processor with its marks in the random spellings that `encode` reads."""
        return self._marks.sub(lambda found: self._own[found[0]], text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns token ids. Raises InvalidRequest if a quoted mark would become its token nevertheless."""
        return self._respelled.encode(text, add_special_tokens=add_special_tokens)

    def _with_border(self, text: str) -> str:
        """Inserts the border after the last non-space character, so that trimming keeps it."""
        end = len(text.rstrip())
        return f"{text[:end]}{self._border}{text[end:]}" if end else text


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these words, the longest first; matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")
