"""Times what a step costs besides computing: planning, taking back the result, telling the frontend, lane metadata.

The real scheduler and the real loop of an instance over a worker that computes nothing: every step comes back at once
with made-up tokens. Per scenario the medians of one step in microseconds: `plan` and `take_back` (the scheduler),
`turn` (the loop's whole pass, with both of these and the messages to the frontend), `tidy` (naming of full blocks, done
while the lane computes) and `metadata` (`worker.batches`, in the lane). `exposed` is turn plus metadata:
what lies between two steps without look-ahead; with it, nothing does. `python -m bench.sched [--quick]`; the last line
of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.common import card, emit
from hydra_engine.backend.select import create_backend
from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import RequestMessage, Submit, ToFrontend, ToInstance
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import LanguageResult, VisionResult
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.instance.instance import Instance
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.worker.language.batches import sent_input, step_rows
from hydra_engine.worker.language.slot_table import SlotTable

BLOCK_SIZE = 16
PROMPT = 512
STEP_S = 0.02
TOKEN = 7


@dataclass(frozen=True)
class Scenario:
    """`running` requests decode while `waiting` more wait for a slot. `output`: how many tokens a request gives in the
    mean before a new one comes in its place, so that most steps hold whole prompts too; 0: no request ends."""

    running: int
    waiting: int = 0
    output: int = 0

    @property
    def name(self) -> str:
        how = f", {self.output} tokens each" if self.output else ""
        return f"{self.running} running, {self.waiting} waiting{how}"


SCENARIOS = (
    *(Scenario(256, waiting) for waiting in (0, 64, 512, 4096)),
    *(Scenario(256, waiting, output=128) for waiting in (0, 64)),
    *(Scenario(running) for running in (1, 64)),
)


class TimedScheduler(StageScheduler):
    """Notes how long its calls take, in seconds."""

    seconds: dict[str, float]

    def plan_language(self, now: float) -> LanguagePlan | None:
        return self._timed("plan", lambda: super(TimedScheduler, self).plan_language(now))

    def on_language(self, result: LanguageResult, now: float) -> list[RequestMessage]:
        return self._timed("take_back", lambda: super(TimedScheduler, self).on_language(result, now))

    def publish(self) -> None:
        self._timed("tidy", super().publish)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        started = perf_counter()
        found = call()
        self.seconds[name] = perf_counter() - started
        return found


class SteppedClock:
    now_s = 0.0

    def now(self) -> float:
        return self.now_s


class NothingComputed:
    """A worker whose steps are back at once, and both ends of its instance's channel."""

    pixel_bytes = 0

    def __init__(self) -> None:
        self.plan: LanguagePlan | None = None
        self.num_ended = 0
        self.incoming: list[ToInstance] = []
        self._results: list[VisionResult | LanguageResult] = []

    def finish(self, started_s: float, ended_s: float) -> None:
        assert self.plan is not None, "nothing was planned"
        tokens = np.full(self.plan.num_rows, TOKEN, dtype=np.int64)
        first = len(self.plan.decodes)
        tokens[first:] = [TOKEN if chunk.sample else -1 for chunk in self.plan.chunks]
        self._results.append(LanguageResult(self.plan.step_id, started_s, ended_s, tokens))
        self.plan = None

    def add_request(self, request: Request, pixels: Sequence[object]) -> None: ...

    def remove_request(self, request_id: RequestId) -> None:
        self.num_ended += 1

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None:
        self.plan = plan

    def poll(self) -> list[VisionResult | LanguageResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None: ...

    def drain(self) -> list[ToInstance]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, messages: Sequence[ToFrontend]) -> None: ...


