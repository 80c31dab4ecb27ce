"""Native kernels. Addresses, sizes and strides (in elements) are ints; memory stays owned by the caller. The functions
check what integers can show and release the GIL; hydra_engine.backend checks tensors before it calls them.

dtype: 0 float32, 1 bfloat16, 2 float16. act: 0 none, 1 silu, 2 gelu, 3 gelu_tanh, 4 quick_gelu.
"""

from collections.abc import Sequence
from typing import Any

# ---- processor and threads
def isa() -> str: ...
def cpu_features() -> list[str]: ...
def force_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...

# ---- recorded calls, replayed without Python
class Recording:
    """A recording of native calls. Between `begin` and `end`, calls of their thread to the ops below run and are
    recorded; `replay` runs them again on the same memory. `set_inputs` copies the inputs there first, from one address
    for each `add_input`."""

    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def add_input(self, own: int, num_bytes: int) -> None: ...
    def set_inputs(self, sources: Sequence[int]) -> None: ...
    def replay(self) -> None: ...
    def replay_one(self, index: int) -> None: ...
    def size(self) -> int: ...

def copy_columns(
    source: int, source_stride: int, target: int, target_stride: int, width: int, rows: int
) -> None: ...  # strides and width in bytes
def copy_rows(
    table: int, table_rows: int, width: int, ids: int, count: int, target: int
) -> None: ...  # target[i] = table[ids[i]], ids int64, width in bytes
def widen(source: int, dtype: int, count: int, target: int) -> None: ...  # 16 bits to float32

# ---- matrix products
def packed_bytes(num_out: int, num_in: int, dtype: int) -> int: ...

class PackedWeight:
    def __init__(self, data: int, bias: int, num_out: int, num_in: int, dtype: int, x_dtype: int) -> None: ...
    def pack(self, weight: int, weight_stride: int) -> None: ...

def linear(
    weight: PackedWeight,
    x: int,
    x_stride: int,
    rows: int,
    out: int,
    act: int,
    out_dtype: int,
    residual: int = 0,
    residual_stride: int = 0,
) -> None: ...

# ---- matrix products with weights of 8 and 4 bits; the sizes are those of hydra_engine.backend.quantized
def quantized_bytes(
    num_out: int,
    num_in: int,
    groups: int,
    num_bits: int,
    scale_dtype: int,
    has_offsets: bool,
    two_levels: bool = False,
) -> int: ...

class PackedQuantized:
    def __init__(
        self,
        data: int,
        bias: int,
        num_out: int,
        num_in: int,
        groups: int,
        num_bits: int,
        scale_dtype: int,
        has_offsets: bool,
        two_levels: bool = False,
    ) -> None: ...
    def pack(self, values: int, scales: int, offsets: int, block_scales: int = 0) -> None: ...

def linear_quantized(
    weight: PackedQuantized,
    x: int,
    x_stride: int,
    rows: int,
    out: int,
    act: int,
    x_dtype: int,
    out_dtype: int,
    residual: int = 0,
    residual_stride: int = 0,
) -> None: ...
def round_matrix(
    weight: int, dtype: int, num_out: int, num_in: int, num_bits: int, values: int, scales: int
) -> None: ...
def decode_blocks(
    type: int, blocks: int, count: int, values: int, scales: int, offsets: int, block_scales: int = 0
) -> None: ...
def transpose_words(source: int, rows: int, columns: int, target: int) -> None: ...

# ---- mixtures of experts
class PackedExperts:
    """The weights of the first expert; those of the others follow each."""

    def __init__(
        self, gate_up: PackedWeight | PackedQuantized, down: PackedWeight | PackedQuantized, num_experts: int
    ) -> None: ...

def experts(
    weights: PackedExperts,
    x: int,
    x_stride: int,
    rows: int,
    experts: int,
    factors: int,
    chosen: int,
    out: int,
    act: int,
    dtype: int,
) -> None: ...
def route(
    logits: int,
    stride: int,
    shared: int,  # 0: no shared expert
    shared_stride: int,
    rows: int,
    num_experts: int,
    chosen: int,
    renormalise: bool,
    dtype: int,
    experts: int,
    weights: int,
) -> None: ...

