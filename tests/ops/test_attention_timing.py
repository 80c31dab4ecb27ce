"""What is chosen by measuring: the faster one by a margin, and never one that fails or computes something else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hydra_engine.backend import select
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import attention_timing
from hydra_engine.backend.cuda.attention import CudaAttention
from hydra_engine.backend.cuda.attention_choice import ChosenAttention, Heads
from hydra_engine.backend.cuda.attention_timing import captured_seconds, cases, compare, random_cache
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.ops import CudaOps
from hydra_engine.backend.devices import ChosenDevice
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.config import EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.instance import compute_stack
from hydra_engine.models.specs.registry import load_spec
from tests.ops.flashinfer_library import NUM_SMS, Library, install, send

HEADS = Heads(4, 2, 64, 8)
CPU = torch.device("cpu")


class Reference:
    """As our kernels."""

    def __init__(self) -> None:
        ops = ReferenceOps()
        self.plan, self.plan_decode, self.paged = ops.plan_attention, ops.plan_decode, ops.attention_paged


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> PagedCache:
    for name, small in (("NUM_ROWS", 4), ("CHUNK", 16)):
        monkeypatch.setattr(attention_timing, name, small)
    monkeypatch.setattr(attention_timing, "LAUNCHES", 1)
    return random_cache(HEADS, torch.bfloat16, CPU, num_bytes=1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return install(monkeypatch)


@pytest.fixture
def make_other(library: Library) -> Callable[[], FlashInferAttention]:
    by_triton = CudaAttention(CPU, NUM_SMS, send, deterministic=False)
    return lambda: FlashInferAttention(CPU, NUM_SMS, send, by_triton, library)


def timed(*times: float) -> Callable[[Callable[[], None]], float]:
    """Of the launches in their order: ours and the other's for each case."""
    left = iter(times)

    def seconds(launch: Callable[[], None]) -> float:
        launch()
        return next(left)

    return seconds


def test_cases_are_as_large_as_the_cache() -> None:
    small = random_cache(HEADS, torch.bfloat16, CPU, num_bytes=300_000)
    assert small.num_blocks == 73 and [case[1:] for case in cases(small)] == [(32, 1, 16), (1, 584, 584)]
    whole = random_cache(Heads(28, 4, 128, 16), torch.bfloat16, torch.device("meta"))
    assert whole.nbytes == 256 << 20
    assert [case[1:] for case in cases(whole)] == [(32, 1, 4096), (1, 1024, 2048)]
    many = random_cache(Heads(32, 32, 128, 16), torch.bfloat16, torch.device("meta"))
    assert cases(many)[0].num_context == 512


@pytest.mark.parametrize(
    ("times", "name", "said"),
    [
        ((2.0, 1.0, 1.5, 1.0), "flashinfer", "measured at start, 1.73 times as fast as triton (decodes 2.00, pref"),
        ((2.0, 1.0, 1.0, 2.0), "triton", "flashinfer was measured at start, 1.00 times as fast as triton"),
        ((1.02, 1.0, 1.02, 1.0), "triton", "1.02 times as fast"),
    ],
)
def test_the_faster_one_by_a_margin(
    cache: PagedCache, make_other: Any, library: Library, times: tuple[float, ...], name: str, said: str
) -> None:
    chosen = compare(Reference(), make_other, cache, HEADS, timed(*times))
    assert chosen.name == name and chosen.note is not None and said in chosen.note and said in chosen.reason
    assert chosen.only_paged == (name == "flashinfer")
    assert library.plans == ["DecodeGraph", "Prefill"]


def test_one_that_computes_something_else_is_not_taken(
    cache: PagedCache, make_other: Any, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, q: Any, kv: Any, *, out: torch.Tensor) -> None:
        out.zero_()

    monkeypatch.setattr(library.BatchPrefillWithPagedKVCacheWrapper, "run", wrong)
    chosen = compare(Reference(), make_other, cache, HEADS, timed(2.0, 1.0))
    assert chosen[:2] == ("triton", "flashinfer gives other results for prefills")


