"""The device interface: `Ops`, which compute, and `Device` (device.py): memory, lanes, copies, graphs.

All code above backend/ is written against this file and device.py; nothing there imports torch.cuda.
`select.create_backend` makes both:

    backend = create_backend("cpu", torch.float32)
    weight = backend.ops.pack_linear(torch.randn(64, 32))               # [num_out, K]
    y = backend.ops.linear(torch.randn(5, 32), weight, act="silu")      # [5, 64]

Shape legend, used in every docstring of the package:
    T tokens of a packed step   B requests (rows)   Hq, Hkv, H heads   D head dim   C hidden   K inputs of a linear
    N blocks of a cache         L layers            X tensors per layer (2 for KV, 1 for image features)
    S slots per block           P patches           I images           V vocabulary

Ops are batch-invariant when `Ops.deterministic` is true: row t of a result depends only on the inputs of row t (and,
for attention, on the request's own context), not on the other rows of the call, nor on how a prompt was cut into
chunks. The engine's promise "same seed, same text, whatever else is in the batch" rests on this.

Ops whose plan is "capturable" read lengths and block tables on the device when they run, so a CUDA graph of them serves
other contents of the same tensors. Implementations that divide their work on the host cannot do that.
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
# Plans again on the host, before the first use and before each replay of a graph, in the same thread and on the same
# stream. Takes num_context [B] and block_tables [b, w], int32, of the first b <= B rows and w <= W blocks; rows after b
# are padding, with a context of 1 in block 0. Raises ValueError if the captured launch cannot compute these contents.
Refresh = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], None]


class OpChoice(NamedTuple):
    """The implementation of an op, and why it was chosen, for `doctor` and the start-up summary."""

    op: str
    implementation: str  # "native-avx2" (the instruction set), "triton", "cublas", "reference", ..
    reason: str


SCALE_BYTES = 4  # of one float32 scale of a quantized cache


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A block-major cache: a block with all its layers is one contiguous piece of memory.

    data: [N, L, X, S, H, D] contiguous. KV cache: X = 2 (K, V), H = Hkv. Image cache: X = 1, H = 1, D = C and L =
    feature planes per image (1 except for deepstack models). Slots are numbered over all blocks: block * S + offset.
    `memory`: the shared memory that holds `data`, None if other processes cannot map it.

    Quantized (`quantized`): data is int8 and `scales` float32 [N, L, X, H, S]; an element is int8 * the scale of its
    token and head. Rows are written and gathered in the dtype `rounded_from`. In memory each [S, H, D] of `data` is
    followed by its [H, S] of scales. A scale belongs to one token, not to a block: a block is filled token by token, in
    chunks that depend on how a prompt was cut, and a scale of the whole block would change the values of earlier
    tokens.
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
        """Returns a quantized cache of `shape` (N, L, X, S, H, D) over `raw`, uint8 [N * L * X * S * H * (D + 4)].

        `row_dtype`: of the rows that are written and gathered. Raises ValueError unless S * H * D is a multiple of 4.
        """
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
        """Dtype of the rows that are written and gathered, and of queries."""
        return self.rounded_from or self.data.dtype

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, scales included."""
        return self.num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with all its layers, scales included."""
        elements = math.prod(self.data.shape[1:])
        scales = 0 if self.scales is None else math.prod(self.scales.shape[1:]) * SCALE_BYTES
        return elements * self.data.element_size() + scales

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of K and V of a layer of a KV cache, [N, S, Hkv, D] each; int8 without scales if it is quantized.

        The views are kept, since making them takes as long as a launch.
        """
        views = self._layers.get(layer)
        if views is None:
            views = self._layers[layer] = self.data[:, layer, 0], self.data[:, layer, 1]
        return views

    def block_view(self, block: int) -> Tensor:
        """A view of all bytes of a block, scales included: uint8 [block_bytes]."""
        data = self.data[block]
        return data.view(torch.uint8).as_strided((self.block_bytes,), (1,), data.storage_offset() * data.itemsize)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Queries, contexts and blocks of a step's rows, for all its layers; made by `plan_attention`, `plan_decode` or
    `plan_mixed` of `Ops`.

    Row r of the step has query tokens [cu_q[r], cu_q[r+1]); they are the last of its num_context[r] context tokens, so
    its i-th query (from 0) has position num_context[r] - (cu_q[r+1] - cu_q[r]) + i and attends to positions up to its
    own. Tensors are on the device of the ops.
    """

    cu_q: Tensor  # [B + 1] int32
    num_context: Tensor  # [B] int32, after this step's tokens are written
    block_tables: Tensor  # [B, max_blocks] int32; entries beyond ceil(num_context / S) are arbitrary
    max_q: int  # queries of a row at most
    max_context: int  # of a row; 0 if it is read at launch time
    native: Any = None  # the implementation's own data, opaque
    refresh: Refresh | None = None  # set by `plan_decode` if the implementation plans on the host


class MixedRows(NamedTuple):
    """The B rows of a captured step with prompts: first decodes (one token each), then rows of prompts, then empty rows
    as padding. All tensors are int32 on the device."""

    cu_q: Tensor  # [B + 1]: row r has tokens [cu_q[r], cu_q[r + 1])
    rest_cu_q: Tensor  # [B + 1]: max(cu_q, number of decodes), so that rows of decodes are empty
    num_context: Tensor  # [B]
    decode_context: Tensor  # [B]: num_context of decodes, 0 for all other rows
    block_tables: Tensor  # [B, W]


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Segments of packed rows, made by `Ops.plan_packed`. Ops read the contents of `cu_seqlens` at launch time."""

    cu_seqlens: Tensor  # [segments + 1] int32
    max_length: int  # rows of a segment at most


