"""One step of decodes: 1 to 512 requests with 256 to 4096 tokens of context each, as one graph and launch by launch.

Every request has blocks of its own, full of random numbers. The floor is the reading of layers, head and contexts at
the read bandwidth of the same run, or the arithmetic where that takes longer, part by part. A step ends with logits;
sampling is not in it. Launch by launch ("eager"), planning the attention is. Peers have the same weights and contexts:
transformers' module with its growing cache, and a plain torch step over contiguous keys and values, as a graph where
there are graphs. Logits are compared first. `hydra-engine bench decode [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from bench.micro.encode import numbers
from bench.micro.floors import decode_work
from bench.micro.harness import Report, Run, Seconds, agree, captured, parse, require, timed
from bench.micro.peers import HfPeer, compiled, peer_of
from bench.micro.steps import Graphed, Row, Step
from bench.micro.subject import Subject, noise, release, run_bench

QUICK_ROWS, FULL_ROWS = (1, 8, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128, 192, 224, 256, 384, 512)
SMALL_ROWS = (1, 4, 16)  # of a processor
QUICK_CONTEXTS, FULL_CONTEXTS = (1024,), (1024, 4096, 256)
SMALL_CONTEXTS = (256,)
_SPARE_BYTES = 4 << 30  # of a GPU, for what a step computes


class Case(NamedTuple):
    rows: int
    context: int

    def what(self, subject: Subject, how: str) -> str:
        return f"{subject.name} decode {how} B={self.rows} KV={self.context}"


_COMPARED = tuple(Case(rows, 1024) for rows in (1, 8, 64))  # with peers, on a GPU


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", help="requests, with commas")
    parser.add_argument("--contexts", help="tokens that each request sees, with commas")
    parser.add_argument("--no-peers", action="store_true", help="without transformers and torch")
    parser.add_argument("--compile", action="store_true", help="also the plain torch step under torch.compile")


def cases(arguments: argparse.Namespace, quick: bool, subject: Subject) -> list[Case]:
    few_rows = QUICK_ROWS if subject.on_gpu else SMALL_ROWS
    many_rows = FULL_ROWS if subject.on_gpu else (*SMALL_ROWS, 32)
    contexts = (QUICK_CONTEXTS, FULL_CONTEXTS) if subject.on_gpu else (SMALL_CONTEXTS, (*SMALL_CONTEXTS, 1024))
    return [
        Case(rows, context)
        for context in numbers(arguments.contexts, quick, *contexts)
        for rows in numbers(arguments.rows, quick, few_rows, many_rows)
    ]


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    """Cases with peers come first, so that the peers' weights are gone when memory is needed for contexts."""
    with_peers = not arguments.no_peers and subject.spec.vision is not None
    chosen = cases(arguments, report.quick, subject)
    compared = [case for case in chosen if with_peers and (not subject.on_gpu or case in _COMPARED)]
    peer = peer_of(report, subject) if compared else None
    for case in compared + [case for case in chosen if case not in compared]:
        if case not in compared and peer is not None:
            peer = None
            release(report.device)
        if case.context > subject.spec.language.max_position:
            report.skip(case.what(subject, "step"), "longer than the model takes")
        elif subject.on_gpu and subject.kv_bytes(*case) + _SPARE_BYTES > subject.free_bytes:
            report.skip(case.what(subject, "step"), f"{subject.kv_bytes(*case) / 1e9:.0f} GB of KV do not fit")
        else:
            with report.case(case.what(subject, "step")):
                _measure(report, subject, case, peer, with_compiled=arguments.compile)
            release(report.device)


def _measure(report: Report, subject: Subject, case: Case, peer: HfPeer | None, *, with_compiled: bool) -> None:
    step = subject.language([Row(case.context - 1)] * case.rows, subject.kv_cache(*case))
    expected = step()
    require(bool(torch.isfinite(expected).all()), case.what(subject, "step"))
    runs: dict[str, Run] = {"eager": step}
    graph: Graphed | None = None
    if subject.on_gpu:
        graph = step.graph()
        graph.replay()
        agree(case.what(subject, "graph"), graph.logits, expected)
        runs["graph"] = graph.replay
        if not report.quick and case.context != 1024:
            del runs["eager"]
    if peer is not None and subject.on_gpu and 2 * subject.kv_bytes(*case) + _SPARE_BYTES > subject.free_bytes:
        report.skip(case.what(subject, "of peers"), "two more copies of the contexts do not fit")
    elif peer is not None:
        runs |= _peer_runs(report, subject, case, step, peer, with_compiled=with_compiled)
    seconds = timed(report.device, runs, report.effort)
    ours = {how: seconds.pop(how) for how in ("graph", "eager") if how in seconds}
    for how, value in ours.items():
        _row(report, subject, case, how, value, seconds)


def _peer_runs(
    report: Report, subject: Subject, case: Case, step: Step, peer: HfPeer, *, with_compiled: bool
) -> dict[str, Run]:
    """Those that can run."""
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


def _row(report: Report, subject: Subject, case: Case, how: str, seconds: Seconds, peers: dict[str, Seconds]) -> None:
    report.row(
        case.what(subject, how),
        seconds,
        work=decode_work(subject.spec.language, case.rows, case.context, subject.width, subject.matrices),
        inputs={**case._asdict(), "how": how},
        peers=peers,
        model=subject.name,
        tokens_per_s=case.rows / seconds.median,
    )


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("decode", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
