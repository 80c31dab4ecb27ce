"""A preprocessor whose prompts are rendered and tokenised in the process of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.config import MediaConfig
from hydra_engine.core.call import Role
from hydra_engine.core.fairness import WorkerPool
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.models.specs.base import MediaPlan, ModelSpec
from hydra_engine.preprocess.media.fetch import Resolve
from hydra_engine.preprocess.media.media import MediaLoader
from hydra_engine.preprocess.preprocessor import Preprocessor
from hydra_engine.preprocess.sandbox.texts import MAX_WAITING_TEXTS
from hydra_engine.preprocess.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from hydra_engine.preprocess.text.writer import Prompt, TextSpec, Writer


def preprocessor_of(
    spec: ModelSpec,
    tokenizer: Tokenizer,
    media: MediaConfig,
    *,
    clock: Clock | None = None,
    resolve: Resolve | None = None,
    chat_template_path: str | None = None,
    **options: Any,
) -> Preprocessor:
    """Returns a preprocessor for this model; `options` as for `Preprocessor`."""
    clock = clock or MonotonicClock()
    texts = options.pop("texts", None) or OwnTexts(Writer(tokenizer, TextSpec.from_spec(spec), chat_template_path))
    loader = options.pop("loader", None) or MediaLoader(spec, media, clock, resolve)
    return Preprocessor(
        spec=spec,
        tokenizer=tokenizer,
        loader=loader,
        texts=texts,
        clock=clock,
        chat_template_path=chat_template_path,
        **options,
    )


class OwnTexts:
    """A reader of prompts in this process with the methods of `SandboxedTexts`; long ones run in a thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pool = WorkerPool("preprocess-text", num_workers=1, max_waiting=MAX_WAITING_TEXTS, noun="prompts")

    async def encode(self, client: str, prompt: Prompt) -> list[int]:
        if prompt.num_chars < LONG_TEXT_CHARS:
            return self._writer.encode(prompt)
        return await self._pool.run(client, self._writer.encode, prompt)

    async def encode_with_media(self, client: str, prompt: Prompt, plans: Sequence[MediaPlan]) -> list[int]:
        return self._writer.encode_with_media(prompt, plans)

    async def parts(self, client: str, texts: Sequence[str]) -> list[list[int]]:
        return self._writer.parts(texts)

    async def generation_prompt(self, client: str, options: TemplateOptions, role: Role) -> str:
        return self._writer.generation_prompt(options, role)

    def close(self) -> None:
        self._pool.close()
