"""Instances are killed or stopped at random moments while requests run; what becomes of them.

Every request must end: with exactly the tokens that it has when it runs alone, or with a clear error. Afterwards
nothing may be held, no process or shared memory may be left over, and no process may have more descriptors, mappings or
threads than before. With --stops some instances are stopped instead: for a moment, until they count as silent, or until
they are killed for it. Writes a tally.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from bench.common import card, emit
from bench.mixed import Mixed, Outcome, agrees, alone, mixture, submit, together
from hydra_engine import Engine
from hydra_engine.core.instances import Condition
from hydra_engine.core.outputs import Result
from hydra_engine.errors import HydraError
from tests.campaigns.restless import Footprint, RestlessEngine, footprint, growth
from tools.miniatures import make_tiny

ANSWER_S = 30.0  # a request without an answer for this long is lost
SUSPECT_S, FENCE_S = 1.0, 3.0  # with stops
STOPS_S = (0.3, 1.5, 5.0)
READY_S = 60.0  # after a kill the topology is whole again within this time, or the campaign fails
CLEAR = ("instance_lost", "request_poisoned", "not_ready", "overloaded")


@dataclass
class Tally:
    kills: int = 0
    stops: int = 0
    fenced: int = 0  # of the stopped, those that were killed for it
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    slowest_answer_s: float = 0.0  # of a request that was running at a kill, counted from the kill
    slowest_recovery_s: float = 0.0  # from a kill until the topology is whole again
    leaks: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.lost or self.leaks) and all(code in CLEAR for code in self.errors)


class Campaign:
    """`concurrency` requests are in flight all the time."""

    def __init__(self, engine: Engine, requests: list[Mixed], golden: list[Outcome], concurrency: int) -> None:
        self.tally = Tally()
        self._engine = engine
        self._requests = requests
        self._golden = golden
        self._lock = threading.Lock()
        self._next = 0
        self._over = threading.Event()
        self._killed_s = 0.0
        self._threads = [threading.Thread(target=self._drive, name=f"client-{i}") for i in range(concurrency)]

    def run(self, kills: int, rng: random.Random, *, stops: bool, targets: str = "") -> Tally:
        """`targets`: only instances whose names begin so."""
        for thread in self._threads:
            thread.start()
        try:
            for _ in tqdm(range(kills), unit="kill", disable=None):
                time.sleep(rng.uniform(0.0, 0.6))
                self._kill(rng, stops=stops, targets=targets)
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()
        return self.tally

    def _kill(self, rng: random.Random, *, stops: bool, targets: str) -> None:
        victims = [i for i in self._engine.instances() if i.pid is not None and i.name.startswith(targets)]
        victim = rng.choice(victims)
        assert victim.pid is not None
        stop = stops and rng.random() < 0.3
        self._killed_s = began = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP if stop else signal.SIGKILL)
        if stop:
            self.tally.stops += 1
            time.sleep(rng.choice(STOPS_S))
            if self._is(victim.name, victim.incarnation):
                os.kill(victim.pid, signal.SIGCONT)
            else:
                self.tally.fenced += 1
        else:
            self.tally.kills += 1
            while self._is(victim.name, victim.incarnation):
                time.sleep(0.01)
        while not self.whole():
            if time.monotonic() - began > READY_S:
                raise TimeoutError(f"{victim.name} has not come back")
            time.sleep(0.02)
        self.tally.slowest_recovery_s = max(self.tally.slowest_recovery_s, time.monotonic() - began)

    def _is(self, name: str, incarnation: int) -> bool:
        return any(i.name == name and i.incarnation == incarnation for i in self._engine.instances())

    def whole(self) -> bool:
        return all(i.condition is Condition.READY for i in self._engine.instances()) and self._engine.health()[0]

    def _drive(self) -> None:
        while not self._over.is_set():
            with self._lock:
                index = self._next % len(self._requests)
                self._next += 1
            self._one(index)

    def _one(self, index: int) -> None:
        request, began = self._requests[index], time.monotonic()
        handle = submit(self._engine, request)
        result: Result | None = None
        try:
            result = handle.result(ANSWER_S)
        except TimeoutError:
            with self._lock:
                self.tally.lost.append(f"request {index} had no answer after {ANSWER_S:.0f} s")
            handle.cancel()
            return
        except HydraError as error:
            with self._lock:
                self.tally.errors[error.code or "none"] += 1
        ended = time.monotonic()
        with self._lock:
            if began < self._killed_s:
                self.tally.slowest_answer_s = max(self.tally.slowest_answer_s, ended - max(began, self._killed_s))
            if result is None:
                return
            logprobs = tuple(round(entry.logprob, 4) for entry in result.logprobs or ())
            outcome = Outcome(result.token_ids, result.text, result.finish_reason.value, logprobs)
            if agrees(request, outcome, self._golden[index]):
                self.tally.right += 1
            else:
                self.tally.wrong.append(f"request {index}: {outcome.token_ids} for {self._golden[index].token_ids}")


def at_rest(engine: Engine, within_s: float = 10.0) -> list[str]:
    """Sentences on what is still held; empty at rest."""
    deadline = time.monotonic() + within_s
    while True:
        report = engine.ledger()
        if report.at_rest and engine.frontend.num_active == 0:
            return []
        if time.monotonic() > deadline:
            return [f"held after the last request: {report}"]
        time.sleep(0.02)


def footprints(engine: Engine) -> dict[str, Footprint]:
    """Footprints of the frontend process and of all instances, by name."""
    footprints = {i.name: footprint(i.pid) for i in engine.instances() if i.pid is not None}
    front = replace(footprint(os.getpid()), threads=0)  # its pools of bounded size fill up in their own time
    return footprints | {"front": front}


def left_over(pids: set[int]) -> list[str]:
    """Processes of ours that still live, and shared memory with a name."""
    problems = [f"process {pid} is left" for pid in pids if Path(f"/proc/{pid}").exists()]
    return problems + [f"/dev/shm/{name} is left" for name in os.listdir("/dev/shm") if "hydra" in name]


@cache
def load(model: Path) -> tuple[list[Mixed], list[Outcome]]:
    """Requests and what each of them yields when it runs alone."""
    requests = [request for request in mixture(tokens=24) if not request.gives_up]
    with Engine(model, threads=1, block_size=4, num_kv_blocks=2048) as engine:
        return requests, alone(engine, requests)


def campaign(
    model: Path,
    topology: str,
    kills: int,
    *,
    seed: int = 0,
    concurrency: int = 16,
    stops: bool = False,
    targets: str = "",
    transport: str = "auto",
) -> Tally:
    requests, golden = load(model)
    pids: set[int] = set()
    options = {"block_size": 4, "num_kv_blocks": 1024, "token_budget": 64, "threads": 1, "recovery_s": 15.0}
    options["transport"] = transport
    if stops:
        options |= {"suspect_s": SUSPECT_S, "fence_s": FENCE_S}
    with RestlessEngine(model, topology=topology, processes=True, **options) as engine:
        fight = Campaign(engine, requests, golden, concurrency)
        together(engine, requests)  # every lane and thread has run
        before = footprints(engine)
        tally = fight.run(kills, random.Random(seed), stops=stops, targets=targets)
        pids |= {i.pid for i in engine.instances() if i.pid is not None}
        tally.leaks += at_rest(engine)
        tally.leaks += growth(partial(footprints, engine), before)  # restarted instances need no more
    tally.leaks += left_over(pids)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="E+P+D,EP+D,ED+P,2EPD", help="one or several, with commas")
    parser.add_argument("--kills", type=int, default=100, help="of each topology")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stops", action="store_true", help="some are stopped for a while instead of killed")
    parser.add_argument("--transport", default="auto", help="how blocks move: auto or host")
    arguments = parser.parse_args()
    tallies: dict[str, dict[str, object]] = {}
    with TemporaryDirectory() as folder:
        make_tiny("llava", Path(folder), seed=7)
        for topology in arguments.topology.split(","):
            tally = campaign(
                Path(folder),
                topology,
                arguments.kills,
                seed=arguments.seed,
                concurrency=arguments.concurrency,
                stops=arguments.stops,
                transport=arguments.transport,
            )
            tallies[topology] = vars(tally) | {"errors": dict(tally.errors), "clean": tally.clean}
            print(f"{topology}: {tallies[topology]}", flush=True)
    emit({"bench": "kills", "kills": arguments.kills, "topologies": tallies, "card": card()})


if __name__ == "__main__":
    main()
