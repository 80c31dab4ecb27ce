"""Two sides of the generic adapter's tests: prompts made by this engine over the model's processor, computed stage by
stage by the driver, and the same text and pictures given to transformers' processor and model as a whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.models.specs.base import SPAN_TOKEN_IDS, MediaPlan, ProcessorSpec
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.preprocess.sandbox.processor import ProcessedPicture
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from hydra_engine.preprocess.text.writer import place_in_text
from hydra_transformers.classes import load_config, model_class
from hydra_transformers.processor import PictureProcessor, load_processor
from tests.models.driver import Driver, Request, Span
from tests.models.families.base import Prompt as PlacedPrompt

GENERIC = SpecOptions(model_impl="transformers")
Part = str | Image.Image
_MARKS = (("<|begin_of_image|>", "<|end_of_image|>"), ("<|IMAGE_START|>", "<|IMAGE_END|>"))


class Prompt(NamedTuple):
    parts: tuple[Part, ...]
    token_ids: list[int]  # one token per feature
    spans: list[tuple[int, Span]]  # first token, span
    rope: Tensor | None = None  # [3, T], where positions have three axes
    rope_delta: int = 0

    @property
    def pictures(self) -> list[Image.Image]:
        return [part for part in self.parts if isinstance(part, Image.Image)]


class Pair:
    def __init__(self, model_dir: Path, backend: Backend, *, role: Role = EPD, **driver: Any) -> None:
        self.driver = Driver(model_dir, backend, role=role, options=GENERIC, **({"num_blocks": 1024} | driver))
        self.spec, self.model_dir = self.driver.spec, model_dir
        self.tokenizer = load_tokenizer(model_dir)

    @cached_property
    def reference(self) -> Any:
        config = load_config(self.model_dir, trust_remote_code=False)
        kind = model_class(config, self.model_dir, trust_remote_code=False)
        return kind.from_pretrained(self.model_dir, dtype=torch.float32, attn_implementation="eager").eval()

    @property
    def processor(self) -> ProcessorSpec:
        assert self.spec.processor is not None
        return self.spec.processor

    @property
    def marks(self) -> tuple[str, str]:
        """Tokens around a picture. Without them transformers finds one picture where two are neighbours, if their
        positions have rows and columns."""
        known = [marks for marks in _MARKS if len(self.tokenizer.encode(marks[0], add_special_tokens=False)) == 1]
        return known[0] if known else ("", "")

    # ---- ours

    def prompt(self, *parts: Part) -> Prompt:
        placeholder = self.processor.placeholder if self.spec.vision is not None else ""
        pictures = [part for part in parts if isinstance(part, Image.Image)]
        text = "".join(part if isinstance(part, str) else placeholder for part in parts)
        if not pictures:
            return Prompt(parts, self.tokenizer.encode(text, add_special_tokens=False), [])
        expansions = [self._pictures.expand(picture) for picture in pictures]
        plans: list[MediaPlan] = []
        for picture, found in zip(pictures, expansions, strict=True):
            payload = ProcessedPicture(
                ImageDigest(bytes(32)), *picture.size, b"", 1, (), found.prefix, found.suffix, found.num_tokens, 1
            )
            payload = replace(payload, grid=found.grid)
            plans.append(payload.plan())
        ids = place_in_text(text, plans, self.processor, self.tokenizer, add_special_tokens=False)
        token_ids: list[int] = []
        spans = []
        for id in ids:
            if id != self.processor.image_token_id:
                token_ids.append(id)
                continue
            picture, found = pictures[len(spans)], expansions[len(spans)]
            arrays = {name: torch.from_numpy(array) for name, array in found.arrays.items()}
            arrays[SPAN_TOKEN_IDS] = torch.tensor(found.token_ids)
            spans.append((len(token_ids), Span(torch.empty(0), picture.size, (1, 1, 1), found.num_tokens, arrays)))
            token_ids += found.token_ids
        if self.spec.language.rope_sections is None:
            return Prompt(parts, token_ids, spans)
        placed = [(start, plan.items[0]) for (start, _), plan in zip(spans, plans, strict=True)]
        ropes, delta = place_spans(placed)
        return Prompt(parts, token_ids, spans, PlacedPrompt(token_ids, [], placed, ropes).rope(), delta)

    def request(self, prompt: Prompt) -> Request:
        slots = self.driver.encode([span for _, span in prompt.spans]) if prompt.spans else []
        starts = [start for start, _ in prompt.spans]
        return self.driver.request(
            prompt.token_ids, list(zip(starts, slots, strict=True)), rope=prompt.rope, rope_delta=prompt.rope_delta
        )

    # ---- transformers

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        placeholder = self.processor.placeholder if self.spec.vision is not None else ""
        text = "".join(part if isinstance(part, str) else placeholder for part in prompt.parts)
        if not prompt.pictures:
            ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        processor = load_processor(self.model_dir, self.processor.model_type, trust_remote_code=False)
        outputs = processor(images=[prompt.pictures], text=[text], add_special_tokens=False, return_tensors="pt")
        return dict(outputs)

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> Tensor:
        """[T, V]"""
        return self.reference(**self.inputs(prompt)).logits[0]

    @torch.inference_mode()
    def logits_of(self, token_ids: list[int], prompt: Prompt) -> Tensor:
        """[N, V]: what was said where each of these stands behind the prompt. They are text, also those that would be
        placeholders in a prompt: the first of the vocabulary stands in for all of them and gets their embeddings."""
        behind = token_ids[:-1]
        embed = self.reference.get_input_embeddings()
        rows = embed(torch.tensor([behind]))
        inputs = self.inputs(prompt)
        num_prompt = inputs["input_ids"].shape[1]
        for name, value in inputs.items():
            if value.shape == (1, num_prompt):  # a number for each token
                filler = int(name == "attention_mask")
                inputs[name] = torch.nn.functional.pad(value, (0, len(behind)), value=filler)

        def replace_rows(_module: Any, _args: Any, output: Tensor) -> Tensor:
            return torch.cat([output[:, : -len(behind)], rows], dim=1)

        handle = embed.register_forward_hook(replace_rows)
        try:
            return self.reference(**inputs).logits[0, num_prompt - 1 :]
        finally:
            handle.remove()

    @torch.inference_mode()
    def features(self, prompt: Prompt) -> Tensor:
        """[M, C]: of all pictures, in order."""
        inputs = self.inputs(prompt)
        found = self.reference.get_image_features(
            **{name: inputs[name] for name in self.processor.inputs if name in inputs}
        ).pooler_output
        return torch.cat([piece.flatten(0, -2) for piece in ([found] if isinstance(found, Tensor) else found)])

    @torch.inference_mode()
    def generate(self, prompt: Prompt, num_tokens: int) -> list[int]:
        inputs = self.inputs(prompt)
        ids = self.reference.generate(
            **inputs, max_new_tokens=num_tokens, min_new_tokens=0, eos_token_id=None, do_sample=False
        )
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    @cached_property
    def _pictures(self) -> PictureProcessor:
        return PictureProcessor.from_spec(self.processor)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed + 1000 * width + height)
    smooth = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(smooth).resize((width, height), Image.Resampling.BICUBIC)
