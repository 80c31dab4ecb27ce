"""Parts of a decode step's time on a processor: matrix products, attention, the other native ops, Python and torch
around them, the lane's work besides the model, and what lies between two steps.

The engine's own instance, scheduler and worker decode `rows` requests in one process, without a frontend. A step is
the time between the ends of two steps, and the sum of its parts: `products`, `attention` (or recurrent states) and
`other ops` are seconds inside the extension, `python` is the rest of the model's forward, `lane` what its lane does
before and after the forward (rows, sampling), `between` the instance's turn and the hand-over between both threads.
`besides` is all but products and attention. Medians of whole steps, whose replay is timed as one call; in other steps,
in turns with these, its ops are timed one by one, and what each kind took of them is its share of the replay (for more
rows than are recorded, the time itself).
`python -m bench.micro.step_parts --model DIR --threads 1 [--quantization int8] [--look-ahead]`.
"""

from __future__ import annotations

import argparse
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bench.micro.encode import numbers
from bench.micro.harness import Report, Seconds, parse
from bench.micro.subject import directory_of
from hydra_engine import _C
from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import DEMO_MODEL, CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import Finished, Submit, ToFrontend, ToInstance
from hydra_engine.core.request import Request
from hydra_engine.core.results import LanguageResult
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.instance.compute_stack import ComputeStack, build_worker
from hydra_engine.instance.instance import Instance
from hydra_engine.scheduler.scheduler import StageScheduler

KINDS = {
    "linear": "products",
    "linear_quantized": "products",
    "experts": "products",
    "attention_paged": "attention",
    "causal_conv": "attention",
    "delta_rule": "attention",
    "route": "other ops",
    "rms_norm": "other ops",
    "add_rms_norm": "other ops",
    "act_and_mul": "other ops",
    "gated_rms_norm": "other ops",
    "sigmoid_mul": "other ops",
    "copy_columns": "other ops",
    "copy_rows": "other ops",
    "widen": "other ops",
    "rope_and_write": "other ops",
}
NATIVE = ("products", "attention", "other ops")
PARTS = (*NATIVE, "python", "lane", "between")
_REPLAY = _C.Recording.replay
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95, top_k=50, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, ignore_eos=True),
}
_MAX_STEPS = 700  # of a run
_TURN = 10  # steps that are timed alike, one after another
_BLOCK = 16


class NativeOps:
    """Seconds in the extension since they were cleared: of whole replays, or by kind while ops are `timed`. Then calls
    that are replayed from a recording are made one by one, which takes a tenth of a millisecond more a step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._order: list[str] = []  # kinds of the calls of the recording
        _C.Recording.replay = lambda recording: self._whole(recording)

    @contextmanager
    def timed(self) -> Iterator[None]:
        places = [(_C.CacheDesc if name == "rope_and_write" else _C, name) for name in KINDS]
        before = [(place, name, getattr(place, name)) for place, name in places]
        for place, name, call in before:
            setattr(place, name, self._timed(KINDS[name], call))
        before.append((_C.Recording, "replay", _C.Recording.replay))
        _C.Recording.replay = lambda recording: self._replayed(recording)
        try:
            yield
        finally:
            for place, name, call in before:
                setattr(place, name, call)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Times the block and stores the order of the calls of the one recording that it makes."""
        begin = _C.Recording.begin
        _C.Recording.begin = lambda recording: (self._order.clear(), begin(recording))
        try:
            with self.timed():
                yield
        finally:
            _C.Recording.begin = begin

    def _whole(self, recording: _C.Recording) -> None:
        started = perf_counter()
        _REPLAY(recording)
        self.seconds["replay"] += perf_counter() - started

    def _timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self._order.append(kind)
            started = perf_counter()
            found = call(*arguments)
            self.seconds[kind] += perf_counter() - started
            return found

        return timed

    def _replayed(self, recording: _C.Recording) -> None:
        assert len(self._order) >= recording.size(), "recorded before: two requests are, at the engine's start"
        for index, kind in enumerate(self._order[: recording.size()]):
            started = perf_counter()
            recording.replay_one(index)
            self.seconds[kind] += perf_counter() - started


class Frontend:
    """Stands for the channel between an instance and its frontend, and for the frontend."""

    def __init__(self) -> None:
        self.incoming: list[ToInstance] = []

    def drain(self) -> list[ToInstance]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, messages: Sequence[ToFrontend]) -> None:
        ended = [message for message in messages if isinstance(message, Finished)]
        assert not ended, ended


