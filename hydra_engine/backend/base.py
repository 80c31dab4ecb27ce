"""The one door to hardware: what every backend offers. Everything above is written against this file alone.

Shape legend, used in every docstring of the package:
    T tokens of a packed step   B requests (rows)   Hq, Hkv, H heads   D head dim   C hidden   K inputs of a linear
    N blocks of a cache         L layers            X tensors per layer (2 for KV, 1 for image features)
    S slots per block           P patches           I images           V vocabulary

Ops are row-wise deterministic when `Ops.deterministic` is true: row t of a result depends only on the inputs of row t
(and, for attention, on the request's own context), never on how many rows share the call or how a prompt was cut
into chunks. The engine's promise "same seed, same text, whatever else is in the batch" rests on this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.device import Device, SharedMemory
from hydra_engine.backend.quantized import QuantizedWeight

Activation = Literal["none", "silu", "gelu", "gelu_tanh", "quick_gelu"]
# Tells a plan the contents of its tensors, before its first use and before each replay of a launch that was captured
# with it, in the thread and on the stream of both: num_context [B], block_tables [b, w] of the first b <= B rows and
# w <= W blocks, int32. The rows after them are padding: a context of 1 in block 0. Raises ValueError where what was
# captured cannot compute these contents.
Refresh = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], None]


class OpChoice(NamedTuple):
    """One line of the table that `doctor` and the start-up summary print."""

    op: str
    implementation: str  # "native-amx", "native-avx512bf16", "native-avx512", "native-avx2", "reference"
    reason: str


SCALE_BYTES = 4  # of a quantized cache's scale


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Block-major cache: one block with all its layers is one contiguous piece.

    data: [N, L, X, S, H, D] contiguous. KV cache: X = 2 (K, V), H = Hkv. Image cache: X = 1, H = 1, D = C and
    L = feature planes per image (1 but for deepstack models). A slot is block * S + offset. `memory`: where `data` lies
    if other processes can map it.

    Quantized (`quantized`): data is int8, `scales` [N, L, X, H, S] float32, an element is int8 * scale of its token and
    head, and rows are written and gathered in `rounded_from`. Behind each [S, H, D] of `data` lie its [H, S] of scales.
    A scale belongs to one token: a block is filled token by token, in chunks that depend on how a prompt was cut, and a
    scale of a whole block would change what earlier tokens are.
    """

    data: Tensor
    memory: SharedMemory | None = None
    scales: Tensor | None = None
    rounded_from: torch.dtype | None = None
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def quantized(
        cls, raw: Tensor, shape: tuple[int, ...], row_dtype: torch.dtype, memory: SharedMemory | None = None
    ) -> PagedCache:
        """Over `raw` [N * block bytes] uint8. Raises ValueError where S * H * D is no multiple of 4."""
        num_blocks, layers, tensors, size, heads, dim = shape
        if size * heads * dim % 4:
            raise ValueError(f"shape: expected S * H * D to be a multiple of 4, got {list(shape)}")
        plane, pitch = size * heads * dim, size * heads * (dim + SCALE_BYTES)
        strides = layers * tensors * pitch, tensors * pitch, pitch
        data = raw.view(torch.int8).as_strided(shape, (*strides, heads * dim, dim, 1))
        words = raw.view(torch.float32)
        scales = words[plane // SCALE_BYTES :] if num_blocks else words
        scales = scales.as_strided(
            (*shape[:3], heads, size),
            (*(stride // SCALE_BYTES for stride in strides), size, 1),
            scales.storage_offset(),
        )
        return cls(data, memory, scales, row_dtype)

    @property
    def row_dtype(self) -> torch.dtype:
        """Of the rows that are written and gathered, and of queries."""
        return self.rounded_from or self.data.dtype

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        elements = math.prod(self.data.shape[1:])
        scales = 0 if self.scales is None else math.prod(self.scales.shape[1:]) * SCALE_BYTES
        return elements * self.data.element_size() + scales

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Of a KV cache, [N, S, H, D] each. The views are made once, for that takes as long as a launch."""
        views = self._layers.get(layer)
        if views is None:
            views = self._layers[layer] = self.data[:, layer, 0], self.data[:, layer, 1]
        return views

    def block_view(self, block: int) -> Tensor:
        """All bytes of a block, uint8."""
        data = self.data[block]
        return data.view(torch.uint8).as_strided((self.block_bytes,), (1,), data.storage_offset() * data.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Made once per step by `Ops.plan_attention`, used by every layer. All tensors are host int32 on CPU backends.

    Row r of the step has query tokens [cu_q[r], cu_q[r+1]); they are the last of its num_context[r] context tokens,
    so query i sits at position num_context[r] - (cu_q[r+1] - cu_q[r]) + i and sees positions up to its own.
    """

    cu_q: Tensor  # [B + 1] int32
    num_context: Tensor  # [B] int32, after this step's tokens are written
    block_tables: Tensor  # [B, max_blocks] int32; entries beyond ceil(num_context / S) are arbitrary
    max_q: int
    max_context: int
    native: Any = None  # what the implementation prepared, opaque
    refresh: Refresh | None = None  # of plans by `plan_decode` whose implementation plans from contents


class MixedRows(NamedTuple):
    """The rows of a step, B of them: those of one token first (decodes), then others, then some without tokens that
    fill it up. All int32 on the device."""

    cu_q: Tensor  # [B + 1]: row r has tokens [cu_q[r], cu_q[r + 1])
    rest_cu_q: Tensor  # [B + 1]: the same of the others alone; decodes end where these begin
    num_context: Tensor  # [B]
    decode_context: Tensor  # [B]: that of decodes, 0 for all others
    block_tables: Tensor  # [B, W]


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Segments of packed rows, made by `Ops.plan_packed` and looked at only by what uses them."""

    cu_seqlens: Tensor  # [segments + 1] int32
    max_length: int


Segments = Sequence[int] | PackedPlan  # cu_seqlens: segment i has rows [cu[i], cu[i + 1]); empty ones are legal


@dataclass(frozen=True, slots=True)
class StateCache:
    """What layers with a recurrent state (gated delta nets) keep of requests, in N places; L counts these layers.

    conv: [N, L, K - 1, channels] contiguous of the compute dtype, the inputs before the next token.
    recurrent: [N, L, Hv, Dk, Dv] contiguous float32.
    """

    conv: Tensor
    recurrent: Tensor

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.recurrent.nbytes


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which tokens of a step belong to which state. Row r has tokens [cu_q[r], cu_q[r + 1]), the first of them at
    position starts[r] of its request. It goes on from the state in place reads[r] (from none where starts[r] is 0,
    whatever the place holds) and leaves its state in writes[r], which no other row of the step reads or writes.

    As they are made they lie on the host; layers get what `Ops.plan_states` or `Ops.plan_decode_states` makes of them.
    """

    cu_q: Tensor  # [B + 1] int64, as the others
    starts: Tensor  # [B]
    reads: Tensor
    writes: Tensor
    native: Any = None  # what the implementation prepared, opaque

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """cu_q, starts, reads, writes"""
        return self.cu_q.tolist(), self.starts.tolist(), self.reads.tolist(), self.writes.tolist()


class States(NamedTuple):
    """What recurrent layers keep of requests, and which rows of the step it belongs to."""

    cache: StateCache
    rows: StateRows


class Places(NamedTuple):
    """Where the layers of a step find and leave what they keep of its rows."""

    slots: Tensor  # [T] int64, KV-cache slot of each token
    attention: AttentionPlan
    states: States | None = None  # for models whose layers keep some


class SamplingTensors(NamedTuple):
    """How `Ops.sample` draws each row's token, [B] each, on their device. Filters as in worker/language/sampler.py."""

    temperatures: Tensor  # float32; 0: the largest logit, whatever the other fields say
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32; 1: all
    min_p: Tensor  # float32; 0: all
    numbers: Tensor  # float32 in [0, 1): where in the cumulative distribution


LOWEST_LOGIT = float(np.finfo(np.float32).min)  # of tokens that are masked: of weight 0, and a number still


class Adjustments(NamedTuple):
    """What `Ops.adjust_logits` does to the logits of each row, on their device, with entries that are valid wherever a
    row names them. Order and meaning are those of worker/language/sampler.py."""

    bias_begins: Tensor  # [B] int32: row b has the biases [bias_begins[b], bias_ends[b]) of these lists
    bias_ends: Tensor  # [B] int32
    bias_ids: Tensor  # [N] int32
    bias_values: Tensor  # [N] float64
    penalties: Tensor  # [B, 3] float64: repetition, frequency, presence
    counted: Tensor  # [B] int32: the row of `counts` that they act on, -1: no penalty
    counts: Tensor  # [M, V] int32: twice how often an output has the token, and 1 more where its prompt has it
    masked: Tensor  # [B] int32: the row of `masks`, -1: every token may come
    masks: Tensor  # [M, ceil(V / 32)] int32: token t may come where bit t % 32 of word t // 32 is set


class DeltaInputs(NamedTuple):
    """What the gated delta rule reads of T tokens; Hv is a multiple of Hk. The decay of a token is
    exp(-exp(rates) softplus(a + shift)), its strength sigmoid(b), rounded."""

    q: Tensor  # [T, Hk, Dk], as k; the rule normalises both
    k: Tensor
    v: Tensor  # [T, Hv, Dv]; head h reads key head h // (Hv / Hk)
    a: Tensor  # [T, Hv], as b
    b: Tensor
    rates: Tensor  # [Hv] float32, as shift
    shift: Tensor


Rotary = tuple[Tensor, Tensor]  # cosines and sines of the tokens' angles, [T, D/2] float32 each


class HeadNorms(NamedTuple):
    """Norms of queries and keys before they are rotated, as rms_norm with these weights [D]; None: left as it is."""

    q: Tensor | None
    k: Tensor | None
    eps: float


class Normed(NamedTuple):
    """rms_norm(rows, weight, eps), which is left to the op that takes it. Good until the rows are changed."""

    rows: Tensor  # [T, C]
    weight: Tensor  # [C]
    eps: float


class RowNorm(NamedTuple):
    """layer_norm with this weight and bias, [C] each, or without a bias rms_norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


# (token ids [T], positions [T], angles, cache, places) -> logits [T, V] float32: a decoder, for rows of one token each.
# Ids and positions are contiguous int64, positions are rows of the angles [P, D] float32.
Decode = Callable[[Tensor, Tensor, Tensor, PagedCache, Places], Tensor]


class PackedLinear(Protocol):
    """A weight in the layout its implementation wants; the original may be gone."""

    num_out: int
    num_in: int

    @property
    def nbytes(self) -> int: ...


class Ops(Protocol):
    """Unless said otherwise inputs may be strided in all but the last dimension, outputs are
    new contiguous tensors of the input's dtype (the compute dtype: float32, bfloat16 or float16), accumulation is
    float32, empty inputs (T = 0, B = 0) are legal, and a wrong shape or dtype raises ValueError naming the argument
    with expected and actual.
    """

    name: str
    deterministic: bool
    width_step: int  # layers make the rows between two products a multiple of so many numbers wide, with zeros

    def choices(self) -> tuple[OpChoice, ...]:
        """Which implementation each op takes on this machine and why."""
        ...

    # ---- linear algebra
    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
    ) -> PackedLinear:
        """weight [num_out, K] (+ bias [num_out]) -> packed. The caller drops its reference to `weight` afterwards.
        `rows`: the dtype of the x that it will multiply, that of `weight` unless said. A 16-bit weight of float32 rows
        may stay in its 16 bits: the product is that of the widened weight, bit for bit. Products with a quantised
        weight are computed as backend/quantized.py says, for x of any compute dtype."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """act(x @ W^T + bias) + residual: x [T, K] -> [T, num_out]. Bias, activation and residual ([T, num_out] of the
        result's dtype) are applied to the float32 sums, which are rounded once."""
        ...

    def linear_add_rms_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | Normed, Tensor]:
        """`add_rms_norm` of `linear`: x [T, K]; residual, results [T, C]. The norm may be left to what comes
        next."""
        ...

    def linear_add_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        """(norm of the second, `linear` with its residual): x [T, K]; residual, which is not written, and results
        [T, C]."""
        ...

    # ---- products and what follows them, for weights in one part or in several ones whose outputs follow each other
    def linear_act_and_mul(self, x: Tensor | Normed, weights: Sequence[PackedLinear], act: Activation) -> Tensor:
        """`act_and_mul` of `linear`: x [T, K], 2 * F outputs -> [T, F]."""
        ...

    def linear_rope_and_write(
        self,
        x: Tensor | Normed,
        weights: Sequence[PackedLinear],
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """`rope_and_write` of `linear`, whose (Hq + 2 Hkv) * D outputs are the heads of q, k and v: x [T, K] ->
        rotated q [T, Hq, D]. Where this is one launch, no later call raises for a slot that the kernel found
        outside of the cache."""
        ...

    # ---- element-wise and norms
    def pixel_rows(self, pixels: Tensor, table: Tensor, width: int) -> Tensor:
        """What every byte is under its colour: pixels [P, K] uint8, whose three colours take turns, table [256, 3] of
        any float type -> [P, width] of it, with zeros behind the K numbers."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2, -1) + eps) rounded to the dtype, times weight: [T, C] (as transformers' LlamaRMSNorm), or
        [T, H, D] with one weight [D] for all heads; tokens and heads at any stride. With a float32 weight and a smaller
        dtype of x, only the product is rounded."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), both [T, C]; may reuse `residual`'s memory for the second."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def act_and_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        """gate_up [T, 2 * F] -> act(gate) * up [T, F], gate first."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding: pairs (i, i + D/2) of x [T, H, D] turned by the angles of their token, cos, sin [T, D/2]
        float32. Tokens and heads may have any stride, so queries and keys of a fused projection take one call. The
        arithmetic is float32, rounded once."""
        ...

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """rms_norm(x) * silu(gate), both rounded: x, gate [T, H, D], weight [D] for all heads."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate) in float32, rounded once: x, gate [T, H, D]."""
        ...

    # ---- recurrent states
    def plan_states(self, rows: StateRows) -> StateRows:
        """Made once per step, used by every layer that keeps a state. From host tensors, which may be reused once this
        returns only where the device computes on the host too."""
        ...

    def plan_decode_states(self, starts: Tensor, reads: Tensor, writes: Tensor) -> StateRows:
        """The rows of a step of one token a row, from tensors on the device, [B] int64, whose contents may change until
        each use. A row whose `writes` is -1 leaves no state. A launch that uses them can be captured. Raises ValueError
        where the implementation plans from contents."""
        ...

    def causal_conv(self, x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        """silu(sum over j of weight[:, j] * x[t - K + 1 + j]), every channel for itself, zeros before the first token:
        x [T, channels], weight [channels, K] contiguous of x's dtype -> [T, channels]. Moves `cache.conv` on."""
        ...

    def delta_rule(self, inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        """The gated delta rule (formulas in backend/reference/delta_rule.py) -> [T, Hv, Dv]. Moves `cache.recurrent`
        on."""
        ...

    # ---- caches
    # A slot outside of the cache, other than a -1 that skips its row, raises ValueError before anything is written if
    # slots lie in host memory. Slots on a GPU are seen by the kernel alone, which skips such a row: then a later call
    # raises, but not for a cache with scales, nor after an op that says so.
    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        """The paged write: rows[x][t] ([T, H, D], any row stride) -> cache slot slots[t], tensor x. slots [T] int64;
        slot -1 skips the row. Bits are copied, the dtype must be the cache's. Used for KV and image features alike."""
        ...

    def rope_and_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotates q [T, Hq, D] and k [T, Hkv, D] (half-split pairs (i, i + D/2), as Llama), behind their norms where
        there are any, writes rotated k and v to `slots` (-1 skips), returns rotated q [T, Hq, D]. Sections of `rotary`
        are resolved."""
        ...

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        """hidden[rows[m]] = cache feature at slots[m], in place; those of a plane above 0 (deepstack) are added, in
        float32 and rounded once. hidden [T, C] contiguous; rows (none twice), slots [M] int64; slot -1 skips the
        row."""
        ...

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        """[M, H, D] contiguous in the cache's `row_dtype`: tensor `index` (0 K, 1 V) of `layer` at slots [M] int64. A
        row whose slot is -1 is not written: it holds whatever its new memory held."""
        ...

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        """Whole blocks, all layers: target[pairs[i, 1]] = source[pairs[i, 0]]; pairs [n, 2] int64. The pairs of a call
        are copied in no order, or all at once: none may write what another one reads or writes. Blocks of the source
        may be changed by another process meanwhile: then nothing is said of what is copied, and nothing else breaks."""
        ...

    # ---- attention
    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """From host tensors, which may be reused once this returns only where the device computes on the host too."""
        ...

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """The plan of a step of one token a row, from tensors on the device: num_context [B], block_tables [B, W]
        int32, whose contents may change until each use. Its `max_context` is 0, for only the cache knows S: a context
        may be as long as W blocks. A launch that uses the plan can be captured. Where it has a `refresh`, each use is
        of what that was told last. Raises ValueError where the implementation plans from contents."""
        ...

    def plan_mixed(self, rows: MixedRows, num_tokens: int, most_others: int) -> AttentionPlan:
        """The plan of a step of decodes and at most `most_others` other rows, of `num_tokens` tokens of which those
        behind the last row's are padding, with any result. As `plan_decode`: contents of the tensors may change until
        each use, and a launch that uses the plan can be captured. B is at most `num_tokens`. Raises ValueError where
        the implementation plans from contents."""
        ...

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Causal attention of the step's queries over their paged context, decode rows and prefill chunks alike.
        q [T, Hq, D] -> [T, Hq, D]; query head h reads KV head h // (Hq / Hkv); softmax in float32. Of a quantized cache
        (q . k) * scale of k, and weights times the scale of v."""
        ...

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Segments from a tensor on the device, [segments + 1] int32, whose contents may change until each use; then
        they rise from 0 to all rows, and no segment is longer than `max_length`. A launch that uses the plan can be
        captured. Raises ValueError where the implementation plans from contents."""
        ...

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        """Bidirectional attention within each segment [cu[i], cu[i+1]) of packed rows (vision towers).
        q, k, v [P, H, D] (may be strided views of one fused projection) -> [P, H, D]. Where a plan's segments are not
        as `Ops.plan_packed` says, rows may have any values."""
        ...

    # ---- whole steps
    def recorded(self, decode: Decode) -> Decode:
        """`decode`, or what gives its bits with less between the ops. For one lane; a result is good until the next
        call. `decode` does nothing but launch these ops, take rows of tables and join columns, and what it does follows
        from the shapes of its inputs."""
        ...

    # ---- sampling
    def best_tokens(self, logits: Tensor) -> Tensor:
        """logits [B, V] float32 -> [B] int64: the lowest id among the largest logits, -1 for a row that is not
        finite."""
        ...

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
        """logits [B, V] float32 -> (tokens [B] int64, finite [B] bool). The token at `numbers` of the filtered
        distribution's cumulative sum in vocabulary order; the lowest id among the largest logits at temperature 0. A
        row that is not finite gets some valid token. A row's token depends on its own row alone."""
        ...

    def adjust_logits(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """What the rows of logits [B, V] float32 are drawn from, a new tensor. Computed in float64 and rounded once;
        masked tokens get LOWEST_LOGIT; a logit that is not finite stays as it is."""
        ...

    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """What log probabilities are made of: of logits [B, V] float32, tokens [B] int64 and num_top [B] int32 of at
        most `most`, -1 for rows that ask for none -> (numbers [B, 3 + most] float32: the token's logit, the largest,
        the sum of exp(logit - largest), the num_top largest; places [B, 1 + most] int32: the token's rank, ids of the
        largest). Tokens are ordered by (logit descending, id ascending). Entries beyond have any value, as those of
        rows that are not finite."""
        ...


def computed(ops: Ops, x: Tensor | Normed) -> Tensor:
    """For what takes no norm that is left to it."""
    return ops.rms_norm(*x) if isinstance(x, Normed) else x


@dataclass(frozen=True, slots=True)
class Backend:
    """One device with the ops chosen for it; made by `backend/select.py` and nowhere else."""

    device: Device
    ops: Ops
    dtype: torch.dtype
    threads: int
    notes: tuple[str, ...] = ()  # what a user should know of it, a sentence each