Segments = Sequence[int] | PackedPlan  # cu_seqlens: segment i has rows [cu[i], cu[i + 1]); empty ones are legal


@dataclass(frozen=True, slots=True)
class StateCache:
    """The states of requests in L recurrent layers (gated delta nets), in N slots.

    conv: [N, L, K - 1, channels] contiguous of the compute dtype: the last K - 1 inputs of the causal convolution.
    recurrent: [N, L, Hv, Dk, Dv] contiguous float32: the state S of each head (`Ops.delta_rule`).
    """

    conv: Tensor
    recurrent: Tensor

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.recurrent.nbytes


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step for layers with recurrent states, int64 vectors.

    Row r has tokens [cu_q[r], cu_q[r + 1]), the first of them at position starts[r] of its request. It continues the
    state in read_slots[r] (a state of zeros if starts[r] is 0, whatever the slot holds) and leaves its state in
    write_slots[r], which no other row of the step reads or writes.

    Built on the host: ops use what `Ops.plan_states` returns for it, or the result of `Ops.plan_decode_states` or
    `Ops.plan_mixed_states`.
    """

    cu_q: Tensor  # [B + 1]
    starts: Tensor  # [B]
    read_slots: Tensor  # [B]
    write_slots: Tensor  # [B]; -1: the state is not stored, only in rows that are on the device
    native: Any = None  # the implementation's own data, opaque

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """The vectors as lists: cu_q, starts, read_slots, write_slots. Waits for the device that holds them."""
        return self.cu_q.tolist(), self.starts.tolist(), self.read_slots.tolist(), self.write_slots.tolist()


class States(NamedTuple):
    """A cache of recurrent states with the rows of a step."""

    cache: StateCache
    rows: StateRows


class StepInputs(NamedTuple):
    """The inputs that all layers of a decoder share: cache slots, attention plan, rows of recurrent states."""

    slots: Tensor  # [T] int64, KV-cache slot of each token
    attention: AttentionPlan
    states: States | None = None  # None: the model has no recurrent layers


class SamplingTensors(NamedTuple):
    """Sampling parameters of `Ops.sample`, [B] each, on the device of the logits; floats are float32 (on a CPU possibly
    float64).

    Logits are divided by the temperature, then filtered: `top_k` largest (ties with the k-th stay), then the fewest
    most probable tokens whose probabilities sum to `top_p` (the lowest ids of equals), then those with at least `min_p`
    of the largest probability.
    """

    temperatures: Tensor  # 0: greedy, the other fields are ignored
    top_k: Tensor  # int32; 0: no limit
    top_p: Tensor  # 1: no limit
    min_p: Tensor  # 0: no limit
    numbers: Tensor  # random, in [0, 1): the token at this point of the row's cumulative distribution is drawn


LOWEST_LOGIT = float(np.finfo(np.float32).min)  # of masked tokens: their weight is 0, and the logit is finite


class Adjustments(NamedTuple):
    """Biases, penalties and masks that `Ops.adjust_logits` applies, on the device of the logits.

    In this order: biases are added; logits of tokens in prompt or output are divided by the repetition penalty if
    positive, else multiplied by it; tokens of the output lose frequency * occurrences + presence; tokens outside of the
    mask get LOWEST_LOGIT. Indices must lie within the lists and tables: only native CPU ops check that.
    """

    bias_begins: Tensor  # [B] int32: row b has the biases [bias_begins[b], bias_ends[b]) of these lists
    bias_ends: Tensor  # [B] int32
    bias_ids: Tensor  # [N] int32
    bias_values: Tensor  # [N] float64
    penalties: Tensor  # [B, 3] float64: repetition, frequency, presence
    counted: Tensor  # [B] int32: the row of `counts` that penalties use, -1: no penalty
    counts: Tensor  # [M, V] int32: 2 * occurrences of the token in the output, + 1 if it is in the prompt
    masked: Tensor  # [B] int32: the row of `masks`, -1: every token is allowed
    masks: Tensor  # [M, ceil(V / 32)] int32: token t is allowed if bit t % 32 of word t // 32 is set


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule for T tokens; Hv is a multiple of Hk, Dk at most 512.

    A token decays the state by exp(-exp(rates) * softplus(a + shift)) (`A_log` and `dt_bias` of checkpoints) and is
    written with beta = sigmoid(b), rounded to b's dtype.
    """

    q: Tensor  # [T, Hk, Dk]; the rule scales q and k to length 1
    k: Tensor  # [T, Hk, Dk]
    v: Tensor  # [T, Hv, Dv]; head h reads key head h // (Hv / Hk)
    a: Tensor  # [T, Hv]
    b: Tensor  # [T, Hv]
    rates: Tensor  # [Hv] float32
    shift: Tensor  # [Hv] float32