# ---- norms, gated activations, rotation
def rms_norm(
    x: int,
    x_stride: int,
    weight: int,
    out: int,
    rows: int,
    columns: int,
    eps: float,
    dtype: int,
    heads: int = 1,
    head_stride: int = 0,
    wide_weight: bool = False,  # the weight is float32, whatever dtype says
) -> None: ...
def add_rms_norm(
    x: int,
    x_stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    out: int,
    sum: int,
    rows: int,
    columns: int,
    eps: float,
    dtype: int,
    wide_weight: bool = False,
) -> None: ...
def layer_norm(
    x: int, x_stride: int, weight: int, bias: int, out: int, rows: int, columns: int, eps: float, dtype: int
) -> None: ...
def act_and_mul(gate_up: int, stride: int, out: int, rows: int, columns: int, act: int, dtype: int) -> None: ...
def rotate(
    x: int,
    x_stride: int,
    heads: int,
    head_stride: int,
    cos: int,
    cos_stride: int,
    sin: int,
    sin_stride: int,
    out: int,
    tokens: int,
    columns: int,
    dtype: int,
) -> None: ...
def gated_rms_norm(
    x: int,
    x_strides: tuple[int, int],  # between tokens, between heads
    weight: int,
    gate: int,
    gate_strides: tuple[int, int],
    out: int,
    tokens: int,
    heads: int,
    columns: int,
    eps: float,
    dtype: int,
) -> None: ...
def sigmoid_mul(
    x: int,
    x_strides: tuple[int, int],
    gate: int,
    gate_strides: tuple[int, int],
    out: int,
    tokens: int,
    heads: int,
    columns: int,
    dtype: int,
) -> None: ...
def best_of_rows(x: int, x_stride: int, rows: int, columns: int, best: int) -> None: ...

# ---- sampling, computed in float64; wide: logits, and results of their type, are float64 instead of float32. Columns
# of numbers are float64, of counts and indices int32, of tokens int64.
def sample(
    logits: int,
    stride: int,
    rows: int,
    columns: int,
    wide: bool,
    temperatures: int,
    top_k: int,
    top_p: int,
    min_p: int,
    numbers: int,
    tokens: int,
    finite: int,
) -> None: ...
def adjust_logits(
    logits: int,
    stride: int,
    rows: int,
    columns: int,
    wide: bool,
    bias_begins: int,
    bias_ends: int,
    bias_ids: int,
    bias_values: int,
    num_biases: int,
    penalties: int,
    counted: int,
    counts: int,
    num_counted: int,
    masked: int,
    masks: int,
    num_masked: int,
    out: int,
) -> None: ...
def score_tokens(
    logits: int,
    stride: int,
    rows: int,
    columns: int,
    wide: bool,
    tokens: int,
    num_top: int,
    max_top: int,
    numbers: int,
    places: int,
) -> None: ...

# ---- recurrent states; x and the like: (address, elements between tokens); rows: addresses of cu_q, starts, reads and
# writes, then numbers of rows, tokens, places and layers, and the layer; shape: key heads, heads, key dim, value dim
def causal_conv(
    x: tuple[int, int],
    weight: int,
    state: int,
    rows: tuple[int, int, int, int, int, int, int, int, int],
    channels: int,
    taps: int,
    out: int,
    dtype: int,
) -> None: ...
def delta_rule(
    q: tuple[int, int],
    k: tuple[int, int],
    v: tuple[int, int],
    a: tuple[int, int],
    b: tuple[int, int],
    rates: int,
    shift: int,
    state: int,
    rows: tuple[int, int, int, int, int, int, int, int, int],
    shape: tuple[int, int, int, int],
    out: int,
    dtype: int,
) -> None: ...

# ---- paged caches, [N, L, X, S, H, D] contiguous; slots and rows are int64
class CacheDesc:
    def __init__(
        self,
        data: int,
        num_blocks: int,
        num_layers: int,
        num_tensors: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: int,
        quantized: bool = False,
    ) -> None: ...
    def write(
        self, layer: int, first: int, first_stride: int, second: int, second_stride: int, slots: int, rows: int
    ) -> None: ...
    def rope_and_write(
        self,
        layer: int,
        q: int,
        q_stride: int,
        num_q_heads: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        cos: int,
        cos_stride: int,
        sin: int,
        sin_stride: int,
        slots: int,
        tokens: int,
        out: int,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
    ) -> None: ...
    def gather(self, layer: int, index: int, slots: int, rows: int, out: int) -> None: ...
    def merge(
        self,
        layer: int,
        slots: int,
        targets: int,
        rows: int,
        hidden: int,
        hidden_rows: int,
        accumulate: bool = False,
    ) -> None: ...
    def copy_to(self, target: CacheDesc, pairs: int, count: int) -> None: ...

