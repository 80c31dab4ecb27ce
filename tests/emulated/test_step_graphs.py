"""Steps of up to 2048 tokens are one graph on an emulated device, pictures included: the tokens are those of steps that
are launched op by op, launches are counted, and so is what the graphs take of the device's memory."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest

from hydra_engine import Engine
from hydra_engine.cli.summary import start_lines
from hydra_engine.core.reports import InstanceSummary
from hydra_engine.core.request import Request
from hydra_engine.core.units import size
from hydra_engine.instance import compute_stack
from hydra_engine.worker import worker as worker_module
from hydra_engine.worker.language.step import LanguageStep
from hydra_engine.worker.memory import working
from hydra_engine.worker.memory.measure import measure
from hydra_engine.worker.worker import Worker
from tests.emulated import test_engine
from tests.emulated.clock import Work
from tests.emulated.conftest import Models, Rigs
from tests.emulated.cuda import emulated_cuda
from tests.emulated.graphs import Capturing, CUDAGraph
from tests.emulated.streams import Streams
from tests.emulated.tensors import Present
from tests.emulated.test_pauses import serving
from tests.emulated.test_worker import expected
from tests.worker.fakes import make_request
from tests.worker.test_graphs import leave, requests
from tests.worker.test_mixed_graphs import expected_texts, joining, texts
from tests.worker.test_real_model import make_rig, with_pictures
from tools.miniatures import make_tiny

# Of a step that is a graph: what is sent, copied to its place twice, the graph, and two copies to the host; and of rows
# that are special eight for what they ask for, another graph and two more copies.
LAUNCHES, SPECIAL_LAUNCHES = 6, 11


@dataclass
class Steps:
    """Launches of each language step, by how it was run."""

    graphs: list[int] = field(default_factory=list)
    op_by_op: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)  # of those


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    seen = Steps()
    launched: Counter[int] = Counter()  # by thread: others may encode meanwhile

    def counts(name: str, into: list[int]) -> None:
        run = getattr(LanguageStep, name)

        def counted(self: LanguageStep, *given: Any) -> Any:
            if not self._slot_table.asynchronous:  # the processor whose tokens are expected
                return run(self, *given)
            before = launched[get_ident()]
            try:
                return run(self, *given)
            finally:
                into.append(launched[get_ident()] - before)
                *_, begun = given
                if begun.scoring is not None:
                    seen.scored.append(into[-1])

        monkeypatch.setattr(LanguageStep, name, counted)

    def launches(owner: Any, name: str) -> None:
        launch = getattr(owner, name)

        def counted(self: Any, *given: Any) -> Any:
            launched[get_ident()] += 1
            return launch(self, *given)

        monkeypatch.setattr(owner, name, counted)

    counts("_replayed", seen.graphs)
    counts("_eager", seen.op_by_op)
    launches(Streams, "launch")
    launches(CUDAGraph, "replay")
    return seen


WITH_PICTURES = (
    *("llava", "llava_llama", "llava_next", "llava_llama_anyres", "internvl", "internvl_chat"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "openpangu_vl", "minicpmv", "minicpmv4_6"),
    *("qwen3_5", "qwen3_5_moe", "hybrid"),  # with recurrent states
)
SMALL: dict[str, Any] = {"num_seq_slots": 8, "cuda_graph_sizes": (8,), "encoder_cuda_graph_sizes": (1,)}


@pytest.mark.drawn
@pytest.mark.quick("qwen3_vl-20-False")
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("chunk", [20, 1000])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_step_with_pictures_is_one_graph(
    on_device: Rigs, models: Models, steps: Steps, family: str, chunk: int, special: bool
) -> None:
    """Several pictures in several chunks, whole and cut, beside decodes and special rows, with positions on three axes
    DeepStack and recurrent states; then the same op by op."""
    rig = on_device(family, token_budget=128 if chunk == 20 else 256, **SMALL)
    made, wanted = requests(rig, 100, special=special), expected(models(family), special=special)
    assert rig.generate_ahead(*made, chunk=chunk) == wanted
    assert len(steps.graphs) >= 8 and not steps.op_by_op
    assert max(steps.graphs) <= LAUNCHES + special * SPECIAL_LAUNCHES
    leave(rig, made)
    rig.worker._language._step._graphs = None  # type: ignore[union-attr]
    assert rig.generate_ahead(*requests(rig, 200, special=special), chunk=chunk) == wanted
    assert len(steps.op_by_op) == len(steps.graphs) and min(steps.op_by_op) >= 4 * LAUNCHES, "of two layers"


ROOM = {"token_budget": 640}  # of a step, for several prompts with pictures


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "graphs") for family in WITH_PICTURES),
        *(("qwen3_vl", form) for form in ("deterministic", "divided", "full", "sliced")),
        *zip(
            ("llava", "qwen2_vl", "internvl", "minicpmv4_6"),
            ("deterministic", "divided", "full", "sliced"),
            strict=True,
        ),
    ],
)
def test_every_family_computes_whole_prompts_in_graphs(
    streams: Streams, models: Models, steps: Steps, family: str, form: str
) -> None:
    """Engines whose steps have room for several prompts with pictures; what is scored alone is launched op by op."""
    test_engine.check(streams, models(family), **test_engine.FORMS[form], **ROOM)
    assert_graphs(steps)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["graphs", "deterministic"])
def test_whole_prompts_over_int8_keys_are_graphs(streams: Streams, models: Models, steps: Steps, form: str) -> None:
    test_engine.check_int8_keys(streams, models, **test_engine.FORMS[form], **ROOM)
    assert_graphs(steps)


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("method", ["w4-32", "w8a8", "gptq-4-zeros", "fp8-128", "fp8-compressed-channel", "fp8-tensor"])
def test_whole_prompts_with_quantised_weights_are_graphs(
    streams: Streams, models: Models, steps: Steps, tmp_path: Path, method: str
) -> None:
    test_engine.check_quantised(streams, models, tmp_path, method, **test_engine.FORMS["graphs"], **ROOM)
    assert_graphs(steps)


def assert_graphs(steps: Steps) -> None:
    """Checks that steps replayed graphs, except for scored prompts."""
    assert len(steps.graphs) > 15 and max(steps.graphs) <= LAUNCHES + SPECIAL_LAUNCHES
    assert steps.op_by_op == steps.scored and min(steps.scored) > 4 * LAUNCHES


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "hybrid"])
def test_every_decoder_computes_prompts_in_graphs(on_device: Rigs, models: Models, steps: Steps, family: str) -> None:
    rig, made = on_device(family, **SMALL | {"num_seq_slots": 12}), texts(10)
    for request in made:
        rig.add(request)
    assert joining(rig, made, 4) == expected_texts(models(family))
    assert len(steps.graphs) > 15 and not steps.op_by_op


@pytest.mark.quick("llava")
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_a_graph_is_full_or_nearly_empty(on_device: Rigs, models: Models, steps: Steps, family: str) -> None:
    """A graph of 16 tokens and 8 rows: eight prompts of two tokens, seven decodes beside one of nine, one of 16, one of
    one."""
    made = [make_request(number, range(20 + number, 22 + number)) for number in range(1, 9)]
    made += [make_request(9, range(40, 49)), make_request(10, range(60, 76)), make_request(11, [50])]
    plain = make_rig(models(family), "reference")
    for request in made:
        plain.add(request)
    wanted = plain.generate(*made, steps=2)
    plain.worker.close()
    rig = on_device(family, **SMALL | {"token_budget": 16})

    def tokens(decodes: list[Request], *prompts: Request) -> list[int | None]:
        rows = [rig.row(request, request.num_prompt, [-1], 1) for request in decodes]
        rows += [rig.row(request, 0, request.prompt_token_ids, 0) for request in prompts]
        return [outcome.token_id for outcome in rig.language(*rows)]

    for request in made[:8]:
        rig.add(request)
    assert tokens([], *made[:8]) == [of_one[0] for of_one in wanted[:8]]
    rig.leave(made[7])
    rig.add(made[8])
    assert tokens(made[:7], made[8]) == [*(of_one[1] for of_one in wanted[:7]), wanted[8][0]]
    for gone, request, of_one in zip(made[:2], made[9:], wanted[9:], strict=True):
        rig.leave(gone)
        rig.add(request)
        assert tokens([], request) == of_one[:1]
    assert steps.graphs == [LAUNCHES] * 4 and not steps.op_by_op
    assert [(size.tokens, size.rows) for size in rig.worker._language.graphs.mixed.sizes] == [(16, 8)]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_step_over_recurrent_states_is_one_graph_for_some_fifty_launches(
    on_device: Rigs, models: Models, steps: Steps
) -> None:
    """Counts those of a decoder of four layers, as a graph and op by op."""
    rig = on_device("hybrid", **SMALL)
    for base in (10, 30):
        made = texts(base)[:2]
        for request in made:
            rig.add(request)
        rig.generate(*made)
        rig.worker._language._step._graphs = None  # type: ignore[union-attr]
    assert max(steps.graphs) == LAUNCHES and len(steps.graphs) == len(steps.op_by_op)
    assert min(steps.op_by_op) >= 45


# ---- memory


PLENTY: dict[str, Any] = {"token_budget": 2048, "cuda_graph_sizes": (6,), "encoder_cuda_graph_sizes": (1,)}


def started(models: Models) -> tuple[InstanceSummary, list[tuple[int, ...]]]:
    """The summary of an engine after its start, and its answers."""
    options = test_engine.SMALL | {"max_num_seqs": 6} | PLENTY
    with Engine(models("llava"), device="cuda", **options) as engine:
        return engine.summary, test_engine.ask(engine)


@pytest.mark.slow
def test_graphs_take_what_is_kept_free_for_them(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the memory in which the largest captured step computes, which is most of it here: the emulated device
    knows no bytes of a graph itself."""
    for name in ("GRAPH_BYTES", "MIXED_GRAPH_BYTES", "ENCODE_GRAPH_BYTES"):
        monkeypatch.setattr(working, name, 0)
    seen: list[working.WorkingMemory] = []

    def measured(*given: Any) -> working.WorkingMemory:
        seen.append(measure(*given))
        return seen[-1]

    monkeypatch.setattr(compute_stack, "measure", measured)
    with emulated_cuda():
        summary, answers = started(models)
    assert answers == test_engine.expected(models("llava"))
    (kept,) = seen
    assert summary.graph_bytes == pytest.approx(kept.graph_bytes, rel=0.1)
    assert kept.fewer[0].graph_bytes < 0.7 * kept.graph_bytes, "half of the tokens"
    # 19 numbers of tokens, and decodes of six; each of them has one more for special rows.
    assert (summary.captured_tokens, summary.num_graphs) == (2048, 2 * 20 + 1)
    (line,) = (line for line in start_lines([summary]) if line.startswith("  graphs"))
    kinds = f"steps with prompts of up to 2048 tokens and encodes of up to {summary.captured_patches} patches"
    assert line == f"  graphs       41, {size(summary.graph_bytes)} for captured decode steps, {kinds}"