Rotary = tuple[Tensor, Tensor]  # cosines and sines of the tokens' rotary angles, [T, D/2] float32 each


class HeadNorms(NamedTuple):
    """rms_norm weights [D] for queries and keys before they are rotated (QK norm). None: no norm."""

    q: Tensor | None
    k: Tensor | None
    eps: float


class DeferredNorm(NamedTuple):
    """The rows of an rms_norm(rows, weight, eps) that is not computed yet; the op that gets this as its input computes
    it. Invalid once `rows` is overwritten."""

    rows: Tensor  # [T, C]
    weight: Tensor  # [C]
    eps: float


class RowNorm(NamedTuple):
    """A layer_norm with this weight and bias, [C] each; without a bias, an rms_norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float


# A decode step, one token per row: (token ids [T], positions [T], angles, cache, step) -> logits [T, V] float32.
# Ids and positions are contiguous int64; positions index the rows of the angles, [P, D] float32.
Decode = Callable[[Tensor, Tensor, Tensor, PagedCache, StepInputs], Tensor]


class PackedLinear(Protocol):
    """A weight with its bias in the memory layout of an implementation, made by its `Ops.pack_linear`."""

    num_out: int
    num_in: int

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias in that layout."""
        ...


class Routes(NamedTuple):
    """The experts of a mixture that T tokens are sent to, made by `Ops.route`."""

    experts: Tensor  # [T, K] int32 contiguous: of 0 to num_experts - 1; -1: none, its weight is ignored
    weights: Tensor  # [T, K] float32 contiguous


