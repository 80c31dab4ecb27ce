"""Times a step of decodes: 1 to 512 requests with 256 to 4096 tokens of context each, as one graph and launch by
launch.

`--uneven`: also contexts that differ, one request of eight times the context among others of half of it, and lengths
that rise evenly with the same mean. `--served-width`: also the graph whose block tables have space for as many tokens
as the model takes, like an engine's: it chooses the splits of contexts from that. `--repeat 3` measures one request so
many times, with caches and graphs of their own, and `spread` of the row says how far the medians are apart.

Every request has blocks of its own, full of random numbers. The floor is the reading of layers, head and contexts at
the read bandwidth of the same run, or the arithmetic where that takes longer, part by part. A step ends with logits;
sampling is not in it. Launch by launch ("eager"), planning the attention is. Peers have the same weights and contexts:
transformers' module with its growing cache, and a plain torch step over contiguous keys and values, as a graph where
there are graphs. Logits are compared first. `hydra-engine bench decode [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.micro.encode import numbers
from bench.micro.floors import decode_work
from bench.micro.harness import Report, Run, Seconds, agree, captured, parse, require, timed
from bench.micro.peers import HfPeer, compiled, peer_of
from bench.micro.steps import Row, Step
from bench.micro.subject import Subject, noise, release, run_bench

QUICK_ROWS, FULL_ROWS = (1, 8, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 192, 224, 256, 384, 512)
SMALL_ROWS = (1, 4, 16)  # of a processor
QUICK_CONTEXTS, FULL_CONTEXTS = (1024,), (1024, 4096, 256)
SMALL_CONTEXTS = (256,)
_SPARE_BYTES = 4 << 30  # of a GPU, for what a step computes


class Case(NamedTuple):
    rows: int
    context: int
    form: str = ""  # of contexts that differ

    def what(self, subject: Subject, how: str) -> str:
        contexts = self.contexts(subject)
        seen = {"": f"{self.context}", ONE_LONG: f"{contexts[-1]} but one of {contexts[0]}"}
        context = seen.get(self.form, f"{contexts[0]} to {contexts[-1]}")
        return f"{subject.name} decode {how} B={self.rows} KV={context}"

    def contexts(self, subject: Subject) -> list[int]:
        """The context of each request, none longer than the model takes."""
        longest = subject.spec.language.max_position
        if self.form == ONE_LONG:
            found = [8 * self.context, *[self.context // 2] * (self.rows - 1)]
        elif self.form == SPREAD:
            least = self.context // 16
            step = 2 * (self.context - least) / max(1, self.rows - 1)
            found = [round(least + step * row) for row in range(self.rows)]
        else:
            return [self.context] * self.rows
        return [max(1, min(longest, context)) for context in found]

    def requests(self, subject: Subject) -> list[Row]:
        return [Row(context - 1) for context in self.contexts(subject)]


SERVED = "graph, served width"
ONE_LONG, SPREAD = "one long", "spread"
_COMPARED = tuple(Case(rows, 1024) for rows in (1, 8, 64))  # with peers, on a GPU


class Wanted(NamedTuple):
    """Measurements of each case."""

    compiled: bool
    served_width: bool
    repeat: int  # of one request


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="requests, with commas")
    parser.add_argument("--contexts", help="tokens that each request sees, with commas")
    parser.add_argument("--no-peers", action="store_true", help="without transformers and torch")
    parser.add_argument("--compile", action="store_true", help="also the plain torch step under torch.compile")
    parser.add_argument("--uneven", action="store_true", help="also contexts that differ")
    parser.add_argument("--served-width", action="store_true", help="also block tables as wide as an engine's")
    parser.add_argument("--repeat", type=int, default=1, help="measure one request so many times")


def cases(arguments: argparse.Namespace, quick: bool, subject: Subject) -> list[Case]:
    few_rows = QUICK_ROWS if subject.on_gpu else SMALL_ROWS
    many_rows = FULL_ROWS if subject.on_gpu else (*SMALL_ROWS, 32)
    contexts = (QUICK_CONTEXTS, FULL_CONTEXTS) if subject.on_gpu else (SMALL_CONTEXTS, (*SMALL_CONTEXTS, 1024))
    return [
        Case(rows, context, form)
        for context in numbers(arguments.contexts, quick, *contexts)
        for rows in numbers(arguments.rows, quick, few_rows, many_rows)
        for form in ("", *((ONE_LONG, SPREAD) if arguments.uneven and rows > 1 else ()))
    ]


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    """Cases with peers come first, so that the peers' weights are gone when memory is needed for contexts."""
    with_peers = not arguments.no_peers and subject.spec.vision is not None
    chosen = cases(arguments, report.quick, subject)
    compared = [case for case in chosen if with_peers and (not subject.on_gpu or case in _COMPARED)]
    peer = peer_of(report, subject) if compared else None
    if arguments.served_width and not subject.on_gpu:
        report.skip("block tables as wide as an engine's", "they matter to graphs, which this device has none of")
    wanted = Wanted(arguments.compile, arguments.served_width, arguments.repeat)
    for case in compared + [case for case in chosen if case not in compared]:
        if case not in compared and peer is not None:
            peer = None
            release(report.device)
        kv_bytes = subject.kv_bytes(case.requests(subject))
        if case.context > subject.spec.language.max_position:
            report.skip(case.what(subject, "step"), "longer than the model takes")
        elif subject.on_gpu and kv_bytes + _SPARE_BYTES > subject.free_bytes:
            report.skip(case.what(subject, "step"), f"{kv_bytes / 1e9:.0f} GB of KV do not fit")
        else:
            with report.case(case.what(subject, "step")):
                _measure(report, subject, case, peer, wanted)
            release(report.device)