class Bench:
    def __init__(self, scenario: Scenario, steps: int) -> None:
        self._scenario = scenario
        self._random = np.random.default_rng(0)
        self._max_new = scenario.output or 2 * steps + 1000
        blocks = scenario.running * -(-(PROMPT + self._max_new) // BLOCK_SIZE)
        config = SchedulerConfig(
            token_budget=2 * scenario.running + 4 * PROMPT,
            image_budget=1,
            max_num_seqs=scenario.running,
            max_queue=1 << 20,
            look_ahead=False,
        )
        kv, images = CacheManager[RequestId](blocks, BLOCK_SIZE), CacheManager[Any](1, BLOCK_SIZE)
        self._scheduler = TimedScheduler(EPD, kv, images, config, instance="bench")
        self._scheduler.seconds = {}
        self._worker = NothingComputed()
        self._clock = SteppedClock()
        self._instance = Instance(
            scheduler=self._scheduler,
            worker=self._worker,
            inbox=self._worker,
            outbox=self._worker,
            wake=threading.Event(),
            clock=self._clock,
        )
        self._backend = create_backend("cpu", torch.float32, threads=1)
        self._slot_table = SlotTable(scenario.running)
        self._added = self._replaced = 0
        self._add(scenario.running)
        self._settle()

    def _add(self, count: int) -> None:
        for _ in range(count):
            prompt = tuple(self._random.integers(10, 1000, PROMPT).tolist())
            length = self._max_new
            if self._scenario.output:  # not all at once
                length = int(self._random.integers(1, 2 * self._max_new))
            request = Request(
                id=RequestId(self._added),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                max_new_tokens=length,
                seed=0,
                arrival_s=self._clock.now(),
                eos_token_ids=(1, 2),
            )
            self._worker.incoming.append(Submit(request))
            self._added += 1

    def _settle(self) -> None:
        """Steps until as many requests run as shall, all in different places of their blocks; then adds those that
        wait."""
        self._instance.turn()
        while self._scheduler.status().num_waiting:
            self._step()
        for _ in range(max(8, self._scenario.output)):
            self._step()
        self._add(self._scenario.waiting)
        self._step()  # takes them in, which is no step's cost

    def _step(self) -> float:
        """Seconds of the turn that takes a step back and plans the next one."""
        if self._scenario.output:
            self._add(self._worker.num_ended - self._replaced)
            self._replaced = self._worker.num_ended
        now = self._clock.now()
        self._clock.now_s += STEP_S
        self._worker.finish(now, self._clock.now_s)
        started = perf_counter()
        self._instance.turn()
        return perf_counter() - started

    def run(self, steps: int) -> dict[str, float]:
        """Medians in microseconds."""
        return {name: median(values) * 1e6 for name, values in self.samples(steps).items()}

    def samples(self, steps: int) -> dict[str, list[float]]:
        """Seconds of every step."""
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(steps):
            turn = self._step()
            seconds = self._scheduler.seconds
            found["turn"].append(turn - seconds["tidy"])
            for name, value in seconds.items():
                found[name].append(value)
            found["metadata"].append(self._metadata())
            found["exposed"].append(found["turn"][-1] + found["metadata"][-1])
        return found

    def _metadata(self) -> float:
        plan = self._worker.plan
        assert plan is not None
        self._slot_table.owners[plan.decodes.seq_slots] = plan.decodes.request_ids
        started = perf_counter()
        rows = step_rows(plan, self._slot_table, BLOCK_SIZE)
        sent_input(plan, rows, self._backend.ops, self._backend.device, image_block_size=64)
        return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, fewer scenarios")
    quick: bool = parser.parse_args().quick
    torch.set_num_threads(1)
    steps = 60 if quick else 400
    columns = ("plan", "take_back", "turn", "tidy", "metadata", "exposed")
    print(f"{'us per step, median':44}" + "".join(f"{name:>10}" for name in columns))
    rows = []
    for scenario in SCENARIOS:
        if quick and scenario.waiting > 512:
            continue
        times = Bench(scenario, steps).run(steps)
        print(f"{scenario.name:44}" + "".join(f"{times[name]:10.1f}" for name in columns), flush=True)
        rows.append({"name": scenario.name, **asdict(scenario), "microseconds": times})
    emit({"bench": "sched", "card": card(), "steps": steps, "scenarios": rows})


if __name__ == "__main__":
    main()
