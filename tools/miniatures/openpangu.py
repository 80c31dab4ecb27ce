"""Random miniatures of openPangu-VL-7B in its published layout, and the model itself, which transformers does not have.

The model is written out from the published code (see `hydra_engine/models/openpangu/spec.py`) for one prompt at a time,
in the dtype of its weights; angles are float32 as there. It permutes nothing and packs nothing: a window is a mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tools.miniatures.base import BOS_ID, EOS_ID, PAD_ID, TEXT, TINY_VOCABULARY, TinyFamily, chat_template

VISION_START, IMAGE, VISION_END, VIDEO = EXTRA_TOKENS = ("[unused18]", "[unused19]", "[unused20]", "[unused32]")
_TEXT: dict[str, Any] = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "vocab_size": TINY_VOCABULARY + len(EXTRA_TOKENS),
    "bias": True,
    "rope_theta": 64e6,
    "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_act": "gelu",
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_heads": 3,
    "in_chans": 3,
    "out_hidden_size": 40,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 24,
    "fullatt_block_indexes": [1, 3],
    "mm_unit_vision_select_layer": [-1, -3],
}
PROCESSOR: dict[str, Any] = {
    "min_pixels": 256,
    "max_pixels": 3072,
    "image_processor_type": "OpenPanguVLImageProcessorFast",
    "processor_class": "OpenPanguVLProcessor",
    "any_res_min_frame_pixels": 128,
    "any_res_max_frame_pixels": 1024,
    "any_res_min_video_total_pixels": 512,
    "any_res_max_video_total_pixels": 4096,
}


class OpenPanguConfig(transformers.PreTrainedConfig):
    """config.json as published, in `fields`: transformers would move rotary settings elsewhere."""

    model_type = "openpangu_vl"

    def __init__(self, fields: Mapping[str, Any] | None = None, **others: Any) -> None:
        self.fields = dict(fields or {})
        ids = {name: self.fields[name] for name in self.fields if name.endswith("token_id")}
        super().__init__(**{**ids, **others})
        self.vocab_size = self.fields.get("vocab_size", 1)
        self.max_position_embeddings = self.fields.get("max_position_embeddings", 1)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v: [T, heads, D]; keys may have fewer heads. `mask` [T, T] is true where a row sees another one."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    wide = scores.masked_fill(~mask, -torch.inf).to(torch.promote_types(q.dtype, torch.float32))
    return torch.einsum("hqk,khd->qhd", wide.softmax(-1).to(q.dtype), v).flatten(1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x: [T, heads, D]; angles: [T, D/2], of pairs (i, i + D/2)."""
    cos, sin = (table.to(x.dtype)[:, None] for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def frequencies(theta: float, size: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


class Mlp(nn.Module):
    def __init__(self, size: int, inner: int, act: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias) if act == "silu" else None
        self.up_proj, self.down_proj = nn.Linear(size, inner, bias=bias), nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(nn.functional.gelu(self.up_proj(x)))
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TowerLayer(nn.Module):
    def __init__(self, vision: SimpleNamespace) -> None:
        super().__init__()
        size = vision.hidden_size
        self.norm1, self.norm2, self._heads = Norm(size, 1e-6), Norm(size, 1e-6), vision.num_heads
        parts = ("q", "k", "v") if getattr(vision, "split", False) else ("qkv",)
        sizes = {**dict.fromkeys(parts, 3 * size // len(parts)), "proj": size}
        self.attn = nn.ModuleDict({name: nn.Linear(size, count) for name, count in sizes.items()})
        self.mlp = Mlp(size, vision.intermediate_size, vision.hidden_act, bias=True)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x)
        parts = torch.cat([self.attn[name](normed) for name in list(self.attn)[:-1]], dim=1)
        q, k, v = parts.unflatten(1, (3, self._heads, -1)).unbind(1)
        x = x + self.attn["proj"](attend(rotate(q, angles), rotate(k, angles), v, mask))
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    def __init__(self, size: int, width: int, num_out: int) -> None:
        super().__init__()
        self.ln_q, self._width = Norm(size, 1e-6), width
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, num_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).view(-1, self._width))


class Tower(nn.Module):
    def __init__(self, vision: SimpleNamespace, size: int) -> None:
        super().__init__()
        self._vision, channels, patch = vision, vision.hidden_size, vision.patch_size
        kernel = (vision.temporal_patch_size, patch, patch)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(3, channels, kernel, kernel, bias=False)})
        self.blocks = nn.ModuleList(TowerLayer(vision) for _ in range(vision.depth))
        self.final_layernorm = Norm(channels, 1e-6)
        self._read = sorted((vision.depth + n for n in vision.mm_unit_vision_select_layer), reverse=True)
        width = channels * vision.spatial_merge_size**2
        self.merger = nn.ModuleList(Merger(channels, width, vision.out_hidden_size) for _ in self._read)
        self.vision_projection = nn.ModuleDict({"fc1": nn.Linear(vision.out_hidden_size, size)})

    def forward(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Features [tokens, C] of one picture or frame: patches [rows * columns, 3 * patch * patch] in merge order."""
        vision, merge = self._vision, self._vision.spatial_merge_size
        pixels = patches.view(-1, 3, 1, vision.patch_size, vision.patch_size).expand(
            -1, -1, vision.temporal_patch_size, -1, -1
        )
        x = self.patch_embed["proj"](pixels).flatten(1)
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        blocks = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3)
        row, column = blocks.reshape(2, -1)
        pairs = frequencies(10000.0, vision.hidden_size // vision.num_heads // 2)
        angles = torch.cat((row[:, None] * pairs, column[:, None] * pairs), dim=1)
        side = vision.window_size // vision.patch_size // merge * merge
        window = torch.stack((row // side, column // side), dim=1)
        near = (window[:, None] == window).all(-1)
        merged: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x = block(x, angles, torch.ones_like(near) if index in vision.fullatt_block_indexes else near)
            if index in self._read:
                merged[index] = self.merger[self._read.index(index)](self.final_layernorm(x))
        return self.vision_projection["fc1"](
            nn.functional.silu(torch.stack([merged[index] for index in self._read]).sum(0))
        )


class DecoderLayer(nn.Module):
    def __init__(self, text: SimpleNamespace) -> None:
        super().__init__()
        size, self._dim = text.hidden_size, text.hidden_size // text.num_attention_heads
        heads = {"q": text.num_attention_heads, "k": text.num_key_value_heads, "v": text.num_key_value_heads}
        parts = {f"{name}_proj": nn.Linear(size, count * self._dim, bias=text.bias) for name, count in heads.items()}
        self.self_attn = nn.ModuleDict({**parts, "o_proj": nn.Linear(size, size, bias=text.bias)})
        self.mlp = Mlp(size, text.intermediate_size, "silu", bias=False)
        self.input_layernorm, self.post_attention_layernorm = (Norm(size, text.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        q, k, v = (self.self_attn[f"{name}_proj"](normed).unflatten(1, (-1, self._dim)) for name in "qkv")
        x = x + self.self_attn["o_proj"](attend(rotate(q, angles), rotate(k, angles), v, mask))
        return x + self.mlp(self.post_attention_layernorm(x))


def axis_order(sections: Sequence[int]) -> list[int]:
    """Axes of the pairs, of time, rows and columns, as the published rotary embedding interleaves them."""
    counts = {0: sections[0] - 1, 1: sections[1], 2: sections[2]}
    left, placed, order = dict(counts), dict.fromkeys(counts, 0), list[int]()
    for _ in range(sum(counts.values())):
        free = [axis for axis in left if left[axis] > 0]
        free = [axis for axis in free if not order or axis != order[-1]] or free
        best = min(free, key=lambda axis: (placed[axis] / counts[axis], axis))
        order.append(best)
        placed[best] += 1
        left[best] -= 1
    return [*order, 0]


class Decoder(nn.Module):
    def __init__(self, text: SimpleNamespace) -> None:
        super().__init__()
        self._text = text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(text) for _ in range(text.num_hidden_layers))
        self.norm = Norm(text.hidden_size, text.rms_norm_eps)
        sections = text.rope_scaling["mrope_section"]
        runs = [axis for axis, count in enumerate(sections) for _ in range(count)]
        self._axes = axis_order(sections) if text.rope_scaling["mrope_interleaved"] else runs

    @property
    def language_model(self) -> Decoder:
        return self

    def forward(self, *, inputs_embeds: Tensor, positions: Tensor) -> Tensor:
        """inputs_embeds: [1, T, C]; positions: [3, T]."""
        x, text = inputs_embeds[0], self._text
        pairs = frequencies(text.rope_theta, text.hidden_size // text.num_attention_heads)
        angles = positions[self._axes].T * pairs
        mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.norm(x)

    def get_rope_index(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        **_others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Positions [3, 1, T], and what is added to the index of a token after the prompt."""
        text = self._text
        grids = {text.image_token_id: frames(image_grid_thw), text.video_token_id: frames(video_grid_thw)}
        found: list[Tensor] = []
        index = following = 0
        while index < input_ids.shape[1]:
            if (frame := next(grids.get(int(input_ids[0, index]), iter(())), None)) is None:
                found.append(torch.full((3, 1), following))
                index, following = index + 1, following + 1
                continue
            rows, columns = (side // text.vision_config["spatial_merge_size"] for side in frame)
            places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
            found.append(torch.cat((torch.zeros_like(places[:1]), places)) + following)
            index, following = index + rows * columns, following + max(rows, columns)
        return torch.cat(found, dim=1)[:, None], torch.tensor(following - input_ids.shape[1])


def frames(grids: Tensor | None) -> Iterator[tuple[int, int]]:
    """(rows, columns) of every picture or frame."""
    for time, rows, columns in () if grids is None else grids.tolist():
        yield from [(rows, columns)] * time


class OpenPanguVLForConditionalGeneration(transformers.PreTrainedModel):
    config_class = OpenPanguConfig
    _supports_sdpa = True  # it has one way to attend

    def __init__(self, config: OpenPanguConfig) -> None:
        super().__init__(config)
        text = SimpleNamespace(**config.fields)
        self._text = text
        self.visual = Tower(SimpleNamespace(**text.vision_config), text.hidden_size)
        self.model = Decoder(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.generation_config = transformers.GenerationConfig.from_model_config(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def features(self, patches: Tensor, grids: Tensor) -> list[Tensor]:
        """The features of every picture or frame."""
        sides = list(frames(grids))
        parts = patches.split([rows * columns for rows, columns in sides])
        return [self.visual(part, *side) for part, side in zip(parts, sides, strict=True)]

    def forward(self, input_ids: Tensor, num_prompt: int | None = None, **inputs: Any) -> SimpleNamespace:
        """Logits [1, T, V]; tokens from `num_prompt` on are text whatever they are."""
        x, prompt = self.model.embed_tokens(input_ids), input_ids[:, :num_prompt]
        kinds = {"image": ("pixel_values", self._text.image_token_id)}
        kinds["video"] = ("pixel_values_videos", self._text.video_token_id)
        for kind, (name, token) in kinds.items():
            if name in inputs:
                rows = torch.cat(self.features(inputs[name], inputs[f"{kind}_grid_thw"]))
                x[0, (prompt[0] == token).nonzero()[:, 0]] = rows
        positions, delta = self.model.get_rope_index(prompt, **inputs)
        further = torch.arange(prompt.shape[1], input_ids.shape[1]) + delta
        positions = torch.cat((positions[:, 0], further.expand(3, -1)), dim=1)
        return SimpleNamespace(logits=self.lm_head(self.model(inputs_embeds=x, positions=positions))[None])

    def generate(self, input_ids: Tensor, max_new_tokens: int, **inputs: Any) -> Tensor:
        """The likeliest tokens, each after a pass over everything before it."""
        known = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        num_prompt = input_ids.shape[1]
        for _ in range(max_new_tokens):
            token = self(input_ids, num_prompt, **known).logits[0, -1].argmax()
            input_ids = torch.cat((input_ids, token.view(1, 1)), dim=1)
        return input_ids


transformers.AutoConfig.register(OpenPanguConfig.model_type, OpenPanguConfig, exist_ok=True)
transformers.AutoModelForImageTextToText.register(OpenPanguConfig, OpenPanguVLForConditionalGeneration, exist_ok=True)


def _build_config(text: Mapping[str, Any], vision: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    start, image, end, video = range(TINY_VOCABULARY, TINY_VOCABULARY + len(EXTRA_TOKENS))
    fields = {
        **{**_TEXT, **text},
        "vision_config": {**_VISION, **vision},
        "tie_word_embeddings": False,
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        **{"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
        **overrides,
    }
    return OpenPanguConfig(fields)


def _save_processor(directory: Path, config: Any, tokenizer: Any) -> None:
    """Adds the fields of config.json where the published file has them, beside the copy that the model here reads."""
    path = directory / "config.json"
    written = json.loads(path.read_text()) if path.exists() else {"model_type": config.model_type}
    path.write_text(json.dumps({**written, **config.fields}, indent=2))
    vision = config.fields["vision_config"]
    patches = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **patches}, indent=2))
    tokenizer.save_pretrained(directory)


OPENPANGU = TinyFamily(
    _build_config,
    _save_processor,
    EXTRA_TOKENS,
    chat_template(f"{VISION_START}{IMAGE}{VISION_END}", f"{VISION_START}{VIDEO}{VISION_END}"),
)
