"""Peers that a user could run instead: transformers' own module, and a plain torch decode step over its weights.

The module is built from the same directory with the same weights as ours: read from the checkpoint, or drawn from the
same seed and names. So results can be compared before times are. Does not know floors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from bench.micro.harness import Report
from bench.micro.steps import Step
from bench.micro.subject import Encode, Subject
from hydra_engine.models.build import vision_class
from hydra_engine.models.loading.random_weights import NamedDraws
from hydra_engine.models.loading.safetensors_checkpoint import canonical_name
from hydra_engine.models.qwen_vl.spec import Qwen2VisionSpec


class HfPeer:
    """transformers' module on the subject's device, in its dtype, with SDPA attention."""

    def __init__(self, subject: Subject) -> None:
        transformers.utils.logging.disable_progress_bar()
        auto, options = transformers.AutoModelForImageTextToText, {"attn_implementation": "sdpa"}
        self._subject = subject
        model: Any
        dtype = subject.backend.dtype
        if subject.random:
            config = transformers.AutoConfig.from_pretrained(subject.directory)
            with subject.device:  # not on meta: rotary frequencies are buffers that no checkpoint has
                model = auto.from_config(config, dtype=dtype, **options)
            _draw(model, subject)
        else:
            model = auto.from_pretrained(subject.directory, dtype=dtype, **options)
        self.module: Any = model.to(subject.device).eval()

    @staticmethod
    def num_bytes(subject: Subject) -> int:
        return subject.model.weights_bytes

    # ---- the tower

    def encode(self, encode: Encode) -> Callable[[], Tensor]:
        """[tokens, C]: the pictures of `encode`, normalised and cut into patches beforehand."""
        vision = self._subject.spec.vision
        assert vision is not None
        preprocess = vision.preprocess
        mean = torch.tensor(preprocess.mean, device=self._subject.device)
        std = torch.tensor(preprocess.std, device=self._subject.device)
        pictures = [(pixels.float() * preprocess.rescale - mean) / std for pixels in encode.pixels]
        dtype = self._subject.backend.dtype
        if isinstance(vision, Qwen2VisionSpec):
            geometry = vision.geometry
            values = torch.cat([_patches(picture, geometry.patch_size, geometry.merge_size) for picture in pictures])
            grids = torch.tensor([item.grid for item in encode.items], device=self._subject.device)
            values = values.to(dtype)
            return lambda: _features(self.module.get_image_features(values, grids))
        stacked = torch.cat(pictures).permute(0, 3, 1, 2).to(dtype).contiguous()
        return lambda: _features(self.module.get_image_features(stacked))

    # ---- the decoder

    def prefill(self, step: Step) -> Callable[[], Tensor]:
        """[B, V]: whole prompts of one length, the head on their last tokens."""
        token_ids = step.token_ids.view(len(step.rows), -1)
        return lambda: self.module(input_ids=token_ids, use_cache=False, logits_to_keep=1).logits[:, -1]

    def eager_decode(self, step: Step) -> Callable[[], Tensor]:
        """[B, V]: one token for every request, with the contents of our cache in transformers' growing one."""
        cache = transformers.DynamicCache(config=self.module.config.get_text_config())
        for layer, (keys, values) in enumerate(self._contexts(step)):
            cache.update(keys, values, layer)
        token_ids = step.token_ids[:, None]
        positions = step.positions[..., None]  # [B, 1], or [3, B, 1] where positions have three axes

        def run() -> Tensor:
            out = self.module(
                input_ids=token_ids, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
            )
            cache.crop(-1)  # what every release understands: without the last token
            logits: Tensor = out.logits[:, -1]
            return logits

        return run

    def static_decode(self, step: Step) -> Callable[[], Tensor]:
        """[B, V]: the same in plain torch over contiguous keys and values that have room for the token, so that it can
        be captured or compiled."""
        return StaticDecode(self.module, step, self._contexts(step), self._subject)

    def _contexts(self, step: Step) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, Hkv, start, D] of one layer after another, copied out of our blocks."""
        start, tables = step.rows[0].start, step.tables.long().to(self._subject.device)
        assert all(row == step.rows[0] for row in step.rows), "peers take requests of one length"
        for layer in range(step.cache.data.shape[1]):
            blocks = step.cache.data[:, layer][tables]  # [B, W, 2, S, Hkv, D]
            both = blocks.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)[:, :, :, :start]
            yield both[0].contiguous(), both[1].contiguous()


def peer_of(report: Report, subject: Subject) -> HfPeer | None:
    """None where this release of transformers does not build the model: then ours is measured alone."""
    with report.optional(f"{subject.name} of transformers"):
        return HfPeer(subject)
    return None


class StaticDecode:
    """A decode step in the manner of gpt-fast: the modules' weights, torch's SDPA, nothing that allocates by length."""

    def __init__(self, module: Any, step: Step, contexts: Iterator[tuple[Tensor, Tensor]], subject: Subject) -> None:
        language = subject.spec.language
        inner = module.model.language_model
        self._embed, self._layers, self._norm, self._head = inner.embed_tokens, inner.layers, inner.norm, module.lm_head
        self._heads, self._kv_heads, self._dim = language.num_heads, language.num_kv_heads, language.head_dim
        self._token_ids, self._start = step.token_ids, step.rows[0].start
        self._caches = [tuple(F.pad(x, (0, 0, 0, 1)) for x in pair) for pair in contexts]
        frequencies = inner.rotary_emb.inv_freq.float()
        angles = torch.cat([self._start * frequencies] * 2).to(subject.device)
        dtype = subject.backend.dtype
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self) -> Tensor:
        x = self._embed(self._token_ids)
        rows, start = len(x), self._start
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            q = self._turned(attention.q_proj(h).view(rows, self._heads, self._dim))
            keys[:, :, start] = self._turned(attention.k_proj(h).view(rows, self._kv_heads, self._dim))
            values[:, :, start] = attention.v_proj(h).view(rows, self._kv_heads, self._dim)
            mixed = F.scaled_dot_product_attention(
                q[:, :, None], keys, values, enable_gqa=self._heads != self._kv_heads
            )
            x = x + attention.o_proj(mixed.reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits: Tensor = self._head(self._norm(x)).float()
        return logits

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin


def compiled(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Compiles `run` with torch.compile; its graphs copy their results."""
    made: Callable[[], Tensor] = torch.compile(lambda: run(), mode="reduce-overhead", fullgraph=False)
    return made


def _features(found: Any) -> Tensor:
    """Features of all pictures in one tensor, from the output of any release of transformers."""
    pooled = getattr(found, "pooler_output", found)
    return torch.cat(list(pooled)) if isinstance(pooled, (tuple, list)) else pooled.flatten(0, -2)


def _patches(picture: Tensor, patch: int, merge: int) -> Tensor:
    """[1 picture, height, width, 3] -> [P, 3 * 2 * patch * patch] in the order of the Qwen processors: merge blocks one
    after another, the picture twice in time."""
    _, height, width, _ = picture.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    x = picture[0].view(rows, merge, patch, columns, merge, patch, 3)
    x = x.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns * merge * merge, 3, 1, patch, patch)
    return x.expand(-1, 3, 2, patch, patch).reshape(len(x), -1)


def _draw(model: Any, subject: Subject) -> None:
    """The weights that `models/loading/random_weights.py` draws for these names."""
    renames = vision_class(subject.spec).renames
    # Of our own names: a tower's last layers may have none.
    draws = NamedDraws((name for name, slot in subject.model.slots.items() if not slot.optional), subject.device)
    for name, parameter in model.named_parameters():
        draws.draw(canonical_name(name, renames), parameter.data)
