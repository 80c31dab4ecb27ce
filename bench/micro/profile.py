"""Kernels that a stage runs: name, launches, microseconds and share of a decode step, a prefill and one encode.

Decodes are graph replays and encodes the engine's own graphs where there are graphs. Each stage is timed first and then
run under torch.profiler, so `seconds` has nothing of the profiler in it; kernel times have a little. Per call a row has
`launches`, `kernels_s` (their sum, more than `seconds` where they overlap), the gaps between one kernel's end and the
next one's start, and `kernels`, longest first. On a processor kernels are torch's operations and their times are
without those that they call. `hydra-engine bench profile [--model NAMES]`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.micro.encode import numbers, picture_of
from bench.micro.floors import Work, decode_work, encode_work, image_work, prefill_work
from bench.micro.harness import Report, Run, parse, timed
from bench.micro.steps import Row
from bench.micro.subject import Subject, release, run_bench

ROWS, SMALL_ROWS = (1, 8, 64), (1, 4)  # decodes; of a processor
_CONTEXT, _SMALL_CONTEXT = 1024, 256
_PROMPT, _SMALL_PROMPT = 1024, 128
_CALLS, _SMALL_CALLS = 5, 2  # under the profiler
_NAME_LENGTH, _MAX_KERNELS, _SHOWN = 160, 60, 20


class Launch(NamedTuple):
    """A kernel, copy or fill on the device, or an operation of a processor."""

    name: str
    start_us: float
    us: float


class Stage(NamedTuple):
    what: str
    run: Run
    work: list[Work]
    inputs: dict[str, Any]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="decodes, with commas")
    parser.add_argument("--context", type=int, help="tokens that each decode sees")
    parser.add_argument("--prompt", type=int, help="tokens of the prefill, 0: none")
    parser.add_argument("--picture", default="896x896", help="width x height of a picture")


def prepare(device: torch.device) -> None:
    """Sets the profiler up, which belongs into the main thread and before graphs are captured: kernels of graphs that
    are older than it may not be seen."""
    launches_of(lambda: torch.ones(1, device=device).add_(1), device, 1)


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    for what, make in stages(arguments, subject):
        with report.case(what):
            _measure(report, subject, make())
        release(report.device)


def stages(arguments: argparse.Namespace, subject: Subject) -> Iterator[tuple[str, Any]]:
    """Names, and what makes them: caches and graphs exist one stage at a time."""
    on_gpu, most = subject.on_gpu, subject.spec.language.max_position
    context = min(arguments.context or (_CONTEXT if on_gpu else _SMALL_CONTEXT), most)
    default = _PROMPT if on_gpu else _SMALL_PROMPT
    prompt = min(default if arguments.prompt is None else arguments.prompt, most)
    few = ROWS if on_gpu else SMALL_ROWS
    for rows in numbers(arguments.rows, True, few, few):
        what = f"{subject.name} decode B={rows} KV={context}"
        yield what, lambda what=what, rows=rows: _decode(subject, what, rows, context)
    if prompt:
        what = f"{subject.name} prefill S={prompt}"
        yield what, lambda what=what: _prefill(subject, what, prompt)
    if subject.spec.vision is not None:
        what = f"{subject.name} encode b=1"
        yield what, lambda what=what: _encode(subject, what, picture_of(arguments))


def _decode(subject: Subject, what: str, rows: int, context: int) -> Stage:
    step = subject.language([Row(context - 1)] * rows, subject.kv_cache(rows, context))
    step()
    run = step.graph().replay if subject.on_gpu else step
    work = decode_work(subject.spec.language, rows, context, subject.width, subject.matrices)
    return Stage(what, run, work, {"rows": rows, "context": context, "how": _how(graph=subject.on_gpu)})


def _prefill(subject: Subject, what: str, prompt: int) -> Stage:
    step = subject.language([Row(0, prompt)], subject.kv_cache(1, prompt))
    work = prefill_work(subject.spec.language, 1, prompt, subject.width, subject.matrices)
    return Stage(what, step, work, {"tokens": prompt, "how": _how(graph=False)})


def _encode(subject: Subject, what: str, picture: tuple[int, int]) -> Stage:
    image = image_work(subject.spec, picture, subject.width)
    encode = subject.encode(1, picture, subject.image_cache(image.tokens))
    encode()
    graph = encode.graph()
    run: Run = encode if isinstance(graph, str) else graph
    inputs = {"picture": picture, "patches": image.patches, "how": _how(graph=not isinstance(graph, str))}
    return Stage(what, run, encode_work(image, 1), inputs)


def _how(*, graph: bool) -> str:
    return "graph" if graph else "eager"


def _measure(report: Report, subject: Subject, stage: Stage) -> None:
    seconds = timed(report.device, {"ours": stage.run}, report.effort)["ours"]
    calls = _CALLS if subject.on_gpu else _SMALL_CALLS
    launches = launches_of(stage.run, report.device, calls)
    if not launches:
        report.skip(f"{stage.what}, kernels", "the profiler saw none: no access to the device's activity")
    kernels = kernels_of(launches, calls)
    report.row(
        stage.what,
        seconds,
        work=stage.work,
        inputs=stage.inputs | {"calls": calls},
        model=subject.name,
        launches=len(launches) / calls,
        kernels_s=sum(launch.us for launch in launches) / calls / 1e6,
        gap_us=gaps_of(launches),
        kernels=kernels[:_MAX_KERNELS],
    )
    for kernel in kernels[:_SHOWN]:
        print(f"  {kernel['count']:7.1f} x {kernel['us']:10.1f} us  {kernel['share']:6.1%}  {kernel['name'][:90]}")


# ---- what the profiler saw


def launches_of(run: Run, device: torch.device, calls: int) -> list[Launch]:
    """Launches of `calls` calls in the order of their starts."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            run()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.events() or () if event.device_type == kind]
    found = [
        Launch(
            event.name,
            event.time_range.start,
            event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total,
        )
        for event in events
    ]
    return sorted(found, key=lambda launch: launch.start_us)


def kernels_of(launches: Iterable[Launch], calls: int) -> list[dict[str, Any]]:
    """Kernels by name, longest first: launches and microseconds of one call, and their share of all microseconds."""
    totals: dict[str, list[float]] = {}
    for launch in launches:
        entry = totals.setdefault(launch.name[:_NAME_LENGTH], [0, 0.0])
        entry[0] += 1
        entry[1] += launch.us
    everything = sum(us for _, us in totals.values()) or 1.0
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        {"name": name, "count": count / calls, "us": us / calls, "share": us / everything}
        for name, (count, us) in ordered
    ]


def gaps_of(launches: Sequence[Launch]) -> dict[str, float]:
    """Microseconds from the end of a kernel to the start of the next one; below zero where they overlap."""
    pairs = itertools.pairwise(launches)
    gaps = sorted(after.start_us - before.start_us - before.us for before, after in pairs)
    if not gaps:
        return {}
    return {"median": median(gaps), "p95": gaps[round(0.95 * (len(gaps) - 1))]}


def main() -> None:
    arguments = parse(__doc__, options)
    prepare(torch.device(arguments.device))
    run_bench("profile", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