@pytest.mark.slow
@pytest.mark.parametrize(("mib", "tokens"), [(970, 512), (963, 256), (950, 0)])
def test_a_small_device_has_fewer_graphs(models: Models, steps: Steps, mib: int, tokens: int) -> None:
    with emulated_cuda(total_bytes=mib << 20):
        summary, answers = started(models)
    assert answers == test_engine.expected(models("llava"))
    assert summary.captured_tokens == tokens and any("theirs have no room" in note for note in summary.notes)
    assert steps.graphs and (len(steps.op_by_op) > len(steps.scored)) == (tokens == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("kib", "tokens"), [(9000, range(512, 2048)), (6500, range(64, 1024)), (5000, range(1))])
def test_graphs_that_find_no_memory_are_left_out(
    models: Models, monkeypatch: pytest.MonkeyPatch, kib: int, tokens: range
) -> None:
    """Another process has taken the memory since caches were sized; what the largest steps need op by op stays free.
    Graphs smaller than one that has memory have it too."""
    wanted = test_engine.expected(models("llava"))  # of an engine that captures nothing, if no test has asked before
    capture, found = Worker.capture_graphs, list[int]()

    def without_memory(worker: Worker, progress: Any) -> None:
        gc.collect()  # of what other tests have left nothing becomes free meanwhile
        Present.total_bytes = Present.used_bytes + (kib << 10)
        capture(worker, progress)
        language = worker._language
        assert language is not None and language.graphs is not None
        mixed = language.graphs.mixed
        found.extend(size.tokens for size in mixed.sizes if (0, size) in mixed._captured)
        smaller = [size.tokens for size in mixed.sizes if size.tokens <= worker.captured_tokens]
        assert found == smaller and worker.graph_sizes == ((6,) if found else ())

    monkeypatch.setattr(Worker, "capture_graphs", without_memory)
    monkeypatch.setattr(worker_module, "MIXED_GRAPH_BYTES", 1 << 12)  # the emulated device knows a graph's results only
    with emulated_cuda():
        summary, answers = started(models)
    assert answers == wanted
    assert summary.captured_tokens in tokens
    assert any("graphs of language steps are left out, the device has no memory" in note for note in summary.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "left_out"), [(0, 3), (3, 2)])
