"""An instance that computes nothing: the real process and channel, and a step at a set rate that gives every request
its next token.

Started by the supervisor as a real one is. The environment variable BENCH_STEP_S is the time between two steps; the
tokens come from `TEXT`, over and over.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

from hydra_engine.cluster.process import ConnectPeers, RunInstance, main
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import (
    WIRE_VERSION,
    Abort,
    Finished,
    Ready,
    Shutdown,
    Submit,
    ToFrontend,
    ToInstance,
    Tokens,
)
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.reports import InstanceSummary, Status
from hydra_engine.core.request import Request
from hydra_engine.instance.ports import Inbox, InstanceContext, Outbox
from hydra_engine.preprocess.text.tokenizer import Tokenizer, load_tokenizer
from hydra_engine.transfer.network import BlockNetwork

COMMAND = (sys.executable, "-m", "bench.frontend.instance")
STEP_VARIABLE = "BENCH_STEP_S"
TEXT = (
    "The picture shows three red circles above a small blue square. One of the circles is larger than the others, and "
    'its edge touches the frame on the left; beside it stands the word "open" in white.\n\n'
)
STATUS_S = 0.25


def spoken(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of every answer."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return (ids * -(-count // len(ids)))[:count]


def summary(name: str, context: InstanceContext) -> InstanceSummary:
    kinds = InstanceSummary.__annotations__
    values = {field: 0 for field in InstanceSummary.__struct_fields__ if kinds[field] in ("int", "float")}
    values |= dict.fromkeys(("model", "family", "device", "dtype", "backend"), "none")  # type: ignore[arg-type]
    values |= {"name": name, "role": context.role.letters, "incarnation": context.incarnation, "max_model_len": 1 << 14}  # type: ignore[dict-item]
    return InstanceSummary(**values, deterministic=True)


def status(progress: int, num_running: int) -> Status:
    required = Status.__struct_fields__[: -len(Status.__struct_defaults__)]
    values = dict.fromkeys(required, 0) | {"time_s": time.monotonic(), "progress": progress, "num_running": num_running}
    return Status(**values)


@dataclass
class Running:
    request: Request
    position: int = 0


class Scripted:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._running: dict[int, Running] = {}
        self._progress = 0
        self._reported_s = 0.0
        self.stopped = False

    def take(self, messages: list[ToInstance]) -> list[ToFrontend]:
        answers: list[ToFrontend] = []
        for message in messages:
            match message:
                case Submit(request):
                    self._running[request.id] = Running(request)
                case Abort(number):
                    if (gone := self._running.pop(number, None)) is not None:
                        answers.append(Finished(number, FinishReason.ABORT.value, gone.position))
                case Shutdown():
                    self.stopped = True
        return answers

    def step(self) -> list[ToFrontend]:
        self._progress += 1
        now, answers = time.monotonic(), list[ToFrontend]()
        ids, positions, tokens = list[int](), list[int](), list[int]()
        for number, running in self._running.items():
            ids.append(number)
            positions.append(running.position)
            tokens.append(self._tokens[running.position])
            running.position += 1
        if ids:
            answers.append(Tokens(ids, positions, tokens, now))
        for number in ids:
            if self._running[number].position >= self._running[number].request.max_new_tokens:
                ended = self._running.pop(number)
                answers.append(Finished(ended.request.id, FinishReason.LENGTH.value, ended.position))
        if now - self._reported_s >= STATUS_S:
            self._reported_s = now
            answers.append(status(self._progress, len(self._running)))
        return answers


def run_instance(
    config: EngineConfig,
    name: str,
    inbox: Inbox,
    outbox: Outbox,
    wake: threading.Event,
    *,
    context: InstanceContext,
    connect: ConnectPeers | None,  # noqa: ARG001 - it has no peers
    network: BlockNetwork | None = None,  # noqa: ARG001
) -> int:
    step_s = float(os.environ[STEP_VARIABLE])
    summarized = summary(name, context)
    scripted = Scripted(spoken(load_tokenizer(config.model_path), summarized.max_model_len))
    outbox.send([Ready(WIRE_VERSION, summarized)])
    due_s = time.monotonic()
    while not scripted.stopped:
        wake.wait(max(due_s - time.monotonic(), 0.0))
        wake.clear()
        messages = scripted.take(inbox.drain())
        if (now := time.monotonic()) >= due_s:
            messages += scripted.step()
            due_s = max(due_s + step_s, now)
        if messages:
            outbox.send(messages)
    return 0


def load() -> RunInstance:
    return run_instance


if __name__ == "__main__":
    sys.exit(main(load))
