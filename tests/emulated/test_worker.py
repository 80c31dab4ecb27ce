"""The worker on an emulated device: the tokens of a processor, whatever is late, fails or is divided, and nothing that
a device would punish."""

from __future__ import annotations

import threading
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend import devices
from hydra_engine.backend.cuda.sm_split import SplitLane
from hydra_engine.backend.devices import ChosenDevice
from hydra_engine.backend.select import create_backend
from hydra_engine.core.options import NICENESS
from hydra_engine.core.pools import PoolKind
from hydra_engine.models.layers.decoder import RotaryTable
from hydra_engine.models.qwen_vl.model import PatchRotary
from hydra_engine.models.specs.registry import load_spec
from tests.emulated.conftest import Models, Rigs, assert_clean
from tests.emulated.graphs import CUDAGraph
from tests.emulated.streams import Stream, Streams
from tests.worker.fakes import make_request, outcomes_of
from tests.worker.pulling import VALID, connect, pull
from tests.worker.pulling import make_rig as make_peer
from tests.worker.test_graphs import requests
from tests.worker.test_mixed_graphs import expected_texts, joining
from tests.worker.test_mixed_graphs import texts as mixed_texts
from tests.worker.test_real_model import ask, make_rig, texts, with_pictures

POINTS = ("eng.before_step", "eng.mid_step")


@cache
def expected(model_dir: Path, *, special: bool) -> list[list[int]]:
    rig = make_rig(model_dir, "reference")
    tokens = rig.generate(*requests(rig, 10, special=special))
    rig.worker.close()
    return tokens


NORM = "_rms_norm_kernel"
LAYER = ["_rope_linear_kernel", "_decode_gqa_kernel", "_small_linear_kernel"]
LAYER += ["_gated_linear_kernel", "_small_linear_kernel"]
LAYER_OF_ROWS = [*LAYER[:3], NORM, *LAYER[3:], NORM]


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_a_layer_of_a_captured_decode_has_five_launches_and_two_norms_of_several_rows(
    on_device: Rigs, models: Models, replays: list[CUDAGraph], family: str
) -> None:
    """A layer had ten launches when norms, rotation, the joint of split contexts and the activation had their own."""
    rig = on_device(family)
    together = expected(models(family), special=False)
    assert rig.generate(*requests(rig, 10)) == together
    of_rows = replays[-1].trace.launched
    assert rig.generate(requests(rig, 20)[0]) == together[:1]
    of_one = replays[-1].trace.launched
    number = of_one.count("_gated_linear_kernel")
    step, rest = [NORM, *LAYER * number, NORM, "_small_linear_kernel"], len(LAYER_OF_ROWS) * number + 1
    assert number and of_one[: len(step)] == step
    assert of_rows[: rest + 1] == [NORM, *LAYER_OF_ROWS * number, "_small_linear_kernel"]
    for what_follows in (of_one[len(step) :], of_rows[rest + 1 :]):
        assert not {*what_follows} & {*LAYER, NORM, "cache"}, "what follows are draws"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_tokens_are_those_of_a_processor(
    on_device: Rigs, models: Models, replays: list[CUDAGraph], family: str
) -> None:
    rig = on_device(family)
    for number, (special, chunk) in enumerate(((True, 7), (False, 1000)), start=1):
        for generate in (rig.generate, rig.generate_ahead):
            replays.clear()
            made = requests(rig, 100 * number, special=special)
            assert generate(*made, chunk=chunk) == expected(models(family), special=special)
            assert replays
            for request in made:
                rig.leave(request)


@pytest.mark.slow
@pytest.mark.parametrize("special", [False, True])
def test_steps_are_launched_while_the_device_does_nothing(
    on_device: Rigs, models: Models, streams: Streams, replays: list[CUDAGraph], special: bool
) -> None:
    """Buffers of steps and results are not used again before they were read. With rows of log probabilities,
    penalties and masks a decode replays as well, with what they need after it; all that is sent lies in buffers of
    two steps."""
    rig = on_device("llava")
    made = requests(rig, 10, special=special)
    streams.working.clear()
    replays.clear()
    rows = [[rig.row(r, 0, r.prompt_token_ids, 0) for r in made]]
    rows += [[rig.row(r, r.num_prompt + count - 1, [-1], count) for r in made] for count in range(1, 3)]
    steps = [rig.submit(*row) for row in rows]
    assert streams.waiting.wait(60)
    deadline = time.monotonic() + 60
    while len(replays) < (4 if special else 2):
        assert time.monotonic() < deadline, "steps are not launched"
        time.sleep(0.01)
    assert rig.worker.poll() == []
    streams.working.set()
    found = [rig.wait(step).token_ids for step in steps]
    assert [list(tokens) for tokens in zip(*found[1:], strict=True)] == [
        tokens[1:3] for tokens in expected(models("llava"), special=special)
    ]


