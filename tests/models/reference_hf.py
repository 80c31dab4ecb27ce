"""The reference: logits of every position and greedy tokens from transformers, for the same text-only checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor


class TransformersModel:
    def __init__(self, model_dir: Path, *, dtype: torch.dtype = torch.float32) -> None:
        self.config = transformers.AutoConfig.from_pretrained(model_dir)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V] float32"""
        return self.model(input_ids=torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def generate(self, token_ids: list[int], num_tokens: int) -> list[int]:
        settings = {"max_new_tokens": num_tokens, "min_new_tokens": 0, "eos_token_id": None, "do_sample": False}
        ids = torch.tensor([token_ids])
        output = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return output[0, len(token_ids) :].tolist()