class PackedExperts(Protocol):
    """The weights of a mixture's gated MLPs in the memory layout of an implementation, made by its
    `Ops.pack_experts`."""

    num_experts: int
    num_in: int  # C
    num_inner: int  # F

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in that layout."""
        ...


class Ops(Protocol):
    """The operations of one device.

        cache = PagedCache(torch.zeros(8, 2, 2, 16, 4, 64))            # 8 blocks, 2 layers, K and V, 16 slots
        tables = torch.tensor([[3, 5]], dtype=torch.int32)             # one request with 20 tokens in blocks 3 and 5
        plan = ops.plan_attention(torch.tensor([0, 1]).int(), torch.tensor([20]).int(), tables)
        out = ops.attention_paged(torch.randn(1, 8, 64), cache, 0, plan, scale=64**-0.5)     # [1, 8, 64]

    Unless said otherwise: inputs may have any stride between rows (tokens) and are dense within them, vectors are
    contiguous; outputs are new contiguous tensors of the input's dtype, which is a compute dtype (float32, bfloat16 or
    float16); sums are float32; empty inputs (T = 0, B = 0) are legal; a wrong shape or dtype raises ValueError that
    names the argument, with expected and actual.
    """

    name: str
    deterministic: bool
    width_step: int  # layers zero-pad the width between two products (that of an MLP) to a multiple of this

    def choices(self) -> tuple[OpChoice, ...]:
        """The ops that `doctor` lists, each with its implementation on this machine and the reason."""
        ...

    # ---- linear algebra
    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
    ) -> PackedLinear:
        """Packs a weight for `linear`. The result may share the memory of `weight`, which must not change afterwards.

        weight: [num_out, K] of a compute dtype, or quantised (backend/quantized.py has the arithmetic of its products,
        for x of any compute dtype). bias: [num_out] or None. rows: dtype of the x that it will multiply, that of
        `weight` if None. A 16-bit weight of float32 rows may stay in its 16 bits: the product is that of the widened
        weight, bit for bit.
        """
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
        """Returns act(x @ W^T + bias) + residual, [T, num_out].

        x: [T, K] of the dtype that the weight was packed for. residual: [T, num_out] of the result's dtype. out_dtype:
        x's dtype (if None) or float32. Bias, activation and residual act on the float32 sums, which are rounded once;
        on CUDA with many rows, an activation, or a residual beside a bias, acts on the rounded product, with a weight
        of 8-bit floats all three may.
        """
        ...

    def linear_add_rms_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        """Returns `add_rms_norm(linear(x), residual, ..)`: (rms_norm(s), s), s = linear(x) + residual.

        x: [T, K]; residual and both results: [T, C]; weight: [C] of the norm. s is rounded before the norm, which may
        be deferred; `residual` may be overwritten with s.
        """
        ...

    def linear_add_norm(
        self, x: Tensor, linear: PackedLinear, residual: Tensor, norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        """Returns (norm(y), y), [T, C] each, y = linear(x) + residual, rounded. x: [T, K]; residual: [T, C], kept."""
        ...

    # ---- products with the op that follows; `weights` are one weight, or parts whose outputs are concatenated
    def linear_act_and_mul(self, x: Tensor | DeferredNorm, weights: Sequence[PackedLinear], act: Activation) -> Tensor:
        """Returns `act_and_mul(linear(x), act)`, [T, F], of the 2 * F outputs of `weights`; x: [T, K]; act: any but
        "none". A deferred norm is applied to x first."""
        ...

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
        """Returns `rope_and_write` of `linear`, whose (Hq + 2 Hkv) * D outputs are the heads of q, k and v.

        x: [T, K], a deferred norm is applied first; returns rotated q [T, Hq, D]. Other parameters as in
        `rope_and_write`. If this is one launch (CUDA), slots on the device that are outside of the cache are skipped
        and never reported.
        """
        ...

    # ---- mixtures of experts: E gated MLPs of one shape, of which each token uses K
    def pack_experts(
        self,
        gate_up: Sequence[Tensor | QuantizedWeight],
        down: Sequence[Tensor | QuantizedWeight],
        rows: torch.dtype | None = None,
    ) -> PackedExperts:
        """Packs the weights of E experts for `experts`. The result may share their memory, which must not change.

        gate_up: E matrices [2 * F, C], gate first. down: E matrices [C, F]. All matrices of a sequence have one format
        (a compute dtype, or a `stack_key`), the two sequences may have different ones. rows: dtype of the x that they
        will multiply, as in `pack_linear`. A shared expert is one more entry, the last.
        """
        ...

    def route(self, logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None = None) -> Routes:
        """Returns the k experts with the largest logits of each token, by falling logit, of equal ones the lowest index
        first. Weights are the softmax over all E logits, divided by the sum of the k chosen ones if `renormalise`.

        logits: [T, E] of a compute dtype, 1 <= k <= E. shared: [T, 1] of the same dtype, the gates of a shared expert:
        one more column, expert E with the weight sigmoid(shared). Computed in float32. A row with NaN or +inf gets
        valid experts and NaN weights.
        """
        ...

    def experts(self, x: Tensor, routes: Routes, experts: PackedExperts, act: Activation) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs: [T, C].

        Token t gets the sum over j of weights[t, j] * down(act(gate(x[t])) * up(x[t])), added in float32 in the order
        of j and rounded once; products are those of `linear_act_and_mul` and, unrounded, of `linear`. x: [T, C] of the
        dtype that the experts were packed for. Weights of experts that no token chose are not read. Raises ValueError
        for an expert that does not exist if routes are in host memory.
        """
        ...

    # ---- element-wise and norms
    def pixel_rows(self, pixels: Tensor, table: Tensor, width: int) -> Tensor:
        """Converts pixels by a table per colour channel: result[p, k] = table[pixels[p, k], k % 3].

        pixels: [P, K] uint8, channels interleaved, so K is a multiple of 3. table: [256, 3] of a float type. Returns
        [P, width] of the table's dtype, with zeros in columns K to `width`.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns x * rsqrt(mean(x^2, -1) + eps), rounded to the dtype, times weight (as transformers' LlamaRMSNorm).

        x: [T, C], or [T, H, D] with one weight [D] for all heads; tokens and heads at any stride. With a float32 weight
        and a narrower dtype of x, only the product is rounded.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns (rms_norm(s), s), both [T, C], s = x + residual rounded; may overwrite `residual` with s."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Returns (x - mean) * rsqrt(variance + eps) * weight + bias in float32, rounded once: [T, C]; weight, bias:
        [C] of x's dtype."""
        ...

    def act_and_mul(self, gate_up: Tensor, act: Activation) -> Tensor:
        """Returns act(gate) * up, [T, F], act(gate) rounded before the product; gate_up: [T, 2 * F], gate first; act:
        any but "none"."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns x, [T, H, D], with pairs (i, i + D/2) rotated by the cos and sin of their token, [T, D/2] float32.

        Tokens and heads may have any stride, so queries and keys of a fused projection take one call. Computed in
        float32, rounded once.
        """
        ...

    def gated_rms_norm(self, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        """Returns rms_norm(x) * silu(gate), [T, H, D]: the norm is rounded, silu stays float32, the product is rounded.
        x, gate: [T, H, D], tokens and heads at any stride; weight: [D] of x's dtype, for all heads."""
        ...

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), computed in float32 and rounded once; x, gate: [T, H, D], tokens and heads at any
        stride."""
        ...

    # ---- recurrent states
    def plan_states(self, rows: StateRows) -> StateRows:
        """Returns the rows of a step as the ops of all recurrent layers use them.

        rows: host tensors; do not change them before the step has run, unless the device copies them before this
        returns (CUDA does). Wrong contents (cu_q, slots) raise ValueError here or in the ops that use the result.
        """
        ...

    def plan_decode_states(self, starts: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateRows:
        """Prepares a step of one token per row from device tensors, [B] int64, which are read at launch time:
        capturable.

        A row whose entry in `write_slots` is -1 stores no state. Raises ValueError if the implementation plans on the
        host.
        """
        ...

    def plan_mixed_states(self, rows: StateRows, num_tokens: int) -> StateRows:
        """Prepares a step of decodes and prompts from device tensors, which are read at launch time: capturable.

        num_tokens: T of the step. Tokens after the last row's are padding, with undefined results; rows without tokens
        are padding, with -1 in `write_slots`. Raises ValueError if the implementation plans on the host.
        """
        ...

    def causal_conv(self, x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        """Returns silu(sum over j of weight[:, j] * x[t - K + 1 + j]), [T, channels], j from 0 to K - 1.

        Inputs before a row's first token come from its state, zeros at the start of a request. x: [T, channels];
        weight: [channels, K] contiguous of x's dtype, K from 2 to 16. Updates `cache.conv`.
        """
        ...

    def delta_rule(self, inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
        """Returns the outputs of the gated delta rule, [T, Hv, Dv], and updates `cache.recurrent`.

        A token changes a head's state S [Dk, Dv] and reads it, in float32, with q and k scaled to length 1; decay and
        beta are in `DeltaInputs`: S = decay * S; S += k (beta (v - S^T k))^T; out = S^T q / sqrt(Dk).
        """
        ...

    # ---- caches
    # Slot -1 skips its row. Any other slot outside of the cache raises ValueError before anything is written if slots
    # are in host memory. If they are on a GPU, the kernel skips the row and a later call raises; not reported for a
    # cache with scales, nor by ops that say so.
    def write_cache(self, cache: PagedCache, layer: int, rows: Sequence[Tensor], slots: Tensor) -> None:
        """Writes rows[x][t] to cache slot slots[t] of tensor x. Used for KV and image features alike.

        rows: X tensors [T, H, D] of the cache's `row_dtype`, any row stride. slots: [T] int64; -1 skips the row, one
        outside of the cache is an error (see above). Bits are copied, except into a quantized cache, which rounds them.
        """
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
        """Rotates q and k (pairs (i, i + D/2), as Llama), writes rotated k and v to the cache, returns rotated q [T,
        Hq, D].

        q: [T, Hq, D]; k, v: [T, Hkv, D]; slots: [T] int64, -1 writes no k and v. rotary: angles of each token, sections
        of M-RoPE already resolved. norms: applied to q and k before the rotation.
        """
        ...

    def merge_image_tokens(
        self, hidden: Tensor, rows: Tensor, cache: PagedCache, slots: Tensor, plane: int = 0
    ) -> None:
        """Sets hidden[rows[m]] to the cached feature at slots[m], in place; a `plane` above 0 (deepstack) is added
        instead.

        hidden: [T, C] contiguous; rows: [M] int64, no row twice; slots: [M] int64, -1 skips the row. Sums are computed
        in float32 and rounded once.
        """
        ...

    def gather_cache(self, cache: PagedCache, layer: int, index: int, slots: Tensor) -> Tensor:
        """Returns tensor `index` of `layer` (K or features 0, V 1) at `slots`: [M, H, D] contiguous, of `row_dtype`.

        slots: [M] int64. A row whose slot is -1 is uninitialised memory.
        """
        ...

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        """Copies whole blocks, all layers: target[pairs[i, 1]] = source[pairs[i, 0]]; pairs: [n, 2] int64 on the host.

        The order of the pairs is undefined: no pair may write a block that another one reads or writes. Another process
        may change blocks of the source meanwhile: then the content of their copies is undefined, nothing else.
        """
        ...

    # ---- attention
    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Plans a step from host tensors, int32: cu_q [B + 1], num_context [B], block_tables [B, max_blocks].

        Do not change the tensors before the step has run, unless the device copies them before this returns (CUDA
        does). Raises ValueError if `cu_q` does not rise from 0 or a row has more queries than context.
        """
        ...

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Plans a step of one token per row from device tensors, which are read at launch time: capturable.

        num_context: [B], block_tables: [B, W], int32. A context may be as long as W blocks; `max_context` of the plan
        is 0, since only the cache knows S. If the plan has a `refresh`, ops use what that was last called with instead
        of the tensors' contents. Raises ValueError if the implementation plans on the host without a `refresh`.
        """
        ...

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        """Plans a step of decodes and at most `max_prompts` rows of prompts from device tensors: capturable, as
        `plan_decode`.

        num_tokens: T of the step, at least B. Tokens after the last row's are padding, with undefined results. Raises
        ValueError if the implementation plans on the host.
        """
        ...

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Causal attention of the step's queries over their paged context, decodes and prompt chunks alike: [T, Hq, D].

        q: [T, Hq, D]; query head h reads KV head h // (Hq / Hkv). Softmax of scale * (q . k) in float32. A quantized
        cache is dequantized after the products: q . k is multiplied by k's scale, a softmax weight by v's.
        """
        ...

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Plans segments from a device tensor, [segments + 1] int32, which is read at launch time: capturable.

        At launch it must rise from 0 to the number of rows, with no segment longer than `max_length`. Raises ValueError
        if the implementation plans on the host.
        """
        ...

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        """Bidirectional attention within each segment [cu[i], cu[i+1]) of packed rows (vision towers): [P, H, D].

        q, k, v: [P, H, D], may be strided views of one fused projection. Raises ValueError if a list of segments does
        not rise from 0 to P. Segments of a `PackedPlan` that do not, or that are too long, give undefined results.
        """
        ...

    # ---- whole steps
    def record_decode(self, decode: Decode) -> Decode:
        """Returns `decode`, or a function with the same results, bit for bit, and less host time between ops.

        Only one lane may call it; its logits are valid until the next call. `decode` must only call these ops, index
        rows of tables and concatenate columns, and its calls must depend on the shapes of its inputs alone.
        """
        ...

    # ---- sampling
    def best_tokens(self, logits: Tensor) -> Tensor:
        """Greedy tokens of logits [B, V] float32: [B] int64, the lowest id among the largest logits; -1 for a row with
        any NaN or infinity, also -inf (masked tokens have LOWEST_LOGIT)."""
        ...

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Draws one token per row of logits [B, V] float32, on a CPU also float64 if the floats of `sampling` are.
        Returns (tokens [B] int64, finite [B] bool: False for a row with any NaN or infinity).

        The token is the first at which the cumulative sum of the filtered distribution, in vocabulary order, exceeds
        the row's number; at temperature 0 the lowest id among the largest logits. A row that is not finite gets an
        arbitrary valid token. A token depends on its own row alone.
        """
        ...

    def adjust_logits(self, logits: Tensor, adjustments: Adjustments) -> Tensor:
        """Returns logits [B, V] float32, on a CPU also float64, with biases, penalties and masks applied, as a new
        tensor.

        Computed in float64, clamped to finite float32 and rounded once to the logits' dtype. A logit that is not finite
        is kept, whatever applies to it.
        """
        ...

    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
        """Returns what log probabilities are computed from: (numbers [B, 3 + max_top] of the logits' dtype, places
        [B, 1 + max_top] int32).

        logits: [B, V] float32, on a CPU also float64; tokens: [B] int64, the sampled ones; num_top: [B] int32, at most
        `max_top`, -1 for rows that need no log probabilities. numbers: logit of the token, largest logit, sum of
        exp(logit - largest), then the num_top largest logits. places: rank of the token (1 is best), then the ids of
        the largest logits. Order: logit descending, id ascending. Undefined: entries after num_top or the V-th, and
        rows with num_top -1 or any NaN or infinity.
        """
        ...


def apply_deferred_norm(ops: Ops, x: Tensor | DeferredNorm) -> Tensor:
    """Returns `x`, with its rms_norm applied if that was deferred."""
    return ops.rms_norm(*x) if isinstance(x, DeferredNorm) else x


@dataclass(frozen=True, slots=True)
class Backend:
    """A device with the ops chosen for it; made by `select.create_backend` alone."""

    device: Device
    ops: Ops
    dtype: torch.dtype  # of activations
    threads: int  # CPU threads of each lane
    notes: tuple[str, ...] = ()  # for the start-up summary, a sentence each