def test_graphs_that_the_driver_has_no_memory_for_are_left_out(
    on_device: Rigs, models: Models, monkeypatch: pytest.MonkeyPatch, number: int, left_out: int
) -> None:
    """Torch has ended the capture when the driver is to make the graph, and its error is not that of its allocator."""
    end, ended = Capturing.__exit__, list[Capturing]()

    def without_room(capturing: Capturing, *raised: Any) -> None:
        end(capturing, *raised)
        ended.append(capturing)
        if len(ended) > number:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(Capturing, "__exit__", without_room)
    rig = on_device("llava", **SMALL)
    (language,) = (note for note in rig.worker.notes if "of language steps" in note)
    assert language.startswith(f"{left_out} graphs of language steps are left out, the device has no memory for them")
    assert rig.generate_ahead(*requests(rig, 100)) == expected(models("llava"), special=False)


# ---- time


# Of the prompt of a picture with LLaVA-1.5-7B, as measured on an H200: launches of the processor, and what they launch.
LAUNCHES_S, PROMPT_S = 356 * 55e-6, 15.6e-3


@pytest.mark.slow
def test_a_first_token_of_a_picture_does_not_wait_for_launches(tmp_path: Path, steps: Steps) -> None:
    """The emulated clock says it: launches and kernels of a miniature with as many layers as the model has stand for
    those of 676 tokens. Op by op the device waits for the processor; a graph is there at once."""
    make_tiny("llava", tmp_path, seed=3, text={"num_hidden_layers": 32})
    with serving(tmp_path, None, token_budget=64, **SMALL) as busy:
        rig, clock, language = busy.rig, busy.clock, busy.rig.worker._language
        assert language is not None
        stream = language.thread._stream  # type: ignore[attr-defined]

        def first_token_s(request_id: int) -> float:
            request = with_pictures(rig, request_id, seed=request_id, count=1)
            begun = clock.now()
            (outcome,) = rig.language(rig.row(request, 0, request.prompt_token_ids, 0))
            assert outcome.error is None
            return clock.now() - begun

        seen = list[Work]()
        stream.scale = stream.flop_scale = 1.0
        stream.scaled = lambda work: seen.append(work) or work
        first_token_s(40)
        del stream.scaled
        moved = sum(work.num_bytes for work in seen)
        stream.scale = (PROMPT_S - len(seen) * clock.machine.gap_s) * clock.machine.bytes_per_s / moved
        graphs, step = language.graphs, language._step
        step._graphs = None  # type: ignore[union-attr]
        first_token_s(41)
        clock.machine = replace(clock.machine, launch_s=LAUNCHES_S / steps.op_by_op[-1])
        op_by_op_s = first_token_s(42)
        step._graphs = graphs  # type: ignore[union-attr]
        as_graph_s = first_token_s(43)
    assert steps.op_by_op[-1] > 250 and steps.graphs[-1] == LAUNCHES
    assert as_graph_s == pytest.approx(PROMPT_S, rel=0.05)
    assert op_by_op_s == pytest.approx(LAUNCHES_S, rel=0.05), "3.7 ms later"
