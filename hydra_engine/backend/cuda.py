"""`Ops` on a CUDA device. Importing this needs the extension, torch with CUDA to compute, and Triton; `select.py` asks.

Only names what does what: matrix products are in cuda_linear.py, caches in cuda_cache.py, attention in
cuda_attention.py, recurrent states in cuda_states.py, everything else is one kernel of hydra_kernels. Nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hydra_engine.backend import cuda_cache, cuda_linear, cuda_states
from hydra_engine.backend.attention_choice import TRITON, Chosen
from hydra_engine.backend.base import (
    Activation,
    AttentionPlan,
    Draws,
    OpChoice,
    PackedLinear,
    PackedPlan,
    PagedCache,
    Segments,
    StateCache,
    StateRows,
)
from hydra_engine.backend.cuda_attention import MAX_HEAD_DIM, CudaAttention
from hydra_engine.backend.device import Send
from hydra_engine.backend.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.flashinfer_attention import choices as flashinfer_choices
from hydra_engine.backend.reference import ALL_OPS
from hydra_kernels.activation import act_and_mul, sigmoid_mul
from hydra_kernels.norms import add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from hydra_kernels.rotary import rotate
from hydra_kernels.sampling import sample

_TRITON = ("triton", "one kernel of hydra_kernels reads and writes each element once")
_NATIVE = ("native-cuda", "one kernel of the extension moves 16 bytes at a time")
_HEADS = f"head dims above {MAX_HEAD_DIM} take torch's attention"
_CHOICES = {
    "linear": (
        "cublas",
        f"Triton up to {cuda_linear.SMALL_ROWS} rows; cuBLAS above, where an activation, or a residual beside a bias, "
        "acts on the rounded product",
    ),
    "rms_norm": _TRITON,
    "add_rms_norm": _TRITON,
    "layer_norm": _TRITON,
    "act_and_mul": _TRITON,
    "rotate": _TRITON,
    "gated_rms_norm": _TRITON,
    "sigmoid_mul": _TRITON,
    "causal_conv": ("triton", "tiles of tokens of all rows in one launch"),
    "delta_rule": ("triton", "token by token with the state in registers, decodes and prompts alike"),
    "write_cache": _NATIVE,
    "rope_and_write": _NATIVE,
    "merge_image_tokens": _NATIVE,
    "gather_cache": _NATIVE,
    "copy_blocks": _NATIVE,
    "attention_paged": ("triton", f"split contexts for decodes, tiles of queries for prompts; {_HEADS}"),
    "attention_packed": ("triton", f"tiles of queries; {_HEADS}"),
    "sample": ("triton", "draws without a sort"),
}
_DETERMINISTIC = {
    "linear": ("triton-invariant", "deterministic was asked for: one order of sums for every number of rows"),
    "attention_paged": ("triton", f"deterministic was asked for: contexts are never split; {_HEADS}"),
}


class CudaOps:
    """`Ops` of backend/base.py for one device with `num_sms` multiprocessors. `send` as that of its `Device`;
    FlashInfer's `attention` is not deterministic."""

    name = "cuda"

    def __init__(
        self,
        device: torch.device,
        num_sms: int,
        send: Send,
        *,
        deterministic: bool = False,
        attention: Chosen | None = None,
    ) -> None:
        self.deterministic = deterministic
        self._descs = cuda_cache.CudaCacheDescs(device)
        by_triton = CudaAttention(device, num_sms, send, deterministic=deterministic)
        self._paged: CudaAttention | FlashInferAttention = by_triton
        self._packed: CudaAttention | FlashInferAttention = by_triton
        self._attention_choices: dict[str, tuple[str, str]] = {}
        if attention is not None and attention.name != TRITON:
            self._paged = FlashInferAttention(device, num_sms, send, by_triton)
            self._packed = by_triton if attention.only_paged else self._paged
            self._attention_choices = flashinfer_choices(attention)
        self._send = send
        cuda_linear.prepare()

    def choices(self) -> tuple[OpChoice, ...]:
        chosen = _CHOICES | (_DETERMINISTIC if self.deterministic else {}) | self._attention_choices
        return tuple(OpChoice(op, *chosen[op]) for op in (*ALL_OPS, "sample"))

    # ---- linear algebra

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return cuda_linear.CudaLinear(weight, bias)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return cuda_linear.linear(
            x, weight, act=act, residual=residual, out_dtype=out_dtype, deterministic=self.deterministic
        )

    # ---- element-wise and norms

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum takes the place of `residual`."""
        return add_rms_norm(x, residual, weight, eps), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(x, weight, bias, eps)

    def act_and_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        return act_and_mul(gate_up, act)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(x, cos, sin)

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        return gated_rms_norm(x, weight, gate, eps)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return sigmoid_mul(x, gate)

    # ---- recurrent states

    def plan_states(self, rows: StateRows) -> StateRows:
        return cuda_states.plan(rows, self._send)

    def plan_decode_states(self, starts: Tensor, reads: Tensor, writes: Tensor) -> StateRows:
        return cuda_states.plan_decode(starts, reads, writes)

    def causal_conv(self, x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        return cuda_states.causal_conv(x, weight, cache, layer, rows)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        rates: Tensor,
        shift: Tensor,
        cache: StateCache,
        layer: int,
        rows: StateRows,
    ) -> Tensor:
        return cuda_states.delta_rule(q, k, v, a, b, rates, shift, cache, layer, rows)

    # ---- caches

    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        cuda_cache.write_cache(self._descs.of(cache), cache, layer, rows, slots)

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        desc = self._descs.of(cache)
        return cuda_cache.rope_and_write(desc, q, k, v, cos, sin, cache, layer, slots, q_norm, k_norm, eps)

    def merge_image_tokens(
        self,
        hidden: Tensor,
        rows: Tensor,
        cache: PagedCache,
        slots: Tensor,
        plane: int = 0,
        *,
        accumulate: bool = False,
    ) -> None:
        cuda_cache.merge_image_tokens(self._descs.of(cache), hidden, rows, cache, slots, plane, accumulate)

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        return cuda_cache.gather_cache(self._descs.of(cache), cache, layer, index, slots)

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        cuda_cache.copy_blocks(self._descs.of(source), self._descs.of(target), source, target, pairs)

    # ---- attention

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return self._paged.plan(cu_q, num_context, block_tables)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return self._paged.plan_decode(num_context, block_tables)

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        return self._paged.paged(q, cache, layer, plan, scale)

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        return self._packed.plan_packed(cu_seqlens, max_length)

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        return self._packed.packed(q, k, v, cu_seqlens, scale)

    # ---- sampling

    def sample(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        return sample(logits, *draws)
