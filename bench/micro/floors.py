"""Lower bounds from a machine's rates: work in FLOP and bytes, its least seconds, and the work of each stage.

A part of a step is bound by arithmetic or by memory, whichever takes longer. One part after the other is the serial
floor; if everything ran beside everything else, the overlap floor. All FLOP are multiply-adds times two, for the spec
of a vision-language model; recurrent layers are not counted. Does not know torch or how anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hydra_engine.models.specs.base import LanguageSpec, ModelSpec


class Work(NamedTuple):
    """A part of a step. `moved_bytes` are read and written ones together, at the rate of a copy."""

    name: str
    flops: float = 0.0
    read_bytes: float = 0.0
    moved_bytes: float = 0.0

    def times(self, count: float) -> Work:
        return Work(self.name, self.flops * count, self.read_bytes * count, self.moved_bytes * count)


class Rates(NamedTuple):
    """Rates of a machine."""

    flops_per_s: float  # matrix products in the model's dtype
    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written bytes together

    def arithmetic_s(self, work: Work) -> float:
        return work.flops / self.flops_per_s

    def memory_s(self, work: Work) -> float:
        return work.read_bytes / self.read_bytes_per_s + work.moved_bytes / self.copy_bytes_per_s


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that the same run reached with nothing else to do. `sustained_flops_per_s`: over two seconds, at the power
    cap; `graph_gap_s`: between two kernels of a CUDA graph."""

    gemm_flops_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float
    sustained_flops_per_s: float | None = None
    graph_gap_s: float | None = None
    launch_s: float | None = None  # of one kernel from Python, nothing waited for

    @property
    def rates(self) -> Rates:
        return Rates(self.gemm_flops_per_s, self.read_bytes_per_s, self.copy_bytes_per_s)

    @property
    def sustained(self) -> Rates | None:
        if self.sustained_flops_per_s is None:
            return None
        return self.rates._replace(flops_per_s=self.sustained_flops_per_s)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def serial_s(work: Iterable[Work], rates: Rates) -> float:
    """Seconds of one part after the other, each at its own bound."""
    return sum(max(rates.arithmetic_s(part), rates.memory_s(part)) for part in work)


def overlap_s(work: Sequence[Work], rates: Rates) -> float:
    """Arithmetic and memory both busy all the time."""
    return max(sum(map(rates.arithmetic_s, work)), sum(map(rates.memory_s, work)))


def gain_share(serial: float, measured: float, bound: float) -> float | None:
    """The achieved share of the possible gain, 1 at the bound; None where nothing can be gained."""
    return (serial - measured) / (serial - bound) if serial > bound else None


def best_gain(first: Sequence[Work], second: Sequence[Work], rates: Rates) -> float:
    """Largest gain of both together over one after the other, in the best proportion: `x` and `y`
    times a second, so that neither arithmetic nor memory is busy for more than that second."""
    alone = [serial_s(work, rates) for work in (first, second)]
    arithmetic, memory = (
        [sum(map(each, work)) for work in (first, second)] for each in (rates.arithmetic_s, rates.memory_s)
    )
    ends = [serial / overlap_s(work, rates) for serial, work in zip(alone, (first, second), strict=True)]
    determinant = arithmetic[0] * memory[1] - arithmetic[1] * memory[0]
    if determinant:  # where both are busy all the time
        x, y = (memory[1] - arithmetic[1]) / determinant, (arithmetic[0] - memory[0]) / determinant
        if x > 0 and y > 0:
            ends.append(alone[0] * x + alone[1] * y)
    return max(ends)


# ---- the language model


def layer_parameters(language: LanguageSpec) -> int:
    """Weights of one layer's matrix products."""
    c, d = language.hidden_size, language.head_dim
    return c * (language.num_heads + 2 * language.num_kv_heads) * d + parameters_behind_attention(language)


def parameters_behind_attention(language: LanguageSpec) -> int:
    """Weights of the products behind a layer's attention."""
    c = language.hidden_size
    return language.num_heads * language.head_dim * c + 3 * c * language.num_active_inner


Matrices = tuple[float, float]  # bytes of a weight of the layers, and of the head


def decode_work(
    language: LanguageSpec, rows: int, context: float, width: int, matrices: Matrices | None = None
) -> list[Work]:
    """Work of a step of `rows` requests that see `context` tokens on average; numbers of `width` bytes but for
    `matrices`."""
    of_layers, of_head = matrices or (width, width)
    linear = language.num_layers * layer_parameters(language)
    head = language.vocab_size * language.hidden_size
    pairs = rows * context * language.num_heads * language.head_dim * language.num_kv_layers
    return [
        Work("layers", 2.0 * rows * linear, of_layers * linear),
        Work("head", 2.0 * rows * head, of_head * head),
        Work("attention", 4.0 * pairs, rows * context * language.kv_bytes_per_token(width)),
    ]


def prefill_work(
    language: LanguageSpec, rows: int, tokens: int, width: int, matrices: Matrices | None = None
) -> list[Work]:
    """`rows` whole prompts of `tokens`, at least: behind the last layer's attention only the last token of each goes
    on, through the rest of that layer and the head."""
    of_layers, of_head = matrices or (width, width)
    linear = language.num_layers * layer_parameters(language)
    left_out = rows * (tokens - 1) * parameters_behind_attention(language)
    head = language.vocab_size * language.hidden_size
    pairs = rows * tokens * tokens / 2 * language.num_heads * language.head_dim * language.num_kv_layers
    return [
        Work("layers", 2.0 * (rows * tokens * linear - left_out), of_layers * linear),
        Work("attention", 4.0 * pairs, rows * tokens * language.kv_bytes_per_token(width)),
        Work("head", 2.0 * rows * head, of_head * head),
    ]


def attention_work(heads: int, kv_heads: int, dim: int, rows: int, context: float, width: int) -> Work:
    """Paged decode attention of one layer; `context`: on average."""
    read = rows * context * 2 * kv_heads * dim * width
    return Work("attention", 4.0 * rows * context * heads * dim, read)


# ---- caches


def rope_write_work(heads: int, kv_heads: int, dim: int, tokens: int, width: int) -> Work:
    """Queries, keys and values of one layer read; queries, and keys and values in the cache, written."""
    return Work("rotate and write", moved_bytes=2.0 * (heads + 2 * kv_heads) * dim * tokens * width)


def image_write_work(size: int, tokens: int, width: int) -> Work:
    return Work("write features", moved_bytes=2.0 * size * tokens * width)


# ---- the vision tower


class ImageWork(NamedTuple):
    """Work of a tower for a picture of (width, height) pixels."""

    work: Work  # without its weights
    weight_bytes: int
    patches: int
    tokens: int


def image_work(spec: ModelSpec, picture: tuple[int, int], width: int) -> ImageWork:
    """FLOP by the layers that run and by the keys that each patch sees. Weights are read once for a whole batch, so
    they are beside."""
    vision = spec.vision
    assert vision is not None, "a model without a tower encodes nothing"
    plan = vision.plan_image(*picture)
    weights = width * vision.num_parameters()
    return ImageWork(Work("encode", float(vision.flops(plan.num_patches))), weights, plan.num_patches, plan.num_tokens)


def encode_work(image: ImageWork, count: int) -> list[Work]:
    """`count` pictures in one call."""
    return [Work("encode", image.work.flops * count, image.weight_bytes)]
