"""What transformers computes for the same checkpoint: features, logits of every position, greedy tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil


class TransformersModel:
    def __init__(self, model_dir: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.config = transformers.AutoConfig.from_pretrained(model_dir)
        with_images = self.config.model_type == "llava"
        auto = transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(model_dir, dtype=dtype).eval()
        self.processor = CLIPImageProcessorPil.from_pretrained(model_dir) if with_images else None

    def pixel_values(self, pixels: Tensor) -> Tensor:
        """uint8 [I, H, W, 3] -> float32 [I, 3, H, W]"""
        assert self.processor is not None
        pictures = [Image.fromarray(picture.numpy()) for picture in pixels]
        return self.processor(pictures, return_tensors="pt")["pixel_values"]

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """[I, num_tokens, C]"""
        values = self.pixel_values(pixels).to(self.model.dtype)
        return torch.stack(list(self.model.get_image_features(values).pooler_output))

    @torch.inference_mode()
    def logits(self, token_ids: list[int], pixels: Tensor | None = None) -> Tensor:
        """[T, V] float32"""
        return self.model(**self._inputs(token_ids, pixels)).logits[0].float()

    @torch.inference_mode()
    def generate(self, token_ids: list[int], num_tokens: int, pixels: Tensor | None = None) -> list[int]:
        settings = {"max_new_tokens": num_tokens, "min_new_tokens": 0, "eos_token_id": None, "do_sample": False}
        inputs = self._inputs(token_ids, pixels)
        ids = self.model.generate(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), **settings)
        return ids[0, len(token_ids) :].tolist()

    def _inputs(self, token_ids: list[int], pixels: Tensor | None) -> dict[str, Tensor]:
        inputs = {"input_ids": torch.tensor([token_ids])}
        if pixels is not None:
            inputs["pixel_values"] = self.pixel_values(pixels).to(self.model.dtype)
        return inputs
