"""Whole prompts: seconds of a prefill of 1 to 8 prompts of 256 to 4096 tokens, and tokens per second.

The floor is the FLOP of layers, causal attention and one row of the head per prompt at the rate of the same run's best
matrix product, part by part, or the reading of weights where that takes longer; behind the last layer's attention only
one row of each prompt is counted. The peer is transformers' module with SDPA and the same weights; logits are compared
first. `--graph`: also as one graph, planned from tensors and filled up to the engine's next size as it captures such
steps. `--idle 0.5`: also with so many seconds of rest before each turn, at the burst clock, where turns without rest
come to the board's power cap. `hydra-engine bench prefill [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

from bench.micro.encode import numbers
from bench.micro.floors import prefill_work
from bench.micro.harness import Effort, Report, Run, Seconds, agree, parse, require, timed
from bench.micro.peers import HfPeer, compiled, peer_of
from bench.micro.steps import Row
from bench.micro.subject import Subject, noise, release, run_bench
from hydra_engine.worker.language.graphs import MixedSize, mixed_sizes

QUICK_TOKENS, FULL_TOKENS = (1024, 2048), (256, 676, 1024, 2048, 4096)
QUICK_ROWS, FULL_ROWS = (1,), (1, 4, 8)
SMALL_TOKENS = (128, 512)  # of a processor's quick run
_MAX_TOKENS = 16_384  # of one step
_RESTED = Effort(5, 0.0, 1.0)  # one call a turn


class Case(NamedTuple):
    rows: int
    tokens: int

    def what(self, subject: Subject) -> str:
        return f"{subject.name} prefill b={self.rows} S={self.tokens}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", help="of a prompt, with commas")
    parser.add_argument("--rows", help="prompts at once, with commas")
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--compile", action="store_true", help="also transformers under torch.compile")
    parser.add_argument("--graph", action="store_true", help="also as one graph of a GPU")
    parser.add_argument("--idle", type=float, default=0.0, metavar="SECONDS", help="also with a rest before each turn")


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    language = subject.spec.language
    peer = None if arguments.no_peers or subject.spec.vision is None else peer_of(report, subject)
    few = QUICK_TOKENS if subject.on_gpu else SMALL_TOKENS
    for rows in numbers(arguments.rows, report.quick, QUICK_ROWS, FULL_ROWS):
        for tokens in numbers(arguments.tokens, report.quick, few, FULL_TOKENS):
            case = Case(rows, tokens)
            if tokens > language.max_position or rows * tokens > _MAX_TOKENS:
                report.skip(case.what(subject), "longer than the model or a step takes")
                continue
            with report.case(case.what(subject)):
                _measure(arguments, report, subject, case, peer)
            release(report.device)


def _measure(arguments: argparse.Namespace, report: Report, subject: Subject, case: Case, peer: HfPeer | None) -> None:
    language, what = subject.spec.language, case.what(subject)
    step = subject.language([Row(0, case.tokens)] * case.rows, subject.kv_cache(*case))
    logits = step()
    require(bool(torch.isfinite(logits).all()), what)
    runs: dict[str, Run] = {"": step}
    sizes: dict[str, MixedSize] = {}
    if arguments.graph and not subject.on_gpu:
        report.skip(f"{what} graph", "this device has no graphs")
    elif arguments.graph:
        size = size_of(case)
        graph = step.mixed_graph(size, subject.served_context)
        graph.replay()
        # Products of more rows may be computed in another order.
        agree(f"{what} graph", graph.logits, logits, tolerance=noise(language.num_layers))
        runs[" graph"], sizes[" graph"] = graph.replay, size
    own = dict(runs)
    if peer is not None:
        with report.optional(f"{what} of transformers"):
            theirs = peer.prefill(step)
            agree(what, logits, theirs(), tolerance=noise(language.num_layers))
            runs["transformers"] = theirs
            if arguments.compile:
                runs["compiled"] = compiled(theirs)
    seconds = timed(report.device, runs, report.effort)
    ours = {how: seconds.pop(how) for how in own}
    for how, found in ours.items():
        _row(report, subject, case, how, found, seconds, sizes.get(how))
    if arguments.idle:
        rested = timed(report.device, own, _RESTED, idle_s=arguments.idle)
        for how, found in rested.items():
            _row(
                report,
                subject,
                case,
                f"{how}, {arguments.idle:g} s of rest",
                found,
                {"without rest": ours[how]},
                sizes.get(how),
            )


def size_of(case: Case) -> MixedSize:
    """The size of the engine's graph that takes this step; where it has none, that of just these tokens."""
    tokens = case.rows * case.tokens
    fitting = [size for size in mixed_sizes(tokens, 256) if size.tokens >= tokens and size.rows >= case.rows]
    return fitting[0] if fitting else MixedSize(tokens, max(8, case.rows))


def _row(
    report: Report,
    subject: Subject,
    case: Case,
    how: str,
    seconds: Seconds,
    peers: dict[str, Seconds],
    size: MixedSize | None,
) -> None:
    report.row(
        case.what(subject) + how,
        seconds,
        work=prefill_work(subject.spec.language, case.rows, case.tokens, subject.width, subject.matrices),
        inputs={**case._asdict(), **({} if size is None else {"graph": size})},
        peers=peers,
        model=subject.name,
        tokens_per_s=case.rows * case.tokens / seconds.median,
    )


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("prefill", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
