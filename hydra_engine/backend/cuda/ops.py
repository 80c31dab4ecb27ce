"""`Ops` on a CUDA device. Importing this needs the extension, torch with CUDA, and Triton; `select.py` checks first.

Only dispatches: matrix products are in linear.py, caches in cache.py, attention in attention.py, recurrent states in
delta_rule.py, everything else is one kernel of hydra_kernels. Waits for the device in `gather_cache` of a quantized
cache alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import (
    Activation,
    Adjustments,
    Decode,
    DeferredNorm,
    HeadNorms,
    OpChoice,
    PackedLinear,
    PagedCache,
    Rotary,
    RowNorm,
    SamplingTensors,
    StateRows,
)
from hydra_engine.backend.cuda import delta_rule as cuda_states
from hydra_engine.backend.cuda import experts as cuda_experts
from hydra_engine.backend.cuda import linear as cuda_linear
from hydra_engine.backend.cuda.attention import MAX_HEAD_DIM, CudaAttention
from hydra_engine.backend.cuda.attention_choice import (
    DECODES,
    FLASHINFER,
    FLASHINFER_PROMPTS,
    PROMPTS,
    TRITON,
    TRITON_TMA,
    USES,
    ChosenAttention,
)
from hydra_engine.backend.cuda.cache import CudaCacheOps, slots_on_device
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.tower_attention import TowerAttention
from hydra_engine.backend.cuda.tower_attention import kernels as tower_kernels
from hydra_engine.backend.device import Send
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.ops import ALL_OPS, ComposedOps
from hydra_engine.backend.reference.sampling import best_tokens
from hydra_kernels.activation import act_and_mul, sigmoid_mul
from hydra_kernels.fused_linear import can_norm, gated_linear, rope_linear
from hydra_kernels.linear import small_linear
from hydra_kernels.logits import adjust_logits, score_tokens
from hydra_kernels.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from hydra_kernels.pixels import pixel_rows
from hydra_kernels.rotary import rotate
from hydra_kernels.sampling import sample

_TRITON = ("triton", "one kernel of hydra_kernels reads and writes each element once")
_NATIVE = ("native-cuda", "one kernel of the extension moves 16 bytes at a time")
_HEADS = f"head dims above {MAX_HEAD_DIM} take torch's attention"
_CHOICES = {
    "linear": (
        "cublas",
        f"Triton up to {cuda_linear.SMALL_ROWS} rows and for quantised weights; cuBLAS above, where an activation, or "
        "a residual beside a bias, acts on the rounded product; more rows meet 8-bit floats on tensor cores, rounded",
    ),
    "route": ("triton", "one launch"),
    "experts": ("triton", "tiles of the rows that chose an expert; which there are is read on the device"),
    **dict.fromkeys(
        ("rms_norm", "add_rms_norm", "layer_norm", "act_and_mul", "rotate", "gated_rms_norm", "sigmoid_mul"), _TRITON
    ),
    "causal_conv": ("triton", "tiles of tokens of all rows in one launch"),
    "delta_rule": ("triton", "token by token with the state in registers, decodes and prompts alike"),
    **dict.fromkeys(("write_cache", "rope_and_write", "merge_image_tokens", "gather_cache", "copy_blocks"), _NATIVE),
    "attention_paged": ("triton", f"split contexts for decodes, tiles of queries for prompts; {_HEADS}"),
    "attention_packed": ("triton", f"tiles of queries; {_HEADS}"),
    "sample": ("triton", "draws without a sort"),
    "adjust_logits": ("triton", "one launch; rows without biases, penalties and masks are copied"),
    "score_tokens": ("triton", "two launches; rows without log probabilities leave at once"),
}
_SAMPLING = ("sample", "adjust_logits", "score_tokens")
_DETERMINISTIC = {
    "linear": ("triton-invariant", "deterministic was asked for: one order of sums for every number of rows"),
    "attention_paged": ("triton", f"deterministic was asked for: contexts are never split; {_HEADS}"),
}


class CudaOps(CudaCacheOps, ComposedOps):
    """`Ops` of backend/base.py for a device with `num_sms` SMs.

    send: `Device.send`. attention: kernels by use case, Triton's if None; FlashInfer's are not deterministic.
    num_sms_here: as in `CudaAttention`. Sets flags of torch for the whole process, so that 16-bit products are summed
    in float32.
    """

    name = "cuda"
    width_step = cuda_linear.WIDTH_STEP

    pixel_rows = staticmethod(pixel_rows)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    act_and_mul = staticmethod(act_and_mul)
    rotate = staticmethod(rotate)
    gated_rms_norm = staticmethod(gated_rms_norm)
    sigmoid_mul = staticmethod(sigmoid_mul)
    pack_experts = staticmethod(cuda_experts.CudaExperts)
    route = staticmethod(cuda_experts.route)
    plan_decode_states = staticmethod(cuda_states.plan_decode)
    plan_mixed_states = staticmethod(cuda_states.plan_mixed)
    causal_conv = staticmethod(cuda_states.causal_conv)
    delta_rule = staticmethod(cuda_states.delta_rule)
    best_tokens = staticmethod(best_tokens)
    score_tokens = staticmethod(score_tokens)

    def __init__(
        self,
        device: torch.device,
        num_sms: int,
        send: Send,
        *,
        deterministic: bool = False,
        attention: ChosenAttention | None = None,
        num_sms_here: Callable[[int], int] | None = None,
    ) -> None:
        self.deterministic = deterministic
        super().__init__(device)
        chosen = ChosenAttention() if attention is None else attention
        by_triton = CudaAttention(
            device,
            num_sms,
            send,
            deterministic=deterministic,
            num_sms_here=num_sms_here,
            tma_prompts=chosen.kernel_for(PROMPTS) == TRITON_TMA,
        )
        by_flashinfer = None
        if any(name.startswith(FLASHINFER) for name in chosen.names.values()):
            by_flashinfer = FlashInferAttention(
                device,
                num_sms,
                send,
                by_triton,
                decodes=chosen.kernel_for(DECODES) == FLASHINFER,
                prompts=FLASHINFER_PROMPTS.get(chosen.kernel_for(PROMPTS)),
            )
        paged: CudaAttention | FlashInferAttention = by_triton
        if by_flashinfer is not None and any(
            chosen.kernel_for(use) in FLASHINFER_PROMPTS for use in USES["attention_paged"]
        ):
            paged = by_flashinfer
        self.plan_attention, self.plan_decode, self.attention_paged = paged.plan, paged.plan_decode, paged.paged
        self.plan_mixed = paged.plan_mixed
        packed: CudaAttention | TowerAttention = by_triton
        if any(chosen.kernel_for(use) != TRITON for use in USES["attention_packed"]):
            packed = TowerAttention(chosen, by_triton, tower_kernels(by_triton, by_flashinfer))
        self.plan_packed, self.attention_packed = by_triton.plan_packed, packed.attend_packed
        self._attention_choices = chosen.choices()
        self._send = send
        self.linear = partial(cuda_linear.linear, deterministic=deterministic)
        self.experts = partial(cuda_experts.experts, deterministic=deterministic)
        # Process-wide: 16-bit products are summed in float32, also in cuBLAS's split-K kernels.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def choices(self) -> tuple[OpChoice, ...]:
        """The implementation of each op for these settings, with the reason."""
        chosen = _CHOICES | (_DETERMINISTIC if self.deterministic else {}) | self._attention_choices
        return tuple(OpChoice(op, *chosen[op]) for op in (*ALL_OPS, *_SAMPLING))

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
    ) -> PackedLinear:
        """Implements `Ops.pack_linear`, on the weight's device. Weights packed in 16 bits are padded to rows of whole
        16 bytes."""
        if isinstance(weight, QuantizedWeight):
            return cuda_linear.QuantizedCudaLinear(weight, bias)
        return cuda_linear.CudaLinear(weight, bias, rows or weight.dtype)

    def linear_add_rms_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Implements `Ops.linear_add_rms_norm`. If `cuda_linear.fused` allows it and x has one row, the norm is
        deferred to the product that follows. Sums have the bits of `add_rms_norm`."""
        plain = cuda_linear.fused(x, (linear,), deterministic=self.deterministic)
        if plain is None or not can_norm(x):
            return super().linear_add_rms_norm(x, linear, residual, weight, eps)
        total = small_linear(x, plain.weight, plain.bias, residual, rounded=True)
        return DeferredNorm(total, weight, eps), total

    def linear_add_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        """Implements `Ops.linear_add_norm`. If `cuda_linear.leaves_residual` is true, the norm's launch adds the
        residual, with the same bits, and the sum overwrites the product."""
        if not cuda_linear.leaves_residual(x.shape[0], linear, deterministic=self.deterministic):
            return super().linear_add_norm(x, linear, residual, norm)
        total: Tensor = self.linear(x, linear)
        if norm.bias is None:
            return add_rms_norm(residual, total, norm.weight, norm.eps), total
        return add_layer_norm(residual, total, norm.weight, norm.bias, norm.eps), total

    def linear_act_and_mul(self, x: Tensor | DeferredNorm, weights: Sequence[PackedLinear], act: Activation) -> Tensor:
        """Implements `Ops.linear_act_and_mul`, in one launch if `cuda_linear.fused` allows it."""
        rows, norm, eps = self._with_norm(x)
        weight = cuda_linear.fused(rows, weights, deterministic=self.deterministic)
        if weight is None:
            return super().linear_act_and_mul(x, weights, act)
        return gated_linear(rows, weight.weight, weight.bias, act, norm, eps)

    def linear_rope_and_write(
        self,
        x: Tensor | DeferredNorm,
        weights: Sequence[PackedLinear],
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Implements `Ops.linear_rope_and_write`, in one launch if `cuda_linear.fused` allows it, heads have no norms,
        and the cache is not quantized. That launch does not report slots on the device that are outside of the
        cache."""
        rows, norm, eps = self._with_norm(x)
        weight = cuda_linear.fused(rows, weights, deterministic=self.deterministic)
        if weight is None or norms is not None or cache.scales is not None:
            return super().linear_rope_and_write(x, weights, rotary, cache, layer, slots, norms)
        checks.check_plane(cache, layer, 1)
        slots = slots_on_device(cache, slots)
        caches = cache.keys_and_values(layer)
        return rope_linear(rows, weight.weight, weight.bias, *rotary, slots, *caches, norm, eps)

    def _with_norm(self, x: Tensor | DeferredNorm) -> tuple[Tensor, Tensor | None, float]:
        """Returns (rows, weight, eps): rows with a norm that the fused product is to apply, or, if weight is None, rows
        that need none. A deferred norm of several rows is applied here."""
        if not isinstance(x, DeferredNorm):
            return x, None, 0.0
        return x if can_norm(x.rows) else (self.rms_norm(*x), None, 0.0)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(s), s), s = x + residual, which overwrites `residual`."""
        return add_rms_norm(x, residual, weight, eps), residual

    def record_decode(self, decode: Decode) -> Decode:
        """Returns `decode`: on CUDA whole steps are graphs, ops are not recorded."""
        return decode

    def plan_states(self, rows: StateRows) -> StateRows:
        """Implements `Ops.plan_states`. The host tensors may be changed afterwards."""
        return cuda_states.plan(rows, self._send)

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Draws one token per row: (tokens [B] int64, finite [B] bool), as `Ops.sample`."""
        return sample(logits, *sampling)

    def adjust_logits(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """Returns new logits [B, V] float32 with biases, penalties and masks applied, as `Ops.adjust_logits`."""
        return adjust_logits(logits, *adjustments)
