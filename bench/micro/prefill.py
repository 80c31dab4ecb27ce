"""Whole prompts: seconds of a prefill of 1 to 8 prompts of 256 to 4096 tokens, and tokens per second.

The floor is the FLOP of layers, causal attention and one row of the head per prompt at the rate of the same run's best
matrix product, part by part, or the reading of weights where that takes longer. The peer is transformers' module with
SDPA and the same weights; logits are compared first. `hydra-engine bench prefill [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse

import torch

from bench.micro.encode import numbers
from bench.micro.floors import prefill_work
from bench.micro.harness import Report, Run, agree, parse, require, timed
from bench.micro.peers import HfPeer, compiled, peer_of
from bench.micro.steps import Row
from bench.micro.subject import Subject, noise, release, run_bench

QUICK_TOKENS, FULL_TOKENS = (1024, 2048), (256, 676, 1024, 2048, 4096)
QUICK_ROWS, FULL_ROWS = (1,), (1, 4, 8)
SMALL_TOKENS = (128, 512)  # of a processor's quick run
_MOST_TOKENS = 16_384  # of one step


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", help="of a prompt, with commas")
    parser.add_argument("--rows", help="prompts at once, with commas")
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--compile", action="store_true", help="also transformers under torch.compile")


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    language = subject.spec.language
    peer = None if arguments.no_peers or subject.spec.vision is None else peer_of(report, subject)
    few = QUICK_TOKENS if subject.on_gpu else SMALL_TOKENS
    for rows in numbers(arguments.rows, report.quick, QUICK_ROWS, FULL_ROWS):
        for tokens in numbers(arguments.tokens, report.quick, few, FULL_TOKENS):
            what = f"{subject.name} prefill b={rows} S={tokens}"
            if tokens > language.max_position or rows * tokens > _MOST_TOKENS:
                report.skip(what, "longer than the model or a step takes")
                continue
            with report.case(what):
                _measure(report, subject, rows, tokens, peer, with_compiled=arguments.compile)
            release(report.device)


def _measure(
    report: Report, subject: Subject, rows: int, tokens: int, peer: HfPeer | None, *, with_compiled: bool
) -> None:
    language, what = subject.spec.language, f"{subject.name} prefill b={rows} S={tokens}"
    step = subject.language([Row(0, tokens)] * rows, subject.kv_cache(rows, tokens))
    logits = step()
    require(bool(torch.isfinite(logits).all()), what)
    runs: dict[str, Run] = {"ours": step}
    if peer is not None:
        with report.optional(f"{what} of transformers"):
            theirs = peer.prefill(step)
            agree(what, logits, theirs(), tolerance=noise(language.num_layers))
            runs["transformers"] = theirs
            if with_compiled:
                runs["compiled"] = compiled(theirs)
    seconds = timed(report.device, runs, report.effort)
    ours = seconds.pop("ours")
    report.row(
        what,
        ours,
        work=prefill_work(language, rows, tokens, subject.width, subject.matrices),
        inputs={"rows": rows, "tokens": tokens},
        peers=seconds,
        model=subject.name,
        tokens_per_s=rows * tokens / ours.median,
    )


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("prefill", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
