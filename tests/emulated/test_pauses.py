"""Encodes and decode steps of a whole worker on the clock of the emulated device: a miniature of Qwen2-VL with as many
layers as the model of 7B has, whose kernels stand for those of an encode of 4096 patches and of 64 rows that decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend.select import create_backend
from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import LanguageResult, VisionResult
from hydra_engine.worker.boundary import DROPPED
from hydra_engine.worker.vision.gate import DeviceGate
from tests.emulated.clock import Clock
from tests.emulated.conftest import Models, assert_clean
from tests.worker import fakes
from tests.worker.fakes import Rig, make_request
from tests.worker.test_encode_graphs import features, with_pictures
from tests.worker.test_real_model import make_rig
from tools.miniatures import make_tiny

ENCODE_S, DECODE_S = 12.2e-3, 4.2e-3  # of the benchmarks' floors, with whole tiles
PICTURE = (64, 48)  # 192 patches
ENCODED = 4.6e8, 4.5e7  # FLOP and bytes of the miniature's encode
DECODED = 4.1e6  # bytes of its decode step
LIMIT_S, PIECE_S = 5.5e-3, 0.5e-3


class Busy:
    """A rig that serves, a text that is decoded and pictures that are encoded."""

    def __init__(self, rig: Rig, clock: Clock) -> None:
        self.rig, self.clock = rig, clock
        vision, language = rig.worker._vision, rig.worker._language
        assert vision is not None and language is not None
        self.gate: DeviceGate = rig.worker._gate  # type: ignore[assignment]
        self.vision, streams = vision, [lane.thread._stream for lane in (vision, language)]  # type: ignore[attr-defined]
        machine = clock.machine
        flop, num_bytes = ENCODED
        streams[0].scale = 4e9 / num_bytes
        streams[0].flop_scale = (ENCODE_S - 400 * machine.gap_s) * machine.flop_per_s / flop / streams[0].scale
        streams[1].scale = (DECODE_S - 150 * machine.gap_s) * machine.bytes_per_s / DECODED
        self.line = streams[0].line
        self._text = replace(make_request(1, [5, 6, 7]), max_new_tokens=400)
        self._num_decoded = 0

    def start(self) -> None:
        rig = self.rig
        rig.worker.warm_up(lambda done, total: None)
        rig.worker.capture_graphs(lambda done, total: None)
        rig.add(self._text)
        (outcome,) = rig.language(rig.row(self._text, 0, self._text.prompt_token_ids, 0))
        self._token = outcome.token_id or 0

    def picture(self, request_id: int, *more: tuple[int, int]) -> Request:
        return with_pictures(self.rig, request_id, PICTURE, *more)

    def encode(self, request: Request) -> StepId:
        step = self.rig.next_step()
        items = (self.rig.item(request, index) for index in range(len(request.images)))
        self.rig.worker.submit_vision(VisionPlan(step, tuple(items)))
        return step

    def encoded(self, step: StepId) -> VisionResult:
        result: VisionResult = self.rig.wait(step)
        assert not any(result.errors)
        return result

    def decode(self, allowance_s: float) -> LanguageResult:
        start = self._text.num_prompt + self._num_decoded
        row = self.rig.row(self._text, start, [self._token], 1 + self._num_decoded)
        result: LanguageResult = self.rig.wait(self.rig.submit(row, vision_s=allowance_s))
        self._token = int(result.token_ids[0])
        self._num_decoded += 1
        return result

    def decode_until(self, step: StepId, allowance_s: float) -> list[LanguageResult]:
        """Results of decodes until the encode `step`, which was submitted before, has ended."""
        results = []
        while step not in self.rig._results:
            results.append(self.decode(allowance_s))
        return results

    @property
    def idle_s(self) -> float:
        """Idle seconds of the device after the first kernel that took longer than 10 us."""
        spans = self.line.spans
        first = next(index for index, (begin, end) in enumerate(spans) if end - begin > 10e-6)
        return sum(after - before for (_, before), (after, _) in pairwise(spans[first:]))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("deep")
    make_tiny("qwen2_vl", directory, seed=3, vision={"depth": 32}, text={"num_hidden_layers": 28})
    return directory


@contextmanager
def serving(model_dir: Path, tpot_slo: float | None, *, begins_early: bool = True, **options: Any) -> Iterator[Busy]:
    from tests.emulated.cuda import emulated_cuda  # torch learns of the device

    clock, sizes = Clock(), {"cuda_graph_sizes": (1,), "encoder_cuda_graph_sizes": (192, 256)}
    with pytest.MonkeyPatch.context() as patch, clock.time, emulated_cuda(clock=clock) as streams:
        streams.begins_early = begins_early
        patch.setattr(fakes, "threading", clock.time.threading)
        patch.setattr(fakes, "MonotonicClock", lambda: clock.time)
        backend = create_backend("cuda", torch.float32, threads=1)
        gate = DeviceGate(clock.time, backend.device.mark, paced=tpot_slo is not None)
        options = {"num_seq_slots": 16, **sizes, **options}
        rig = make_rig(model_dir, "", asynchronous=True, backend=backend, gate=gate, tpot_slo=tpot_slo, **options)
        busy = Busy(rig, clock)
        busy.start()
        busy.line.spans.clear()
        streams.serving = True
        yield busy
        rig.worker.close()
    assert_clean(streams)


class RaisesAt:
    """A checkpoint of the gate."""

    def __init__(self, place: int, gate: DeviceGate) -> None:
        self.count, self._place, self._gate = 0, place, gate

    def __call__(self) -> None:
        self.count += 1
        if self.count == self._place:
            raise RuntimeError("in the middle")
        DeviceGate.checkpoint(self._gate)


def seconds(result: LanguageResult | VisionResult) -> float:
    return result.ended_s - result.started_s


@pytest.mark.slow
def test_decode_steps_keep_the_limit_beside_a_large_encode(deep: Path) -> None:
    """Pieces hardly delay an encode to which the limit leaves time."""
    with serving(deep, LIMIT_S) as busy:
        gate = busy.gate
        gate.can_hold = False
        alone_s = seconds(busy.encoded(busy.encode(busy.picture(10))))
        step_s = seconds(busy.decode(inf))
        # Kernels that only move, and the beginnings of graphs, come on top.
        assert ENCODE_S <= alone_s <= 1.06 * ENCODE_S and step_s == pytest.approx(DECODE_S, rel=0.05)
        encode = busy.encode(busy.picture(11))
        slowed = [seconds(result) for result in busy.decode_until(encode, 0.0)]
        beside_s = seconds(busy.encoded(encode))

        gate.can_hold = True
        assert seconds(busy.encoded(busy.encode(busy.picture(12)))) <= 1.02 * alone_s
        encode = busy.encode(busy.picture(13))
        busy.decode_until(encode, 1.0)
        assert seconds(busy.encoded(encode)) <= 1.05 * beside_s, "the limit leaves it room"

        # As budgets reckon: seconds of vision lengthen a step by what they slow it, and one piece more than allowed.
        slowing = 1 - step_s / max(slowed)
        piece_s = 2 * PIECE_S
        encode = busy.encode(busy.picture(14))
        results = busy.decode_until(encode, (LIMIT_S - step_s) / slowing - piece_s)
        assert len(results) > 3 and max(map(seconds, results)) <= LIMIT_S + piece_s < max(slowed)
        assert max(map(seconds, results)) > 0.9 * LIMIT_S, "the limit is used"


@pytest.mark.slow
@pytest.mark.parametrize("captured", [True, False], ids=["graphs", "eager"])
def test_encodes_in_pieces_have_the_features_of_whole_ones(models: Models, captured: bool) -> None:
    """Held up by steps that leave them no time, also where a step raises in the middle and its pictures are encoded
    one by one."""
    model_dir = models("qwen2_vl")
    host = make_rig(model_dir, "reference")
    with serving(model_dir, LIMIT_S, enforce_eager=not captured) as busy:
        graphs, gate = busy.vision.graphs, busy.gate
        assert (graphs is not None and graphs.num_pieces >= 3) if captured else graphs is None
        for request_id, raises in ((10, False), (11, True), (12, False)):
            request = busy.picture(request_id, (32, 32))
            checkpoint = RaisesAt(3 if raises else 0, gate)
            gate.checkpoint = checkpoint  # type: ignore[method-assign]
            encode = busy.encode(request)
            assert len(busy.decode_until(encode, 0.0)) > 2
            assert busy.encoded(encode).errors == (None, None) and checkpoint.count > 3
            wanted = with_pictures(host, request_id, PICTURE, (32, 32))
            assert host.vision(host.item(wanted, 0), host.item(wanted, 1)) == (None, None)
            for index in (0, 1):
                found = features(busy.rig, request, index).cpu()
                assert torch.equal(found, features(host, wanted, index))
    host.worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("tpot_slo", [None, LIMIT_S], ids=["whole", "pieces"])
def test_two_encodes_in_flight_leave_no_gap(models: Models, tpot_slo: float | None) -> None:
    """The second one is launched, and what it needs is on its way, while the first one is computed."""
    with serving(models("qwen2_vl"), tpot_slo) as busy:
        idle_s = list[float]()
        for number, waits in enumerate((True, False)):
            busy.line.spans.clear()
            pictures = [busy.picture(10 + 2 * number + index) for index in (0, 1)]
            first = busy.encode(pictures[0])
            earlier = busy.encoded(first) if waits else None
            second = busy.encode(pictures[1])
            earlier = earlier or busy.encoded(first)
            later = busy.encoded(second)
            assert waits or later.started_s == earlier.ended_s
            idle_s.append(busy.idle_s)
        assert idle_s[0] > 50e-6 and idle_s[1] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("action", ["nan", "raise"])
def test_a_picture_that_fails_between_others_in_flight_fails_alone(models: Models, action: str) -> None:
    with serving(models("qwen2_vl"), LIMIT_S) as busy:
        busy.rig.worker.faults.arm("vis.before_step", action, "request=11")
        steps = [busy.encode(busy.picture(10 + index)) for index in range(3)]
        results: list[VisionResult] = [busy.rig.wait(step) for step in steps]
        assert [result.errors[0] is None for result in results] == [True, False, True]


@pytest.mark.slow
def test_a_dropped_encode_ends_with_the_pieces_in_flight(deep: Path) -> None:
    with serving(deep, LIMIT_S) as busy:
        alone_s = seconds(busy.encoded(busy.encode(busy.picture(10))))
        dropped, kept = busy.encode(busy.picture(11)), busy.encode(busy.picture(12))
        step = busy.decode(0.0)
        busy.rig.worker.drop_vision(dropped)
        result: VisionResult = busy.rig.wait(dropped)
        assert result.errors == (DROPPED,)
        assert result.ended_s - step.ended_s <= 3 * PIECE_S < alone_s / 4
        later = busy.encoded(kept)
        assert later.started_s == result.ended_s and seconds(later) <= 1.02 * alone_s
