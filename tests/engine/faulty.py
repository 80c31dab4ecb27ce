"""Engines whose instances are made to fail, and a small load whose right answers are known.

Not a test. A `Rig` serves the same few requests again and again, each time under a salt that nobody had before, so that
no cache spares it a step or a migration.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.mixed import Mixed, Outcome, alone, mixture
from hydra_engine import Engine
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.outputs import Result
from hydra_engine.errors import HydraError
from hydra_engine.frontend.handle import Handle
from tests.engine.conftest import assert_at_rest
from tests.faults import set_fault

ANSWER_S = 30.0  # whoever has no answer by then has been forgotten
OPTIONS: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "token_budget": 24, "recovery_s": 20.0}
_salts = itertools.count(1)


def few_requests(count: int = 8, tokens: int = 24) -> list[Mixed]:
    return [request for request in mixture(tokens=tokens) if not request.gives_up][:count]


def right_answers(model: Path, requests: Sequence[Mixed]) -> list[Outcome]:
    with Engine(model, threads=1, block_size=4, num_kv_blocks=2048) as engine:
        return alone(engine, list(requests))


def until(condition: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {within_s} s: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class Rig:
    """An engine of several instances, and what the requests have to yield."""

    def __init__(self, engine: Engine, requests: Sequence[Mixed], golden: Sequence[Outcome]) -> None:
        self.engine = engine
        self.requests = list(requests)
        self.golden = list(golden)

    # ---- instances

    def state(self, name: str) -> InstanceState:
        return next(state for state in self.engine.instances() if state.name == name)

    def pid(self, name: str) -> int:
        pid = self.state(name).pid
        assert pid is not None, f"{name} does not run: {self.state(name)}"
        return pid

    def signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid(name), number)

    @staticmethod
    def kill(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def wake(self, name: str, pid: int) -> None:
        """Continues the process, unless the instance has been restarted: the number may be somebody else's."""
        if self.state(name).pid == pid:
            self.signal(name, signal.SIGCONT)

    def arm(self, name: str, point: str, action: str, argument: str = "") -> None:
        set_fault(self.engine.frontend, point, action, argument, instance=name)

    def died(self, name: str, before: InstanceState) -> bool:
        return self.state(name).restarts > before.restarts

    def whole(self) -> bool:
        ready = all(state.condition is Condition.READY for state in self.engine.instances())
        return ready and self.engine.health()[0]

    def settle(self) -> None:
        """Everything runs again, and nothing is held."""
        until(self.whole, "all instances ready")
        self.assert_at_rest()

    def assert_at_rest(self) -> None:
        assert_at_rest(self.engine)

    # ---- requests

    @staticmethod
    def running(handles: Sequence[tuple[int, Handle]]) -> bool:
        """True if a request has had tokens and one has not ended."""
        return any(handle._pieces for _, handle in handles) and not all(handle.done for _, handle in handles)

    def submit(self, indices: Sequence[int] | None = None, *, salt: str | None = None) -> list[tuple[int, Handle]]:
        chosen = range(len(self.requests)) if indices is None else indices
        salt = salt or f"salt-{next(_salts)}"
        return [(index, self._submit(self.requests[index], salt)) for index in chosen]

    def _submit(self, request: Mixed, salt: str) -> Handle:
        return self.engine.submit(request.prompt, request.images(64), sampling=request.sampling, cache_salt=salt)

    def answers(self, handles: Sequence[tuple[int, Handle]]) -> list[Result | HydraError]:
        return [ended(handle) for _, handle in handles]

    def differences(self, handles: Sequence[tuple[int, Handle]]) -> list[str]:
        """Differences from the outcomes of each request alone."""
        found = []
        for index, handle in handles:
            answer = ended(handle)
            if isinstance(answer, HydraError):
                found.append(f"request {index} failed: {answer.code} {answer.message}")
            elif outcome_of(answer) != self.golden[index]:
                found.append(f"request {index}: {outcome_of(answer)} instead of {self.golden[index]}")
        return found

    def serve(self) -> list[str]:
        """Serves all requests at once; returns what went wrong."""
        return self.differences(self.submit())


def ended(handle: Handle) -> Result | HydraError:
    """Raises TimeoutError when the request was forgotten. What was streamed has to be what the result says, and every
    late token has to be explained."""
    try:
        result = handle.result(ANSWER_S)
    except HydraError as error:
        return error
    pieces = list(handle)
    assert "".join(piece.text for piece in pieces) == result.text, "a piece is lost or doubled"
    assert tuple(token for piece in pieces for token in piece.token_ids) == result.token_ids
    assert sum(bool(span.blame) for span in result.timeline) == result.metrics.slo.late_gaps
    return result


def outcome_of(result: Result) -> Outcome:
    logprobs = tuple(round(entry.logprob, 4) for entry in result.logprobs or ())
    return Outcome(result.token_ids, result.text, result.finish_reason.value, logprobs)