def _measure(report: Report, subject: Subject, case: Case, peer: HfPeer | None, wanted: Wanted) -> None:
    times = []
    for _ in range(wanted.repeat if case.rows == 1 else 1):
        times.append(_timed(report, subject, case, peer, wanted))
        release(report.device)
    ours, peers = times[0]
    for how in ours:
        found = sorted((each[how] for each, _ in times), key=lambda seconds: seconds.median)
        _row(report, subject, case, how, found, peers)


def _timed(
    report: Report, subject: Subject, case: Case, peer: HfPeer | None, wanted: Wanted
) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
    """Seconds of this engine by how the step ran (graph, eager), and seconds of the peers by name."""
    rows = case.requests(subject)
    step = subject.language(rows, subject.kv_cache_of(rows))
    expected = step()
    require(bool(torch.isfinite(expected).all()), case.what(subject, "step"))
    runs: dict[str, Run] = {}
    if subject.on_gpu:
        runs["graph"] = _graph(subject, case, step, expected, 0)
        if wanted.served_width:
            runs[SERVED] = _graph(subject, case, step, expected, subject.served_context)
    if not subject.on_gpu or (not case.form and (report.quick or case.context == 1024)):
        runs["eager"] = step
    own = list(runs)
    if peer is not None and subject.on_gpu and 2 * subject.kv_bytes(rows) + _SPARE_BYTES > subject.free_bytes:
        report.skip(case.what(subject, "of peers"), "two more copies of the contexts do not fit")
    elif peer is not None:
        runs |= _peer_runs(report, subject, case, step, peer, with_compiled=wanted.compiled)
    seconds = timed(report.device, runs, report.effort)
    return {how: seconds.pop(how) for how in own}, seconds


def _graph(subject: Subject, case: Case, step: Step, expected: Tensor, table_tokens: int) -> Run:
    """Captures the step and checks its logits against `expected`; wider tables split sums in another way, so more may
    differ."""
    graph = step.graph(table_tokens)
    graph.replay()
    what = case.what(subject, f"graph, tables of {table_tokens}" if table_tokens else "graph")
    agree(what, graph.logits, expected, tolerance=noise(subject.spec.language.num_layers) if table_tokens else 0.02)
    return graph.replay


def _peer_runs(
    report: Report, subject: Subject, case: Case, step: Step, peer: HfPeer, *, with_compiled: bool
) -> dict[str, Run]:
    """Runs of the peers that can run."""
    expected, tolerance = step(), noise(subject.spec.language.num_layers)
    runs: dict[str, Run] = {}
    what = case.what(subject, "of transformers")
    with report.optional(what):
        module = peer.eager_decode(step)
        agree(what, module(), expected, tolerance=tolerance)
        runs["transformers"] = module
    what = case.what(subject, "of torch")
    with report.optional(what):
        plain = peer.static_decode(step)
        agree(what, plain(), expected, tolerance=tolerance)
        runs["torch graph" if subject.on_gpu else "torch"] = captured(report.device, plain)
        if with_compiled:
            runs["compiled"] = compiled(plain)
    return runs


def _row(
    report: Report, subject: Subject, case: Case, how: str, found: list[Seconds], peers: dict[str, Seconds]
) -> None:
    """`found`: of each repetition, ascending."""
    seconds, medians = found[len(found) // 2], [each.median for each in found]
    contexts = case.contexts(subject)
    mean, inputs = sum(contexts) / case.rows, {"rows": case.rows, "context": case.context, "how": how}
    if case.form:
        inputs |= {"contexts": [min(contexts), max(contexts)], "mean_context": mean}
    more: dict[str, Any] = {}
    if len(found) > 1:
        more = {"repeats_s": medians, "spread": medians[-1] / medians[0] - 1}
        print(f"{'':60}{len(found)} times, {more['spread']:.1%} apart", flush=True)
    served = how == SERVED
    report.row(
        case.what(subject, "graph" if served else how) + (f", tables of {subject.served_context}" if served else ""),
        seconds,
        work=decode_work(subject.spec.language, case.rows, mean, subject.width, subject.matrices),
        inputs=inputs,
        peers=peers,
        model=subject.name,
        tokens_per_s=case.rows / seconds.median,
        **more,
    )


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("decode", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
