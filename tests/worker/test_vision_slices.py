"""The vision lane at the gate: it waits where a language step leaves no room, and always leaves the gate behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from hydra_engine.backend.base import PagedCache
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.plans import VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import VisionResult
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.worker.boundary import DROPPED
from hydra_engine.worker.language.sampler import SamplingState
from hydra_engine.worker.ports import NO_GATE, Job, WorkerRequest
from hydra_engine.worker.vision.gate import LaneGate
from hydra_engine.worker.vision.lane import VisionLane
from tests.worker.fakes import BAD_PIXEL, FAKE_VISION, IMAGE_TOKENS, FakeModel, Rig, make_picture, make_request

NUM_LAYERS = 4


@dataclass
class LayeredModel(FakeModel):
    """A model whose tower has layers with a checkpoint before each."""

    layers: list[int] = field(default_factory=list)
    piece_rows: int = -1

    def encode(self, inputs: VisionInput, image_cache: PagedCache, /) -> None:
        self.piece_rows = inputs.piece_rows
        for layer in range(NUM_LAYERS):
            inputs.checkpoint()
            self.layers.append(layer)
        super().encode(inputs, image_cache)


class Setup:
    """A picture per fill, all of one request, and a vision lane with a thread of its own."""

    def __init__(self, *fills: int, gated: bool = True, piece_rows: int = 0, asynchronous: bool = False) -> None:
        self.model = LayeredModel()
        self.rig = Rig(self.model)
        self.gate = LaneGate(MonotonicClock())
        gate = self.gate if gated else NO_GATE
        config = EngineConfig(scheduler=SchedulerConfig(tpot_slo=1.0 if piece_rows else None))
        parts = self.rig.backend, FAKE_VISION, self.rig.image_cache, config, MonotonicClock(), gate
        self.lane = VisionLane(self.model, *parts, self.guard, piece_rows=piece_rows, asynchronous=asynchronous)
        pictures = [make_picture(f"{i}", fill, 3 + i * IMAGE_TOKENS) for i, fill in enumerate(fills)]
        prompt = [3, 4, 5, *[96] * (IMAGE_TOKENS * len(fills))]
        self.request: Request = make_request(1, prompt, images=tuple(image for image, _ in pictures))
        payloads = {payload.digest: payload for _, payload in pictures}
        self.record = WorkerRequest(self.request, SamplingState.from_request(self.request), payloads, 0)
        self.ends: SimpleQueue[VisionResult | KeyboardInterrupt] = SimpleQueue()
        self.results: list[VisionResult] = []

    def guard(self, job: Job) -> None:
        try:
            job()
        except KeyboardInterrupt as error:  # what `interrupt` raises
            self.ends.put(error)

    def run(self) -> None:
        """Waits for the result; raises what ended the lane."""
        items = tuple(self.rig.item(self.request, index) for index in range(len(self.request.images)))
        self.lane.submit(VisionPlan(self.rig.next_step(), items), [self.record] * len(items), self.ends.put)
        end = self.ends.get(timeout=60)
        if isinstance(end, KeyboardInterrupt):
            raise end
        self.results.append(end)

    def close(self) -> None:
        self.lane.close()
        self.rig.worker.close()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0)


def test_a_vision_step_advances_a_layer_per_language_step_that_leaves_no_room() -> None:
    setup = Setup(10, 20)
    setup.gate.begin(0.0)
    thread = threading.Thread(target=setup.run)
    thread.start()
    for layers in range(NUM_LAYERS + 1):  # at the entry, then before every layer
        wait_until(lambda: setup.gate._waiting)
        assert setup.model.layers == list(range(max(layers - 1, 0)))
        assert setup.results == []
        held_s = time.monotonic()
        setup.gate.end()
        setup.gate.begin(0.0)
        wait_until(lambda done=layers: len(setup.model.layers) == done)
    thread.join(60)
    setup.gate.end()
    (result,) = setup.results
    assert result.errors == (None, None)
    assert result.started_s < held_s < result.ended_s, "the step's times include its waits"
    setup.close()


def test_a_picture_that_makes_the_tower_raise_leaves_the_gate_behind() -> None:
    """The step is repeated picture by picture inside one passage through the gate."""
    setup = Setup(10, BAD_PIXEL, 30)
    setup.run()
    assert [error is None for error in setup.results[0].errors] == [True, False, True]
    assert setup.model.layers == list(range(NUM_LAYERS)) * 4
    setup.gate.enter()  # an error if the lane were still inside
    setup.gate.leave()
    setup.close()


def test_a_lane_that_dies_leaves_the_gate_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(10)
    monkeypatch.setattr(LayeredModel, "encode", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        setup.run()
    setup.gate.begin(0.0)
    assert setup.gate.end() == 0.0
    setup.gate.enter()
    setup.gate.leave()
    setup.close()


def test_a_dropped_step_ends_before_its_next_layer_and_is_not_repeated() -> None:
    setup = Setup(10, 20)
    setup.gate.begin(0.0)
    thread = threading.Thread(target=setup.run)
    thread.start()
    for layers in range(2):
        wait_until(lambda: setup.gate._waiting)
        setup.gate.end()
        setup.gate.begin(0.0)
        wait_until(lambda done=layers: len(setup.model.layers) == done)
    wait_until(lambda: setup.gate._waiting)
    setup.lane.drop(StepId(setup.rig._steps))
    setup.gate.end()
    thread.join(60)
    assert setup.results[0].errors == (DROPPED, DROPPED) and setup.model.layers == [0]
    setup.run()
    assert setup.results[1].errors == (None, None), "the next step is another"
    setup.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_is_dropped_before_it_begins_computes_nothing(asynchronous: bool) -> None:
    setup = Setup(10, gated=False, asynchronous=asynchronous)
    begin = threading.Event()
    setup.lane.thread.submit(lambda: begin.wait(60) and None)
    for _ in range(2):
        step = setup.rig.next_step()
        setup.lane.submit(VisionPlan(step, (setup.rig.item(setup.request, 0),)), [setup.record], setup.ends.put)
    setup.lane.drop(StepId(step - 1))
    setup.lane.drop(step)
    begin.set()
    for _ in range(2):
        end = setup.ends.get(timeout=60)
        assert isinstance(end, VisionResult) and end.errors == (DROPPED,)
    assert setup.model.layers == []
    setup.close()


def interrupt() -> None:
    raise KeyboardInterrupt  # nothing that a lane takes for a request's fault


def test_the_size_of_pieces_reaches_the_model() -> None:
    """A processor alone has pieces: elsewhere launches would take longer than what they launch."""
    for gated, asynchronous, expected in ((True, False, 64), (False, False, 0), (True, True, 0)):
        setup = Setup(10, gated=gated, piece_rows=64, asynchronous=asynchronous)
        setup.run()
        assert setup.model.piece_rows == expected
        assert setup.results[0].errors[0] is None
        setup.close()