# ---- CUDA. Where it cannot be used, all but cuda_probe, check_range and the settings raise RuntimeError and say why.
# Errors of CUDA are RuntimeErrors with its text, file and line. stream: a cudaStream_t.
def cuda_probe() -> dict[str, Any]: ...
def cuda_synchronous() -> bool: ...
def set_cuda_synchronous(on: bool) -> None: ...
def cuda_check_faults(device: int) -> None: ...
def check_range(name: str, values: int, count: int, least: int, size: int) -> None: ...

class CudaCacheDesc:
    """The methods of CacheDesc on a stream; all addresses but `pairs` are device memory. `device` -1: the cache lies in
    host memory, and blocks are copied between it and one on a device, on that one's stream."""

    def __init__(
        self,
        data: int,
        num_blocks: int,
        num_layers: int,
        num_tensors: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype: int,
        device: int,
    ) -> None: ...
    def write(
        self,
        stream: int,
        layer: int,
        first: int,
        first_stride: int,
        second: int,
        second_stride: int,
        slots: int,
        rows: int,
    ) -> None: ...
    def rope_and_write(
        self,
        stream: int,
        layer: int,
        q: int,
        q_stride: int,
        num_q_heads: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        cos: int,
        cos_stride: int,
        sin: int,
        sin_stride: int,
        slots: int,
        tokens: int,
        out: int,
        q_norm: int = 0,
        k_norm: int = 0,
        eps: float = 0.0,
    ) -> None: ...
    def gather(self, stream: int, layer: int, index: int, slots: int, rows: int, out: int) -> None: ...
    def merge(
        self,
        stream: int,
        layer: int,
        slots: int,
        targets: int,
        rows: int,
        hidden: int,
        hidden_rows: int,
        accumulate: bool = False,
    ) -> None: ...
    def copy_to(self, stream: int, target: CudaCacheDesc, pairs: int, count: int) -> None: ...

CUDA_POOL_GRANULARITY: int

def cuda_allocate(nbytes: int, device: int) -> int: ...
def cuda_release(address: int, device: int) -> None: ...
def cuda_ipc_export(address: int, device: int) -> bytes: ...
def cuda_ipc_open(handle: bytes, nbytes: int, device: int) -> int: ...
def cuda_ipc_close(address: int, device: int) -> None: ...

# Host memory of this process, for copies of all devices.
def cuda_pin(address: int, nbytes: int, device: int) -> None: ...
def cuda_unpin(address: int, device: int) -> None: ...

# (language stream, vision stream, language SMs, vision SMs) for each count: no SM is in both of a split, and language
# parts nest. spread: every second group of SMs first. ValueError: the device cannot be divided so.
def cuda_split_streams(
    device: int, counts: Sequence[int], language_priority: int, vision_priority: int, spread: bool = False
) -> list[tuple[int, int, int, int]]: ...

# ---- words that processes share; address: a multiple of 8. A store is seen before whatever this process writes later,
# a load comes after whatever it has read before.
def store_word(address: int, word: int) -> None: ...
def load_word(address: int) -> int: ...

# ---- attention; the plan's tensors are int32 and must outlive it
class AttentionPlan:
    def __init__(self, cu_q: int, num_context: int, block_tables: int, batch: int, max_blocks: int) -> None: ...
    @property
    def max_q(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    def become(self, other: AttentionPlan) -> None: ...

def attention_paged(
    plan: AttentionPlan,
    cache: CacheDesc,
    layer: int,
    q: int,
    q_stride: int,
    num_heads: int,
    tokens: int,
    out: int,
    scale: float,
) -> None: ...
def attention_packed(
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    out: int,
    cu_seqlens: Sequence[int],
    num_heads: int,
    head_dim: int,
    scale: float,
    dtype: int,
) -> None: ...

# ---- pictures: uint8 RGB, strides in bytes; filter: 0 nearest, 1 box, 2 bilinear, 3 bicubic, 4 lanczos
def resize_rgb(
    source: int,
    source_stride: int,
    source_width: int,
    source_height: int,
    width: int,
    height: int,
    left: int,
    top: int,
    columns: int,
    rows: int,
    out: int,
    out_stride: int,
    filter: int,
    down_first: bool,
) -> None:
    """The window of `columns` x `rows` at (left, top) of the source resized to `width` x `height`, into `out`."""
