"""Encodes, or a prefill, beside decodes on one device: in turn, on two streams, and on parts of the device.

Compute-bound and memory-bound work side by side can gain at most serial floor over overlap floor. A *pair* is one
encode and one decode step, begun together; its `gain` is what both took in turn over what they took together, and
`gain_share` (eta) the achieved share of the possible gain: 1 - 1 / gain over 1 - 1 / gain_bound. *Beside* is the case
of serving: decode steps without end while encodes follow each other, with the slowdown of each. A prefill is also
measured in one batch with the decodes, as the engine's language lane does it. Decodes are graphs where there are
graphs, encodes where they can be captured. `hydra-engine bench colocate [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.micro.encode import numbers, picture_of
from bench.micro.floors import (
    ImageWork,
    Work,
    decode_work,
    encode_work,
    gain_share,
    image_work,
    overlap_s,
    prefill_work,
    serial_s,
)
from bench.micro.harness import Report, Run, agree, parse, timed
from bench.micro.side_by_side import Duo, Together
from bench.micro.subject import Row, Step, Subject, in_lane, noise, release, run_models
from hydra_engine.backend.device import Lane

QUICK_COUNTS, FULL_COUNTS = (2, 8), (2, 4, 8, 16)  # pictures of a tower of a fraction of a TFLOP
QUICK_ROWS, FULL_ROWS = (8, 64), (8, 32, 64, 128)
SMALL_ROWS, SMALL_COUNTS = (4,), (1,)
_LARGE_FLOPS = 2e12  # a picture of more is encoded alone
QUICK_SPLITS, FULL_SPLITS = (64,), (32, 64, 96)  # multiprocessors for decodes
_PROMPT = 1024
_BESIDE_S = 0.3  # of encodes, at least three


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", help="pictures at once, with commas")
    parser.add_argument("--rows", help="decodes, with commas")
    parser.add_argument("--context", type=int, help="tokens that each decode sees")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt beside decodes, 0: none")
    parser.add_argument("--picture", default="896x896", help="width x height of a picture")
    parser.add_argument(
        "--splits", help="of a GPU: multiprocessors for decodes of each partition, with commas; 0: none"
    )


class Mode(NamedTuple):
    name: str
    partition: int


@dataclass(frozen=True)
class Case:
    """`first` is the compute-bound work, `steps` the decodes by partition of the device."""

    what: str
    first: Run
    steps: dict[int, Run]
    first_work: list[Work]
    step_work: list[Work]
    inputs: dict[str, Any]

    @property
    def work(self) -> list[Work]:
        return [*self.first_work, *self.step_work]


def modes(subject: Subject) -> list[Mode]:
    """Two plain streams, and the parts that the device offers."""
    parts = subject.backend.device.partitions.count if subject.on_gpu else 1
    return [Mode("two streams", 0), *(Mode(f"partition {number}", number) for number in range(1, parts))]


def splits(arguments: argparse.Namespace) -> tuple[int, ...]:
    """As `create_backend` takes them."""
    if not arguments.device.startswith("cuda"):
        return ()
    return tuple(filter(None, numbers(arguments.splits, arguments.quick, QUICK_SPLITS, FULL_SPLITS)))


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    device = subject.backend.device
    vision, language = device.lane("vision"), device.lane("language")
    try:
        for case in cases(arguments, report, subject, vision, language):
            with report.case(case.what):
                _pairs(report, subject, case, vision, language)
                _beside(report, subject, case, vision, language)
            del case  # the contexts of its steps leave no room for those of the next
            release(report.device)
        if arguments.prompt != 0:
            _one_batch(arguments, report, subject, language)
    finally:
        vision.close()
        language.close()


# ---- what is put side by side


def cases(
    arguments: argparse.Namespace, report: Report, subject: Subject, vision: Lane, language: Lane
) -> Iterator[Case]:
    context, rows = _context(arguments, subject), _rows(arguments, report, subject)
    for count in rows:
        timed: tuple[Step, dict[int, Run]] | None = None
        with report.case(f"{subject.name} decode B={count}"):
            timed = in_lane(language, partial(_decodes, report, subject, count, context)).result()
        if timed is None:
            continue
        step, steps = timed
        decodes = decode_work(subject.spec.language, count, context, subject.width)
        inputs = {"rows": count, "context": context}
        if subject.spec.vision is not None:
            picture = picture_of(arguments)
            image = image_work(subject.spec, picture, subject.width)
            for pictures in _counts(arguments, report, subject, image):
                what = f"{subject.name} encode b={pictures} || decode B={count}"
                encode: tuple[Run, str] | None = None
                with report.case(what):
                    encode = in_lane(vision, partial(_encode, subject, pictures, picture, image)).result()
                if encode is None:
                    continue
                first, how = encode
                about = {**inputs, "pictures": pictures, "picture": picture, "encode": how}
                yield Case(what, first, steps, encode_work(image, pictures), decodes, about)
        prompt = _prompt(arguments, subject)
        if prompt:
            first = subject.language([Row(0, prompt)], subject.kv_cache(1, prompt))
            what = f"{subject.name} prefill S={prompt} || decode B={count}"
            work = prefill_work(subject.spec.language, 1, prompt, subject.width)
            yield Case(what, first, steps, work, decodes, {**inputs, "prompt": prompt})
        del timed, step, steps


def _context(arguments: argparse.Namespace, subject: Subject) -> int:
    default = 1024 if subject.on_gpu else 256
    return min(arguments.context or default, subject.spec.language.max_position)


def _prompt(arguments: argparse.Namespace, subject: Subject) -> int:
    default = _PROMPT if subject.on_gpu else 128
    lengths = default if arguments.prompt is None else arguments.prompt
    return min(lengths, subject.spec.language.max_position)


def _rows(arguments: argparse.Namespace, report: Report, subject: Subject) -> tuple[int, ...]:
    defaults = (QUICK_ROWS, FULL_ROWS) if subject.on_gpu else (SMALL_ROWS, SMALL_ROWS)
    return numbers(arguments.rows, report.quick, *defaults)


def _counts(arguments: argparse.Namespace, report: Report, subject: Subject, image: ImageWork) -> tuple[int, ...]:
    if not subject.on_gpu or image.work.flops > _LARGE_FLOPS:
        return numbers(arguments.counts, report.quick, SMALL_COUNTS, SMALL_COUNTS)
    return numbers(arguments.counts, report.quick, QUICK_COUNTS, FULL_COUNTS)


def _decodes(report: Report, subject: Subject, rows: int, context: int) -> tuple[Step, dict[int, Run]]:
    """One step, and how to run it on each partition. Where one cannot be had the others are measured all the same.

    On fewer multiprocessors contexts are cut into fewer splits, so their sums have another order and another rounding,
    which every random layer makes larger. So a graph is held closely against the step launched on its own partition,
    and against that of the whole device no closer than two right results are."""
    step = subject.language([Row(context - 1)] * rows, subject.kv_cache(rows, context))
    expected, tolerance = step(), noise(subject.spec.language.num_layers)
    if not subject.on_gpu:
        return step, {0: step}
    steps: dict[int, Run] = {}
    for mode in modes(subject):
        what = f"{subject.name} decode B={rows} at {mode.name}"
        with (
            report.optional(what) if mode.partition else nullcontext(),
            subject.backend.device.partitions.at(mode.partition),
        ):
            graph = step.graph()
            graph.replay()
            agree(what, graph.logits, step())
            agree(f"{what}, against the whole device", graph.logits, expected, tolerance=tolerance)
            steps[mode.partition] = graph.replay
    return step, steps


def _encode(subject: Subject, count: int, picture: tuple[int, int], image: ImageWork) -> tuple[Run, str]:
    encode = subject.encode(count, picture, subject.image_cache(count * image.tokens))
    encode()
    graph = encode.graph()
    return (encode, "eager") if isinstance(graph, str) else (graph, "graph")


# ---- what is measured


def _pairs(report: Report, subject: Subject, case: Case, vision: Lane, language: Lane) -> None:
    turns = _duo(subject, case, 0, vision, language).in_turn(report.effort)
    for mode in [mode for mode in modes(subject) if mode.partition in case.steps]:
        times = _duo(subject, case, mode.partition, vision, language).together(report.effort)
        gains = _gains(report, case, turns, times)
        row = report.row(
            f"{case.what}, pair, {mode.name}",
            times.whole,
            work=case.work,
            overlap=True,
            inputs=case.inputs,
            peers={"in turn": turns.whole},
            model=subject.name,
            **gains,
        )
        print(f"{'':60}gain {row['gain']:.2f} of {row['gain_bound']:.2f}, decode {row['decode_slowdown']:.2f}x")


def _gains(report: Report, case: Case, turns: Together, found: Together) -> dict[str, Any]:
    assert report.ceilings is not None
    rates, serial = report.ceilings.rates, turns.first.median + turns.second.median
    bound = serial_s(case.work, rates) / overlap_s(case.work, rates)
    return {
        "gain": serial / found.whole.median,
        "gain_bound": bound,
        "gain_share": gain_share(serial, found.whole.median, serial / bound),
        "gain_share_to_floor": gain_share(serial, found.whole.median, overlap_s(case.work, rates)),
        "decode_slowdown": found.second.median / turns.second.median,
        "first_slowdown": found.first.median / turns.first.median,
        "alone_s": {"first": turns.first._asdict(), "decode": turns.second._asdict()},
    }


def _beside(report: Report, subject: Subject, case: Case, vision: Lane, language: Lane) -> None:
    assert report.ceilings is not None
    turns = _duo(subject, case, 0, vision, language).in_turn(report.effort)
    count = max(3, int(_BESIDE_S / turns.first.median))
    for mode in [mode for mode in modes(subject) if mode.partition in case.steps]:
        found = _duo(subject, case, mode.partition, vision, language).beside(count)
        serial = count * turns.first.median + found.num_steps * turns.second.median
        mix = [part.times(count) for part in case.first_work] + [part.times(found.num_steps) for part in case.step_work]
        # Each encode and each step reads its weights, so parts are summed one by one.
        rates = report.ceilings.rates
        least = count * serial_s(case.first_work, rates) + found.num_steps * serial_s(case.step_work, rates)
        bound = least / overlap_s(mix, rates)
        report.row(
            f"{case.what}, beside, {mode.name}",
            found.steps,
            work=case.step_work,
            inputs={**case.inputs, "firsts": found.num_firsts, "steps": found.num_steps, "whole_s": found.whole_s},
            peers={"alone": turns.second},
            model=subject.name,
            gain=serial / found.whole_s,
            gain_bound=bound,
            gain_share=gain_share(serial, found.whole_s, serial / bound),
            decode_slowdown=found.steps.median / turns.second.median,
            first_slowdown=found.whole_s / count / turns.first.median,
        )


def _duo(subject: Subject, case: Case, partition: int, vision: Lane, language: Lane) -> Duo:
    return Duo(subject.backend.device, vision, language, case.first, case.steps[partition], partition)


def _one_batch(arguments: argparse.Namespace, report: Report, subject: Subject, language: Lane) -> None:
    """A prompt and decodes in one step."""
    prompt, context = _prompt(arguments, subject), _context(arguments, subject)
    spec, width = subject.spec.language, subject.width
    for rows in _rows(arguments, report, subject):
        mixed = [Row(context - 1)] * rows + [Row(0, prompt)]
        longest = max(context, prompt)

        def run(rows: int = rows, mixed: list[Row] = mixed, longest: int = longest) -> None:
            cache = subject.kv_cache(rows + 1, longest)
            runs: dict[str, Run] = {
                "mixed": subject.language(mixed, cache),
                "prefill": subject.language(mixed[rows:], cache),
                "decode": subject.language(mixed[:rows], cache),
            }
            seconds = timed(report.device, runs, report.effort)
            decodes, prompts = decode_work(spec, rows, context, width), prefill_work(spec, 1, prompt, width)
            report.row(
                f"{subject.name} prefill S={prompt} with decode B={rows}, one batch",
                seconds["mixed"],
                work=_merged(prompts, decodes),
                inputs={"rows": rows, "context": context, "prompt": prompt},
                peers={"prefill": seconds["prefill"], "decode": seconds["decode"]},
                model=subject.name,
                gain=(seconds["prefill"].median + seconds["decode"].median) / seconds["mixed"].median,
            )

        with report.case(f"{subject.name} prefill S={prompt} with decode B={rows}, one batch"):
            in_lane(language, run).result()


def _merged(prefill: list[Work], decode: list[Work]) -> list[Work]:
    """Of one step: layers and head read their weights once, attention is each one's own."""
    layers, attention, head = prefill
    others = {part.name: part for part in decode}
    return [
        Work("layers", layers.flops + others["layers"].flops, layers.read_bytes),
        Work("head", head.flops + others["head"].flops, head.read_bytes),
        attention,
        others["attention"]._replace(name="attention of decodes"),
    ]


def main() -> None:
    arguments = parse(__doc__, options)
    with torch.inference_mode():
        run_models(
            "colocate", arguments, lambda report, subject: measure(arguments, report, subject), splits(arguments)
        )


if __name__ == "__main__":
    main()
