"""Choices by measuring: for each use the fastest one by a margin, and never one that fails or computes something
else; a measurement is made once for a machine and a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend import select
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import attention_timing
from hydra_engine.backend.cuda.attention_choice import (
    DECODES,
    PROMPTS,
    ChosenAttention,
    Heads,
    Measured,
    Shapes,
    Tower,
    choose_by_name,
    choose_by_time,
)
from hydra_engine.backend.cuda.attention_timing import (
    Candidate,
    Refusal,
    Site,
    captured_seconds,
    cases,
    compare,
    paged_candidates,
    random_cache,
)
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.cuda.ops import CudaOps
from hydra_engine.backend.cuda.tower_attention import TowerAttention
from hydra_engine.backend.devices import ChosenDevice
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.instance import compute_stack
from hydra_engine.models.specs.registry import load_spec
from tests.ops.flashinfer_library import NUM_SMS, Library, install, send

HEADS = Heads(4, 2, 64, 8)
CPU = torch.device("cpu")
SITE = Site(CPU, NUM_SMS, send)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> PagedCache:
    for name, small in (("NUM_ROWS", 4), ("CHUNK", 16), ("LAUNCHES", 1)):
        monkeypatch.setattr(attention_timing, name, small)
    return random_cache(HEADS, torch.bfloat16, CPU, num_bytes=1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Importable, too."""
    library = install(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    return library


def timed(*times: float) -> Callable[[Callable[[], None]], float]:
    """A timer that returns these times for the launches in order: ours and the candidates'."""
    left = iter(times)

    def seconds(launch: Callable[[], None]) -> float:
        launch()
        return next(left)

    return seconds


def nothing() -> Measured:
    return Measured({}, {}, "2026-11-23")


def test_cases_are_as_large_as_the_cache() -> None:
    small = random_cache(HEADS, torch.bfloat16, CPU, num_bytes=300_000)
    assert small.num_blocks == 73
    assert cases(small) == ((DECODES, 32, 1, 16), (PROMPTS, 1, 584, 584))
    whole = random_cache(Heads(28, 4, 128, 16), torch.bfloat16, torch.device("meta"))
    assert whole.nbytes == 256 << 20
    assert [case[1:] for case in cases(whole)] == [(32, 1, 4096), (1, 1024, 2048)]
    many = random_cache(Heads(32, 32, 128, 16), torch.bfloat16, torch.device("meta"))
    assert cases(many)[0].num_context == 512


# ---- comparing


def candidate(name: str, result: Callable[[], Tensor]) -> Candidate:
    return Candidate(name, lambda: result)


def raising(error: Exception) -> Candidate:
    def fail() -> Any:
        raise error

    return Candidate("a", fail)


OURS = torch.linspace(-1, 1, 64)


@pytest.mark.parametrize(
    ("times", "best", "told"),
    [
        ((3.0, 2.0, 1.0), "b", "decodes b (a 1.50, b 3.00)"),
        ((3.0, 1.0, 2.0), "a", "decodes a (a 3.00, b 1.50)"),
        ((1.02, 1.0, 2.0), "triton", "decodes triton (a 1.02, b 0.51)"),
    ],
)
def test_the_fastest_one_by_a_margin(times: tuple[float, ...], best: str, told: str) -> None:
    result = nothing()
    others = (candidate(name, OURS.clone) for name in "ab")
    compare(DECODES, OURS.clone, others, timed(*times), result)
    assert result.best(DECODES) == best and result.describe(DECODES) == told


@pytest.mark.parametrize("wrong", [OURS + 0.1, torch.cat([OURS[:-1], torch.tensor([float("nan")])]), OURS.flip(0)])
def test_one_that_computes_something_else_is_never_taken(wrong: Tensor) -> None:
    """A candidate with other results is not timed, so it is not taken however fast it is."""
    result = nothing()
    compare(DECODES, OURS.clone, iter([candidate("a", wrong.clone)]), timed(2.0), result)
    assert result.best(DECODES) == "triton" and result.describe(DECODES) == "decodes triton (a: other results)"


def test_one_that_leaves_a_part_unwritten_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates an allocator: the next memory is what was given back, with our results in it."""
    memory = OURS.clone()
    monkeypatch.setattr(torch, "full_like", lambda like, value: memory.fill_(value))
    result = nothing()
    compare(DECODES, OURS.clone, iter([candidate("a", lambda: memory)]), timed(2.0), result)
    assert result.left_out[DECODES] == {"a": "other results"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("ninja failed\nwith a long list"), "ninja failed"),
        (FileNotFoundError(2, "no such file"), "[Errno 2] no such file"),
        (ImportError(), "ImportError"),
        (AssertionError("fp8 only"), "fp8 only"),
        (Refusal("needs a Hopper GPU"), "needs a Hopper GPU"),
    ],
)
def test_one_that_raises_is_left_out_with_its_reason(error: Exception, said: str) -> None:
    result = nothing()
    compare(DECODES, OURS.clone, iter([raising(error), candidate("b", OURS.clone)]), timed(2.0, 1.0), result)
    assert result.left_out[DECODES] == {"a": said} and result.best(DECODES) == "b"


def test_a_key_too_many_shows(cache: PagedCache) -> None:
    """Results of contexts that are a token shorter differ by more than the tolerance."""
    attention: Any = SimpleNamespace()
    ops = ReferenceOps()
    attention.plan, attention.plan_decode, attention.paged = ops.plan_attention, ops.plan_decode, ops.attention_paged
    for case in cases(cache):
        expected, got = (
            attention_timing.prepared(attention, case._replace(num_context=context), cache, HEADS)()
            for context in (case.num_context, case.num_context - 1)
        )
        assert attention_timing._agree(expected, expected) and not attention_timing._agree(got, expected)


def test_prompts_try_both_kernels_of_flashinfer_and_decodes_one(
    cache: PagedCache, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes; ours are the reference's."""
    ops = ReferenceOps()
    reference: Any = SimpleNamespace(plan=ops.plan_attention, plan_decode=ops.plan_decode, paged=ops.attention_paged)
    result = nothing()
    for case, times in zip(cases(cache), ((2.0, 1.0), (2.0, 1.9, 1.0)), strict=True):
        ours = attention_timing.prepared(reference, case, cache, HEADS)
        compare(case.use, ours, paged_candidates(SITE, case, cache, HEADS), timed(*times), result)
    assert result.seconds[DECODES].keys() == {"triton", "flashinfer"}
    assert result.seconds[PROMPTS].keys() == {"triton", "flashinfer-fa2", "flashinfer-fa3"}
    assert result.left_out[PROMPTS] == {"triton-tma": "needs a Hopper GPU and a block_size of 64 or 128"}
    assert result.best(PROMPTS) == "flashinfer-fa3"
    made = [(type(wrapper).__name__, wrapper.options["backend"]) for wrapper in library.made]
    assert made == [("Decode", "fa2"), ("Prefill", "fa2"), ("Prefill", "fa3")]


@pytest.mark.parametrize(("head_dim", "installed"), [(80, True), (64, False)])
def test_flashinfer_is_left_out_where_it_cannot_be_used(
    library: Library, monkeypatch: pytest.MonkeyPatch, head_dim: int, installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
    heads = Heads(2, 2, head_dim, 8)
    cache = random_cache(heads, torch.bfloat16, CPU, num_bytes=1)
    case = cases(cache)[0]
    result = nothing()
    compare(DECODES, OURS.clone, paged_candidates(SITE, case, cache, heads), timed(1.0), result)
    said = "takes head dims of 64, 128 or 256, the model's is 80" if installed else "the package is not installed"
    assert result.left_out[DECODES] == {"flashinfer": said} and not library.made


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


# ---- what a backend makes of it


def test_each_use_has_its_own_winner(library: Library) -> None:
    measured = Measured(
        {
            "decodes": {"triton": 1.0, "flashinfer": 2.0},
            "prompts": {"triton": 2.0, "flashinfer-fa3": 1.0},
            "pictures": {"triton": 1.0, "cudnn": 0.5},
            "captured pictures": {"triton": 1.0},
        },
        {"pictures": {"flashinfer": "other results"}},
        "2026-11-23",
    )
    chosen = choose_by_time(measured)
    ops = CudaOps(CPU, NUM_SMS, send, attention=chosen)
    table = {choice.op: choice for choice in ops.choices()}
    assert table["attention_paged"].implementation == "triton, flashinfer-fa3"
    assert table["attention_packed"].implementation == "cudnn, triton"
    told = "prompts flashinfer-fa3 (flashinfer-fa3 2.00); captured steps with prompts triton; "
    assert told in table["attention_paged"].reason and chosen.note is not None and told in chosen.note
    assert "pictures cudnn (cudnn 2.00, flashinfer: other results)" in table["attention_packed"].reason
    assert chosen.note.startswith("attention: decodes triton (flashinfer 0.50); prompts")
    assert isinstance(ops.attention_paged.__self__, FlashInferAttention)
    assert isinstance(ops.attention_packed.__self__, TowerAttention)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_what_was_asked_for_by_name_is_taken_for_everything(library: Library, name: str) -> None:
    ops = CudaOps(CPU, NUM_SMS, send, attention=choose_by_name(name))
    table = {choice.op: choice for choice in ops.choices()}
    for op in ("attention_paged", "attention_packed"):
        assert table[op].implementation.split(", ")[0] == name
    assert isinstance(ops.attention_paged.__self__, FlashInferAttention) == (name == "flashinfer")


def test_a_backend_measures_where_nobody_chose_and_says_what_it_took(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replaces the measurement, which another test checks; no GPU is touched."""
    taken = ChosenAttention({DECODES: "flashinfer"}, {"attention_paged": "measured"}, "attention: flashinfer, measured")
    asked: list[Any] = []

    def choose(device: Any, *given: Any) -> ChosenAttention:
        asked.append((device.name, *given))
        return taken

    monkeypatch.setattr(attention_timing, "choose_attention", choose)
    gpu, shapes = ChosenDevice("cuda:0", 0, 132, "as asked"), Shapes(HEADS)
    make: Any = partial(select._on_cuda, gpu, torch.bfloat16, False, 1, "balanced", ())
    made = make("auto", shapes, tmp_path)
    assert [one[:5] for one in asked] == [("cuda:0", 132, torch.bfloat16, shapes, tmp_path)]
    assert made.notes == ("attention: flashinfer, measured",)
    assert make("triton", shapes, None).notes == ()
    (note,) = make("flashinfer", shapes, None).notes
    assert "flashinfer; captured steps with prompts, and captured encodes, take triton" in note and len(asked) == 1


@pytest.mark.parametrize(
    ("role", "wanted"), [("E", (False, True)), ("PD", (True, False)), ("EPD", (True, True)), ("D", (True, False))]
)
def test_an_instance_measures_what_it_computes(
    monkeypatch: pytest.MonkeyPatch, role: str, wanted: tuple[bool, bool], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def create_backend(*_: Any, **given: Any) -> None:
        asked.append((given["attention"], given["shapes"], given["profiles"]))

    monkeypatch.setattr(compute_stack, "create_backend", create_backend)
    config = EngineConfig(model="qwen2.5-vl-7b", profile_dir=str(tmp_path))
    chosen = ChosenDevice("cuda:0", 0, 132, "as asked")
    for dtype, name in ((torch.bfloat16, "auto"), (torch.float32, "triton")):
        compute_stack._backend(config, load_spec(config.model_path), Role.parse(role), chosen, dtype)
        attention, shapes, folder = asked.pop()
        assert attention == name and (folder == tmp_path) == (name == "auto")
    assert tuple(shape is not None for shape in shapes) == wanted
    assert shapes.language in (None, Heads(28, 4, 128, 16))
    assert shapes.tower is None or (*shapes.tower[:2], shapes.tower.window) == (16, 80, 64)


# ---- on disk


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ChosenAttention, int]]:
    """choose(**changes) on a device that measures when it is asked to: the choice, and how often it has measured."""
    counted: list[str] = []

    def measure(site: Site, dtype: torch.dtype, shapes: Shapes, seconds: Any) -> Measured:
        counted.append("measured")
        return Measured({"decodes": {"triton": 2.0, "flashinfer": 1.0}}, {}, attention_timing.utc_date())

    monkeypatch.setattr(attention_timing, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device: Any = SimpleNamespace(torch_device=CPU, send=send, finish=lambda: None, trim=lambda: None)

    def choose(folder: Path, **changes: Any) -> tuple[ChosenAttention, int]:
        facts = {"gpu": "NVIDIA H200", "capability": (9, 0), "sms": 132, "driver": 13000, "torch": "2.11.0"} | changes
        dtype, shapes = changes.get("dtype", torch.bfloat16), changes.get("shapes", Shapes(HEADS))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: facts["gpu"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: facts["capability"])
        monkeypatch.setattr(torch, "__version__", facts["torch"])
        counted.clear()
        chosen = attention_timing.choose_attention(device, facts["sms"], dtype, shapes, folder, facts["driver"])
        return chosen, len(counted)

    return choose


def test_a_choice_is_kept_and_found_again(machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, measured = machine(tmp_path / "profiles")
    assert measured == 1 and first.kernel_for(DECODES) == "flashinfer"
    again, measured = machine(tmp_path / "profiles")
    assert measured == 0 and again == first and not caplog.records
    assert machine(None)[1] == 1


@pytest.mark.parametrize(
    ("change", "logged"),
    [
        ({"driver": 13010}, "driver 13000"),
        ({"torch": "2.12.0"}, "libraries"),
        ({"capability": (10, 0)}, "capability"),
        ({"gpu": "NVIDIA H100"}, None),
        ({"dtype": torch.float16}, None),
        ({"shapes": Shapes(HEADS, Tower(16, 80, 4096, 64))}, None),
    ],
)
def test_it_is_measured_anew_where_the_machine_or_the_model_changes(
    machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], logged: str | None
) -> None:
    """Other models and GPUs have files of their own."""
    machine(tmp_path)
    assert machine(tmp_path, **change)[1] == 1 and machine(tmp_path, **change)[1] == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (logged is not None) and all(str(logged) in message for message in messages)
    assert machine(tmp_path)[1] == (logged is not None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20],
        lambda content: content.replace(b"flashinfer", b"flashinfir"),
        lambda content: b"",
        lambda content: b"\xff" + content,
        lambda content: b'{"digest": "0", "profile": {}}',
    ],
)
def test_a_damaged_file_is_a_line_in_the_log(
    machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    machine(tmp_path)
    (file,) = tmp_path.glob("attention-*.json")
    file.write_bytes(damage(file.read_bytes()))
    assert machine(tmp_path)[1] == 1
    (record,) = caplog.records
    assert "damaged" in record.getMessage() and "measured again" in record.getMessage()
    assert machine(tmp_path)[1] == 0


@pytest.mark.parametrize("seconds", [{"flashinfer": 1.0}, {"triton": -1.0}, {"triton": 1e9}])
def test_numbers_that_nobody_measured_are_refused(
    machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: dict[str, float]
) -> None:
    machine(tmp_path)
    (file,) = tmp_path.glob("attention-*.json")
    changed = attention_timing.profile_file.read(file, dict)
    assert changed is not None
    changed["measured"]["seconds"]["decodes"] = seconds
    attention_timing.profile_file.write(file, changed)
    assert machine(tmp_path)[1] == 1 and len(caplog.records) == 1


def test_where_ours_cannot_be_measured_they_are_taken_and_nothing_is_kept(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Measured:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256 MiB\nof 140 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(attention_timing, "measure", full)
        chosen, _ = machine(tmp_path)
    assert chosen.names == {} and not [*tmp_path.iterdir()]
    assert chosen.note == "attention: triton; it could not be measured (CUDA out of memory. Tried to allocate 256 MiB)"
    assert machine(tmp_path)[1] == 1


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(
    machine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert machine(tmp_path / "file" / "profiles")[1] == 1
    assert "could not be kept" in caplog.records[-1].getMessage()
