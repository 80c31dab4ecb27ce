"""Graphs over FlashInfer's attention: a replay of decodes is of what the host planned for it, one with prompts takes
Triton's plan, which the reference computes here. The library is the one of tests/ops, which objects to what the real
one cannot do; the model is a real miniature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, Backend, MixedRows, PagedCache
from hydra_engine.backend.cuda.attention import CudaAttention, CudaPlan
from hydra_engine.backend.cuda.flashinfer_attention import FlashInferAttention
from hydra_engine.backend.device import Graph
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.backend.select import create_backend
from hydra_engine.models.specs.registry import load_spec
from tests.ops.flashinfer_library import NUM_SMS, Library, install
from tests.worker import test_real_model
from tests.worker.fakes import Rig
from tests.worker.late import CountedCalls, LateDevice
from tests.worker.test_graphs import SIZES, expected, graph_rig, leave, requests
from tools.miniatures import make_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tiny-qwen2_vl")
    make_tiny("qwen2_vl", directory, seed=3)
    return directory


class GraphDevice(LateDevice):
    """Says when a graph is captured or replayed: then nobody may plan."""

    def __init__(self, library: Library, num_partitions: int = 1) -> None:
        super().__init__(num_partitions)
        self.library = library

    def capture(self, launch: Callable[[], None]) -> Graph:
        launch()

        def captured() -> None:
            with self.library.capture():
                launch()

        captured()
        return CountedCalls(captured, self)


class FlashOps(ReferenceOps):
    def __init__(self, attention: FlashInferAttention) -> None:
        super().__init__()
        self._attention = attention

    def plan_attention(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return self._attention.plan(cu_q, num_context, block_tables)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return self._attention.plan_decode(num_context, block_tables)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        return self._attention.plan_mixed(rows, num_tokens, max_prompts)

    def attention_paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        return self._attention.paged(q, cache, layer, plan, scale)


class ByReference(CudaAttention):
    """Plans as Triton does, for the captured steps that it computes."""

    def paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        ops, native = ReferenceOps(), plan.native
        assert isinstance(native, CudaPlan) and native.mixed is not None, "a step that FlashInfer computes"
        planned = ops.plan_mixed(native.mixed, native.num_tokens, native.max_prompts)
        return ops.attention_paged(q, cache, layer, planned, scale)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> Library:
    dim = load_spec(model_dir).language.head_dim
    return install(monkeypatch, dtypes=(torch.float32,), dims=(dim,))


@pytest.fixture
def device(library: Library) -> GraphDevice:
    return GraphDevice(library)


@pytest.fixture
def rig(model_dir: Path, library: Library, device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    cpu = torch.device("cpu")
    by_triton = ByReference(cpu, NUM_SMS, device.send, deterministic=False)

    def create(*given: Any, **settings: Any) -> Backend:
        attention = FlashInferAttention(cpu, NUM_SMS, device.send, by_triton, library)
        return replace(create_backend(*given, **settings), ops=FlashOps(attention))

    expected(model_dir)  # by the reference, before there is another one
    monkeypatch.setattr(test_real_model, "create_backend", create)
    rig = graph_rig(model_dir, device)
    yield rig
    rig.worker.close()


@pytest.mark.slow
def test_replays_give_the_tokens_of_the_reference(
    rig: Rig, device: GraphDevice, library: Library, model_dir: Path
) -> None:
    """Read before the next step is launched, and after."""
    assert len(library.graph_wrappers()) == len(SIZES)
    for number, generate in enumerate((rig.generate, rig.generate_ahead)):
        device.replays.clear()
        library.plans.clear()
        made = requests(rig, 20 + 10 * number)
        assert generate(*made) == expected(model_dir)
        leave(rig, made)
        assert len(device.replays) == 7 and library.plans == ["Prefill"] + 7 * ["DecodeGraph"]


def test_steps_with_prompts_are_replayed_too(rig: Rig, device: GraphDevice, library: Library, model_dir: Path) -> None:
    """Prompts in chunks, pictures included, beside decodes: every step is one replay, and FlashInfer plans those of
    decodes alone."""
    assert not any("op by op" in note for note in rig.worker.notes)
    for number, chunk in enumerate((3, 6), start=1):
        library.plans.clear()
        made, before = requests(rig, 20 * number), rig.next_step()
        assert rig.generate_ahead(*made, chunk=chunk) == expected(model_dir)
        leave(rig, made)
        num_steps = rig.next_step() - before - 1
        assert len(device.replays) == num_steps > 7
        assert {*library.plans} == {"DecodeGraph"} and 0 < len(library.plans) < num_steps


@pytest.mark.slow
def test_sizes_take_turns(rig: Rig, device: GraphDevice, model_dir: Path) -> None:
    """Requests end one after the other, so every graph is replayed behind a larger one, with other padding."""
    made = requests(rig, 20)
    tokens = [[o.token_id] for o in rig.language(*(rig.row(r, 0, r.prompt_token_ids, 0) for r in made))]
    device.replays.clear()
    for count in range(1, 8):
        running = made[: max(5 - count // 2, 1)]
        rows = [rig.row(request, request.num_prompt + count - 1, [-1], count) for request in running]
        for known, outcome in zip(tokens, rig.language(*rows), strict=False):
            known.append(outcome.token_id)
    assert len(device.replays) == 7
    assert tokens == [full[: len(known)] for known, full in zip(tokens, expected(model_dir), strict=True)]


@pytest.mark.slow
def test_steps_are_launched_op_by_op_once_a_plan_no_longer_fits(
    rig: Rig, device: GraphDevice, library: Library, model_dir: Path
) -> None:
    """The step that found out fails before anything ran, and is repeated row by row."""
    made = requests(rig, 20)
    rig.language(*(rig.row(request, 0, request.prompt_token_ids, 0) for request in made))
    library.drift = 1
    for count in (1, 2):
        outcomes = rig.language(*(rig.row(request, request.num_prompt + count - 1, [-1], count) for request in made))
        assert [outcome.token_id for outcome in outcomes] == [tokens[count] for tokens in expected(model_dir)]
    assert not device.replays and library.plans[-1] == "Decode"


@pytest.mark.slow
def test_every_partition_has_wrappers_of_its_own(
    model_dir: Path, library: Library, device: GraphDevice, rig: Rig
) -> None:
    other = GraphDevice(library, num_partitions=2)
    before = len(library.graph_wrappers())
    both = graph_rig(model_dir, other)
    assert len(library.graph_wrappers()) - before == 2 * len(SIZES)
    made = requests(both, 20)
    for partition in (0, 1):
        other.partitions.here = partition
        other.replays.clear()
        assert both.generate_ahead(*made) == expected(model_dir)
        assert set(other.replays) == {partition}
    both.worker.close()