@pytest.mark.slow
def test_small_steps_with_prompts_are_replayed(on_device: Rigs, models: Models, replays: list[CUDAGraph]) -> None:
    """Tokens of the decodes beside them are not read yet; special rows take one launch more."""
    rig = on_device("llava")
    made = mixed_texts(10)
    for request in made:
        rig.add(request)
    replays.clear()
    assert joining(rig, made, 4) == expected_texts(models("llava"))
    assert 20 < len(replays) <= 40


@pytest.mark.slow
def test_a_row_that_fails_fails_alone(on_device: Rigs, models: Models) -> None:
    rig = on_device("llava", cuda_graph_sizes=(8,))
    for number, (point, action) in enumerate(product(POINTS, ("raise", "nan", "oom")), start=1):
        made, poison = requests(rig, 20 * number, special=number % 2 == 0), make_request(1000 + number, [60, 61, 62])
        rig.add(poison)
        rig.worker.faults.arm(point, action, "token=61")
        tokens = rig.generate_ahead(*made, poison, chunk=20)
        assert tokens == [*expected(models("llava"), special=number % 2 == 0), []], (point, action)
        for request in (*made, poison):
            rig.leave(request)


@pytest.mark.slow
def test_features_that_are_no_numbers_fail_their_picture(on_device: Rigs) -> None:
    rig = on_device("llava")
    sound, sick = with_pictures(rig, 1, seed=3, count=2), with_pictures(rig, 2, seed=4, count=1)
    rig.worker.faults.arm("vis.before_step", "nan", "request=2")
    errors = rig.vision(rig.item(sound, 0), rig.item(sick, 0), rig.item(sound, 1))
    assert [error is None for error in errors] == [True, False, True]


def test_encodes_that_no_graph_takes_wait_for_nothing(on_device: Rigs) -> None:
    """The copies of what follows from their pictures' sizes are not waited for either."""
    with_pictures(on_device("qwen2_5_vl", enforce_eager=True), 1, seed=3, count=2)


@pytest.mark.slow
def test_recurrent_states_follow_their_requests(on_device: Rigs, models: Models) -> None:
    host = make_rig(models("hybrid"), "reference", num_seq_slots=6)
    together = ask(host, texts(10), host.generate)
    host.worker.close()
    rig = on_device("hybrid", num_seq_slots=6)
    rig.worker.faults.arm("eng.mid_step", "raise", "times=1")
    assert ask(rig, texts(30), rig.generate_ahead, chunk=15) == together


@pytest.mark.slow
def test_a_lane_that_moves_between_partitions_keeps_its_order(
    on_device: Rigs, models: Models, replays: list[CUDAGraph], streams: Streams
) -> None:
    """The language lane has its own part of the device while the other one has work."""
    rig = on_device("llava", sm_split=(4,))
    assert rig.worker._vision is not None
    vision = rig.worker._vision.thread
    assert isinstance(vision, SplitLane)
    made, found = requests(rig, 10), list[tuple[int, ...]]()
    replays.clear()
    vision.submit(lambda: streams.current.synchronize())
    for count in range(8):
        while vision._sharing._has_work("vision"):  # what was captured, too
            time.sleep(0.001)
        busy = threading.Event()

        def encode(busy: threading.Event = busy) -> None:
            assert busy.wait(60)
            streams.current.synchronize()

        if count % 2:
            vision.submit(encode)
        if count:
            rows = [rig.row(r, r.num_prompt + count - 1, [-1], count) for r in made]
        else:
            rows = [rig.row(r, 0, r.prompt_token_ids, 0) for r in made]
        step = rig.submit(*rows)
        found.append(tuple(outcome.token_id or 0 for outcome in outcomes_of(rows, rig.wait(step))))
        busy.set()
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected(models("llava"), special=False)
    assert len({id(graph.place) for graph in replays}) == 2 and len(replays) == 7
    with_pictures(rig, 50, seed=3, count=1)