class Decodes:
    """`rows` requests that decode without end behind prompts of `context` tokens."""

    def __init__(
        self, stack: ComputeStack, wake: threading.Event, rows: int, context: int, sampling: SamplingParams
    ) -> None:
        self._frontend, self._wake, self._ops = Frontend(), wake, NativeOps()
        self._steps: list[dict[str, float]] = []
        self._ended_s = self._forward_s = 0.0
        forward, deliver = stack.model.forward, stack.worker.deliver

        def timed(*arguments: Any) -> torch.Tensor:
            started = perf_counter()
            logits = forward(*arguments)
            self._forward_s = perf_counter() - started
            return logits

        stack.model.forward = timed
        stack.worker.deliver = lambda result: (self._note(result), deliver(result))
        config, plan = stack.config, stack.plan
        self._scheduler = StageScheduler(
            EPD,
            CacheManager(plan.num_kv_blocks, _BLOCK),
            CacheManager(plan.num_image_blocks, config.cache.image_block_size),
            config.scheduler,
            instance="bench",
        )
        self._instance = Instance(
            scheduler=self._scheduler,
            worker=stack.worker,
            inbox=self._frontend,
            outbox=self._frontend,
            wake=wake,
            clock=stack.clock,
            look_ahead=bool(config.scheduler.look_ahead),
        )
        self._vocab_size = stack.spec.language.vocab_size
        self._add(rows, context, sampling)

    def _add(self, rows: int, context: int, sampling: SamplingParams) -> None:
        """Takes the requests in, and runs until all decode."""
        random, highest = np.random.default_rng(0), self._vocab_size
        for index in range(rows):
            request = Request(
                id=RequestId(index),
                prompt_token_ids=tuple(random.integers(0, highest, context).tolist()),
                sampling=sampling,
                max_new_tokens=_MAX_STEPS,
                seed=0,
                arrival_s=0.0,
            )
            self._frontend.incoming.append(Submit(request))
        with self._ops.recorded():
            while self._scheduler.status().num_decoding < rows:
                self._run(1)
            self._run(3)

    def _note(self, result: object) -> None:
        """Records the seconds of a step when it ends; called in the lane's thread."""
        assert isinstance(result, LanguageResult) and not result.failures, result
        lane_s, step_s = result.ended_s - result.started_s, result.ended_s - self._ended_s
        found = {"step": step_s, "between": step_s - lane_s, "lane": lane_s - self._forward_s}
        self._steps.append(found | {"forward": self._forward_s} | self._ops.seconds)
        self._ops.seconds.clear()
        self._ended_s = result.ended_s

    def _run(self, steps: int) -> dict[str, list[float]]:
        """Seconds of so many more steps, by part, but for the first."""
        self._steps.clear()
        while len(self._steps) <= steps:
            self._instance.turn()
            self._wake.wait(self._instance.wait_s())
            self._wake.clear()
        return {name: [step[name] for step in self._steps[1 : steps + 1]] for name in self._steps[1]}

    def seconds(self, turns: int) -> dict[str, list[float]]:
        """Seconds by part, `_TURN` steps a turn. Parts of `NATIVE` come from steps whose ops are timed, the others
        from plain ones."""
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(turns):
            with self._ops.timed():
                timed = self._run(_TURN)
            plain = self._run(_TURN)
            for name, seconds in (*((name, timed[name]) for name in NATIVE), *plain.items()):
                found[name] += seconds
        return found


def stack_of(arguments: argparse.Namespace, rows: int, wake: threading.Event) -> ComputeStack:
    config = EngineConfig(
        model=str(directory_of(arguments.model or DEMO_MODEL)),
        device="cpu",
        threads=arguments.threads,
        quantization=arguments.quantization,
        scheduler=SchedulerConfig(max_num_seqs=rows, look_ahead=arguments.look_ahead),
        cache=CacheConfig(block_size=_BLOCK, num_kv_blocks=rows * ((arguments.context + _MAX_STEPS) // _BLOCK + 1)),
    )
    return build_worker(config, wake, lambda *_: None)


def measure(arguments: argparse.Namespace, report: Report, sampling: str, rows: int) -> None:
    wake = threading.Event()
    with torch.inference_mode():
        stack = stack_of(arguments, rows, wake)
        try:
            decodes = Decodes(stack, wake, rows, arguments.context, SAMPLING[sampling])
            seconds = decodes.seconds(4 if report.quick else 30)
        finally:
            stack.worker.close()
    middle = {name: median(values) for name, values in seconds.items()}
    native = sum(middle[name] for name in NATIVE)
    replay = middle.get("replay", native)  # more rows than are recorded have none
    middle["python"] = middle["forward"] - replay
    middle |= {name: middle[name] * replay / native for name in NATIVE}
    besides = 1 - (middle["products"] + middle["attention"]) / sum(middle[name] for name in PARTS)
    report.row(
        f"step {arguments.quantization} B={rows} KV={arguments.context} {sampling}",
        Seconds.of(seconds["step"]),
        inputs={
            "rows": rows,
            "context": arguments.context,
            "quantization": arguments.quantization,
            "sampling": sampling,
        },
        parts_s={name: middle[name] for name in PARTS},
        besides=besides,
    )
    print("  ".join(f"{name} {middle[name] * 1e6:.0f} us" for name in PARTS), f" besides {besides:.1%}", flush=True)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", help="requests, with commas")
        parser.add_argument("--look-ahead", action=argparse.BooleanOptionalAction, help="default: as serve has it")
        parser.add_argument("--sampling", default="greedy", help=f"{', '.join(SAMPLING)}; with commas")
        parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")

    arguments = parse(__doc__, add)
    arguments.device = "cpu"
    with Report("step_parts", arguments) as report:
        for rows in numbers(arguments.rows, report.quick, (1, 8), (1, 4, 8, 16)):
            for sampling in arguments.sampling.split(","):
                with report.case(f"B={rows} {sampling}"):
                    measure(arguments, report, sampling, rows)


if __name__ == "__main__":
    main()