@pytest.mark.parametrize(
    "error", [RuntimeError("ninja failed\nwith a long list"), FileNotFoundError(2, "no such file"), ImportError("x")]
)
def test_one_that_cannot_be_tried_is_not_taken(cache: PagedCache, error: Exception) -> None:
    def fail() -> Any:
        raise error

    chosen = compare(Reference(), fail, cache, HEADS, timed())
    assert chosen.name == "triton" and chosen.reason.startswith("flashinfer could not be tried (")
    assert "\n" not in chosen.reason


def test_a_replay_is_timed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is not; of the others the fastest counts."""
    clock, took = [0.0], iter((50.0, 9.0, 4.0, 6.0, 5.0, 7.0))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    class Graph:
        def replay(self) -> None:
            clock[0] += next(took)

    class Pools:
        def capture(self, launch: Callable[[], None]) -> Graph:
            launch()
            return Graph()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    launched = []
    pools: Any = Pools()
    assert captured_seconds(pools, lambda: launched.append(1)) == pytest.approx(4e-3)
    assert launched == [1] and next(took, None) is None


def test_towers_of_pictures_keep_what_was_not_measured(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    packed = {}
    for chosen in (None, ChosenAttention("flashinfer"), ChosenAttention("flashinfer", "measured", only_paged=True)):
        ops = CudaOps(CPU, NUM_SMS, send, attention=chosen)
        table = {choice.op: choice for choice in ops.choices()}
        packed[chosen] = (
            table["attention_packed"].implementation,
            isinstance(ops.attention_packed.__self__, FlashInferAttention),
        )
        by_flashinfer = isinstance(ops.attention_paged.__self__, FlashInferAttention)
        assert by_flashinfer == (table["attention_paged"].implementation == "flashinfer")
        assert (chosen is None) == (table["attention_paged"].implementation == "triton")
    assert list(packed.values()) == [("triton", False), ("flashinfer", True), ("triton", False)]


def test_a_backend_measures_where_nobody_chose_and_says_what_it_took(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here touches a GPU: the measurement is another test's."""
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    taken = ChosenAttention("flashinfer", "measured", "attention: flashinfer, measured", only_paged=True)
    asked: list[Any] = []

    def choose(device: Any, *given: Any) -> ChosenAttention:
        asked.append((device.name, *given))
        return taken

    monkeypatch.setattr(attention_timing, "choose", choose)
    gpu = ChosenDevice("cuda:0", 0, 132, "as asked")
    make: Any = select._on_cuda
    made = make(gpu, 0, torch.bfloat16, False, 1, "balanced", (), "auto", HEADS)
    assert asked == [("cuda:0", 132, torch.bfloat16, HEADS)] and made.notes == ("attention: flashinfer, measured",)
    by_name = make(gpu, 0, torch.bfloat16, False, 1, "balanced", (), "triton", HEADS)
    assert len(asked) == 1 and by_name.notes == ()


@pytest.mark.parametrize(("role", "wanted"), [("E", "triton"), ("PD", "auto"), ("EPD", "auto")])
def test_an_instance_that_reads_no_keys_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, role: str, wanted: str
) -> None:
    asked: list[str] = []

    def create_backend(*_: Any, attention: str, **__: Any) -> None:
        asked.append(attention)

    monkeypatch.setattr(compute_stack, "resolve_attention", lambda *_, **__: "auto")
    monkeypatch.setattr(compute_stack, "create_backend", create_backend)
    config, chosen = EngineConfig(model="llava-1.5-7b"), ChosenDevice("cuda:0", 0, 132, "as asked")
    compute_stack._backend(config, load_spec(config.model_path), Role.parse(role), chosen, torch.bfloat16)
    assert asked == [wanted]
