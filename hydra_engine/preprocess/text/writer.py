"""Renders and tokenises messages or raw text, with a model's chat templates and tokenizer.

Both are model files, so a served model's run in a child process (`sandbox/text_child.py`). Does not know requests,
pixels or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_engine.core.call import ChatMessage, MediaPart, Role
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, ProcessorSpec
from hydra_engine.preprocess.text.chat import ChatTemplate, Quoting
from hydra_engine.preprocess.text.template_files import read_template
from hydra_engine.preprocess.text.tokenizer import Tokenizer


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