@pytest.mark.parametrize("sm_split", [(), (1, 3)], ids=["whole", "divided"])
@pytest.mark.parametrize("lane_priority", NICENESS)
def test_no_stream_goes_first_where_kernels_begin_early(
    streams: Streams, lane_priority: str, sm_split: tuple[int, ...]
) -> None:
    """Priorities are equal for every setting, also on parts of the device."""
    device = create_backend("cuda", torch.float32, threads=1, lane_priority=lane_priority, sm_split=sm_split).device
    for lane in [device.lane(name) for name in ("language", "vision", "peers")]:
        lane.close()
    assert len(streams.by_handle) == 4 + 2 * len(sm_split)
    assert {stream.priority for stream in streams.by_handle.values()} == {0}
    assert_clean(streams)


@pytest.mark.parametrize("sm_split", [(), (1, 3)], ids=["whole", "divided"])
def test_tokens_go_first_where_kernels_do_not(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, sm_split: tuple[int, ...]
) -> None:
    streams.begins_early = False
    monkeypatch.setattr(devices, "resolve", lambda device: ChosenDevice("cuda:0", 0, 4, "emulated", (8, 0)))
    device = create_backend("cuda", torch.float32, threads=1, lane_priority="balanced", sm_split=sm_split).device
    for name in ("language", "vision"):
        device.lane(name).close()
    assert [stream.priority for stream in streams.by_handle.values()] == [0, *[-1, 0] * (1 + len(sm_split))]
    assert_clean(streams)


@pytest.mark.parametrize("kind", ["decoder", "tower"])
def test_a_lane_outgrows_tables_that_were_made_outside_of_it(streams: Streams, models: Models, kind: str) -> None:
    device = create_backend("cuda", torch.float32, threads=1).device
    lane, found = device.lane("language"), list[torch.Tensor]()
    spec = load_spec(models("llava")).language
    on = device.torch_device
    table = RotaryTable(spec, on) if kind == "decoder" else PatchRotary(16, 1e4, on)
    places = [torch.full((1,), 7000, device=on)] * (1 if kind == "decoder" else 2)
    lane.submit(lambda: found.extend(table(*places, 7001)))
    lane.close()
    assert len(found) == 2 and found[0].isfinite().all().item()
    assert_clean(streams)


@pytest.mark.parametrize("pool", [PoolKind.FEATURES, PoolKind.KV])
def test_blocks_are_pulled(streams: Streams, models: Models, pool: PoolKind) -> None:
    rigs = [
        make_peer(models("llava"), "EP", backend=create_backend("cuda", torch.float32, threads=1)) for _ in range(2)
    ]
    source, target = rigs
    streams.serving = True
    caches: list[Any] = [rig.kv_cache if pool is PoolKind.KV else rig.image_cache for rig in rigs]
    caches[0].data.copy_(torch.arange(caches[0].data.numel(), dtype=torch.float32).view(caches[0].data.shape))
    source.exchange.set_word(0, VALID)
    connect(target, "source", source)
    pairs = [(3, 1), (4, 7), (9, 0)]
    sums = source.exchange.checksums(pool, [3, 4, 9])
    result = pull(target, pool, pairs, checksums=sums)
    assert result.valid and result.problem is None
    for begin, end in pairs:
        assert torch.equal(caches[1].data[end].cpu(), caches[0].data[begin].cpu())
    for rig in rigs:
        rig.worker.close()
    assert_clean(streams)


@pytest.mark.slow
def test_streams_of_lanes_are_told_apart(on_device: Rigs, streams: Streams) -> None:
    """The test's own teeth: lanes work on streams of their own."""
    rig = on_device("llava")
    seen: set[Stream] = set()
    for lane in (rig.worker._language.thread, rig.worker._vision.thread):  # type: ignore[misc]
        lane.submit(lambda: seen.add(streams.current))
    rig.worker.close()
    assert len(seen) == 2 and streams.default not in seen
