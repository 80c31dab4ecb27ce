"""MiniCPM-V 2.6 in the shared parity tests. transformers has no class for it, so its published code's arithmetic is
written out here, in float64: image_processing_minicpmv.py, modeling_navit_siglip.py, resampler.py and
modeling_minicpmv.py of openbmb/MiniCPM-V-2_6, with transformers' Qwen2, SigLIP's layers and torch's attention.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import load_torch_model
from PIL import Image
from torch import Tensor, nn

from hydra_engine.models.specs.fields import read_json
from tests.models.families.base import FamilyCase, Inputs, Media
from tools.miniatures.minicpmv2_6 import PublishedConfig, PublishedModel

Size = tuple[int, int]  # width, height; also columns, rows


class Processor(NamedTuple):
    """The published picture processor."""

    max_slices: int
    scale: int
    patch: int
    num_tokens: int
    use_image_id: bool

    @classmethod
    def of(cls, model_dir: Path) -> Processor:
        values = read_json(model_dir, "preprocessor_config.json").values
        names = ("max_slice_nums", "scale_resolution", "patch_size", "image_feature_size", "use_image_id")
        return cls(*(values[name] for name in names))

    def divisible(self, length: float, unit: int) -> int:
        return max(round(length / unit) * unit, unit)

    def best_size(self, size: tuple[float, float], *, upscales: bool) -> Size:
        width, height = size
        if width * height > self.scale**2 or upscales:
            ratio = width / height
            height = int(self.scale / math.sqrt(ratio))
            width = int(height * ratio)
        return self.divisible(width, self.patch), self.divisible(height, self.patch)

    def grid(self, size: Size) -> Size | None:
        """(columns, rows) of the slices."""
        width, height = size
        shape = math.log(width / height)
        count = min(math.ceil(width * height / self.scale**2), self.max_slices)
        if count <= 1:
            return None
        counts = [n for n in (count - 1, count, count + 1) if 1 < n <= self.max_slices]
        grids = [(columns, n // columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
        return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))  # the first of equals

    def slices(self, image: Image.Image) -> list[Image.Image]:
        """The picture of the whole, and the slices row by row."""
        grid = self.grid(image.size)
        whole = image.resize(self.best_size(image.size, upscales=grid is None), Image.Resampling.BICUBIC)
        if grid is None:
            return [whole]
        columns, rows = grid
        width, height = self.divisible(image.width, columns), self.divisible(image.height, rows)
        side = self.best_size((width / columns, height / rows), upscales=True)
        canvas = image.resize((side[0] * columns, side[1] * rows), Image.Resampling.BICUBIC)
        corners = [(column * side[0], row * side[1]) for row in range(rows) for column in range(columns)]
        return [whole, *(canvas.crop((x, y, x + side[0], y + side[1])) for x, y in corners)]

    def text(self, size: Size, number: int) -> str:
        """Returns the text that replaces a picture in a prompt."""
        unknown = "<unk>" * self.num_tokens
        found = f"<image_id>{number}</image_id>" if self.use_image_id else ""
        found += f"<image>{unknown}</image>"
        columns, rows = self.grid(size) or (0, 0)
        return found + "\n".join(f"<slice>{unknown}</slice>" * columns for _ in range(rows))

    def pixels(self, image: Image.Image) -> Tensor:
        """[3, height, width]"""
        values = np.asarray(image).astype(np.float32) / 255
        return torch.from_numpy((values - np.float32(0.5)) / np.float32(0.5)).permute(2, 0, 1)


class Pictures(Inputs):
    """Pictures of the tower by number, and how many of them belong to each picture."""

    counts: list[int]


def inputs(model_dir: Path, media: Sequence[Media]) -> Inputs:
    processor, found = Processor.of(model_dir), Pictures()
    cut = [processor.slices(one) for one in media if isinstance(one, Image.Image)]
    pictures = itertools.chain.from_iterable(cut)
    found.update({str(number): processor.pixels(one) for number, one in enumerate(pictures)})
    found.counts = [len(one) for one in cut]
    return found


def positions(length: int, side: int) -> Tensor:
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor(length)), bounds, right=True)


def sines(places: Tensor, width: int) -> Tensor:
    """[P, width], in float32 as published."""
    frequencies = 1.0 / 10000 ** (np.arange(width // 2, dtype=np.float32) / (width / 2.0))
    angles = np.einsum("p,d->pd", places.numpy().astype(np.float32), frequencies.astype(np.float32))
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


class Reference(nn.Module):
    """The published parts, with what the shared tests call of transformers' models."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self.config: Any = PublishedConfig.from_pretrained(model_dir)
        self.parts = PublishedModel(self.config)
        load_torch_model(self.parts, model_dir, strict=not self.config.tie_word_embeddings)
        self.parts.llm.tie_weights()
        self.dtype = torch.float64 if dtype == torch.float32 else dtype
        self.parts.to(self.dtype).eval()
        self.model = SimpleNamespace(language_model=self.parts.llm.model)
        tokens = read_json(model_dir, "tokenizer.json").values["added_tokens"]
        self.unknown = next(token["id"] for token in tokens if token["content"] == "<unk>")

    def get_input_embeddings(self) -> Any:
        return self.parts.get_input_embeddings()

    def encode(self, pixels: Tensor) -> Tensor:
        """Features of one picture of the tower, [tokens, C]."""
        tower = self.parts.vpm
        patch, side = tower.config.patch_size, tower.config.image_size // tower.config.patch_size
        rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
        places = positions(rows, side)[:, None] * side + positions(columns, side)
        x = tower.embeddings.patch_embedding(pixels[None].to(self.dtype)).flatten(2).transpose(1, 2)
        x = x + tower.embeddings.position_embedding(places.flatten())
        x = tower.post_layernorm(tower.encoder(inputs_embeds=x).last_hidden_state)
        return self.resample(x[0], rows, columns)

    def resample(self, x: Tensor, rows: int, columns: int) -> Tensor:
        part = self.parts.resampler
        width = part.query.shape[1] // 2
        row, column = (
            part.flatten() for part in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        )
        places = torch.cat([sines(column, width), sines(row, width)], dim=1).to(self.dtype)
        x = part.ln_kv(part.kv_proj(x))
        out, _ = part.attn(part.ln_q(part.query), x + places, x, need_weights=False)
        return part.ln_post(out) @ part.proj

    def _embeddings(self, input_ids: Tensor, pictures: dict[str, Tensor]) -> Tensor:
        embeddings = self.get_input_embeddings()(input_ids)
        if not pictures:
            return embeddings
        features = torch.cat([self.encode(pictures[str(number)]) for number in range(len(pictures))])
        places = (input_ids[0] == self.unknown).nonzero()[:, 0]
        return embeddings.index_copy(1, places, features[None])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **pictures: Tensor) -> Any:
        return self.parts.llm(inputs_embeds=self._embeddings(input_ids, pictures), attention_mask=attention_mask)

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **values: Any) -> Tensor:
        pictures = {name: values.pop(name) for name in list(values) if name.isdecimal()}
        embeddings = self._embeddings(input_ids, pictures)
        new = self.parts.llm.generate(inputs_embeds=embeddings, attention_mask=attention_mask, **values)
        return torch.cat([input_ids, new], dim=1)


def features(model: Any, values: Inputs) -> list[tuple[Tensor, ...]]:
    assert isinstance(values, Pictures)
    numbers = iter(range(len(values)))
    return [(torch.cat([model.encode(values[str(next(numbers))]) for _ in range(n)]),) for n in values.counts]


MINICPMV_2_6 = FamilyCase(
    family="minicpmv",
    variants={
        "plain": {},
        # Fewer patches than queries: 16 and 9 of a slice.
        "many-queries": {
            "query_num": 20,
            "scale_resolution": 14,
            "use_image_id": False,
            "drop_vision_last_layer": True,
        },
        "one-width": {
            "query_num": 5,
            "tie_word_embeddings": True,
            "text": {"hidden_size": 128, "num_key_value_heads": 1},
            "vision": {"hidden_size": 128, "image_size": 70, "num_hidden_layers": 1, "hidden_act": "gelu"},
        },
    },
    sizes=((48, 48), (80, 60), (23, 70)),
    extreme=((1, 1), (90, 2)),
    inputs=inputs,
    features=features,
    load=Reference,
    quick=False,
)
