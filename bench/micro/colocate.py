"""Encodes, or a prefill, beside decodes on one device: on two streams, and on parts of its multiprocessors.

*Beside* is the case of serving: decode steps without end while encodes follow each other without end. `gain`, the
steady-state gain, is 1 / slowdown of the decodes + 1 / slowdown of the other: how much of both is done in the time in
which one after the other would do it, 1 where nothing is gained. Slowdowns are of rates, against each alone. At most
it is `gain_best`, by floors, at the best proportion of both; `share_of_best` is 1 - 1 / gain over 1 - 1 / gain_best,
and `gain_bound` the same bound at the proportion in which both ran. A *pair*, behind these, is one encode and one
decode step that begin together: it measures how unequal they are, not what serving gains. A prefill is also measured in
one batch with the decodes, as the engine's language lane does it. Decodes are graphs where there are graphs, encodes
where they can be captured. `--priority`: of the two streams, also where an engine's have none.
`hydra-engine bench colocate [--full] [--model NAMES]`.
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
    best_gain,
    decode_work,
    encode_work,
    gain_share,
    image_work,
    overlap_s,
    prefill_work,
    serial_s,
)
from bench.micro.harness import Report, Run, agree, parse, timed
from bench.micro.side_by_side import Duo
from bench.micro.steps import Row, Step
from bench.micro.subject import PRIORITIES, Sharing, Subject, in_lane, noise, release, run_models
from hydra_engine.backend.device import Lane

QUICK_COUNTS, FULL_COUNTS = (2, 8), (2, 4, 8, 16)  # pictures of a tower of a fraction of a TFLOP
QUICK_ROWS, FULL_ROWS = (8, 64), (8, 32, 64, 128)
SMALL_ROWS, SMALL_COUNTS = (4,), (1,)
_LARGE_FLOPS = 2e12  # a picture of more is encoded alone
QUICK_SPLITS, FULL_SPLITS = (64,), (32, 64, 96)  # multiprocessors for decodes
_PROMPT = 1024
_QUICK_S, _FULL_S = 1.0, 3.0  # of both beside each other
_WHOLE = {"equal": "equal priority", "language": "language first"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", help="pictures at once, with commas")
    parser.add_argument("--rows", help="decodes, with commas")
    parser.add_argument("--context", type=int, help="tokens that each decode sees")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt beside decodes, 0: none")
    parser.add_argument("--picture", default="896x896", help="width x height of a picture")
    parser.add_argument(
        "--splits", help="of a GPU: multiprocessors for decodes of each partition, with commas; 0: none"
    )
    parser.add_argument(
        "--priority", help=f"of a GPU's streams, with commas: {', '.join(PRIORITIES)} (first); default: equal"
    )
    parser.add_argument("--seconds", type=float, help="that both run beside each other")
    parser.add_argument("--beside-only", action="store_true", help="no pairs, and no prefill in one batch with decodes")


class Mode(NamedTuple):
    name: str
    partition: int


@dataclass(frozen=True)
class Case:
    """`first` is the compute-bound work, `steps` the decodes."""

    what: str
    first: Run
    steps: dict[Mode, Run]
    first_work: list[Work]
    step_work: list[Work]
    inputs: dict[str, Any]

    @property
    def work(self) -> list[Work]:
        return [*self.first_work, *self.step_work]


def modes(subject: Subject, sharing: Sharing) -> list[Mode]:
    """The whole device, and the parts that it offers."""
    if not subject.on_gpu:
        return [Mode("two streams", 0)]
    parts = [Mode(f"{count} SMs for decodes", number) for number, count in enumerate(sharing.split, 1)]
    return [Mode(_WHOLE[sharing.priority], 0), *parts]


def sharings(arguments: argparse.Namespace) -> list[Sharing]:
    """Parts have no use for a priority: they come with the first."""
    if not arguments.device.startswith("cuda"):
        return [Sharing()]
    words = (arguments.priority or "equal").split(",")
    if unknown := [word for word in words if word not in PRIORITIES]:
        raise SystemExit(f"--priority: there are {', '.join(PRIORITIES)}, not {unknown[0]!r}")
    split = tuple(filter(None, numbers(arguments.splits, arguments.quick, QUICK_SPLITS, FULL_SPLITS)))
    first, *others = map(Sharing, words)
    return [first._replace(split=split), *others]


def measure(arguments: argparse.Namespace, report: Report, subject: Subject, sharing: Sharing) -> None:
    device = subject.backend.device
    vision, language = device.lane("vision"), device.lane("language")
    both = modes(subject, sharing)
    try:
        for case in cases(arguments, report, subject, both, vision, language):
            with report.case(case.what):
                _measure(arguments, report, subject, case, vision, language)
            del case  # the contexts of its steps leave no room for the contexts of the next
            release(report.device)
        if arguments.prompt != 0 and not arguments.beside_only and sharing == sharings(arguments)[0]:
            _one_batch(arguments, report, subject, language)
    finally:
        vision.close()
        language.close()


# ---- what is put side by side


def cases(
    arguments: argparse.Namespace, report: Report, subject: Subject, both: list[Mode], vision: Lane, language: Lane
) -> Iterator[Case]:
    context, rows = _context(arguments, subject), _rows(arguments, report, subject)
    for count in rows:
        timed: tuple[Step, dict[Mode, Run]] | None = None
        with report.case(f"{subject.name} decode B={count}"):
            timed = in_lane(language, partial(_decodes, report, subject, both, count, context)).result()
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


def _decodes(
    report: Report, subject: Subject, both: list[Mode], rows: int, context: int
) -> tuple[Step, dict[Mode, Run]]:
    """A step of decodes, and how to run it in each mode. A mode that the device cannot have is left out.

    With fewer multiprocessors contexts are cut into fewer splits, so their sums have another order and another
    rounding, which every random layer makes larger. So a graph must be close to the step launched on its own
    partition, and only as close to that of the whole device as two right results are."""
    step = subject.language([Row(context - 1)] * rows, subject.kv_cache(rows, context))
    expected, tolerance = step(), noise(subject.spec.language.num_layers)
    if not subject.on_gpu:
        return step, {both[0]: step}
    steps: dict[Mode, Run] = {}
    for mode in both:
        what = f"{subject.name} decode B={rows} at {mode.name}"
        with (
            report.optional(what) if mode.partition else nullcontext(),
            subject.backend.device.partitions.use(mode.partition),
        ):
            graph = step.graph()
            graph.replay()
            agree(what, graph.logits, step())
            agree(f"{what}, against the whole device", graph.logits, expected, tolerance=tolerance)
            steps[mode] = graph.replay
    return step, steps


def _encode(subject: Subject, count: int, picture: tuple[int, int], image: ImageWork) -> tuple[Run, str]:
    encode = subject.encode(count, picture, subject.image_cache(count * image.tokens))
    encode()
    graph = encode.graph()
    return (encode, "eager") if isinstance(graph, str) else (graph, "graph")


# ---- what is measured


def _measure(
    arguments: argparse.Namespace, report: Report, subject: Subject, case: Case, vision: Lane, language: Lane
) -> None:
    duos = {mode: _duo(subject, case, mode, vision, language) for mode in case.steps}
    _beside(arguments, report, subject, case, duos)
    if not arguments.beside_only:
        _pairs(report, subject, case, duos)


def _beside(arguments: argparse.Namespace, report: Report, subject: Subject, case: Case, duos: dict[Mode, Duo]) -> None:
    assert report.ceilings is not None
    rates, work = report.ceilings.rates, (case.first_work, case.step_work)
    turns = next(iter(duos.values())).in_turn(report.effort)
    for mode, duo in duos.items():
        found = duo.beside(arguments.seconds or (_QUICK_S if report.quick else _FULL_S))
        slowdowns = found.first_s / turns.first.median, found.step_s / turns.second.median
        gain, best = sum(1 / slowdown for slowdown in slowdowns), best_gain(*work, rates)
        counts = found.num_firsts, found.num_steps
        mix = [part.times(count) for parts, count in zip(work, counts, strict=True) for part in parts]
        # Each encode and each step reads its weights, so parts are summed one by one.
        least = sum(count * serial_s(parts, rates) for parts, count in zip(work, counts, strict=True))
        report.row(
            f"{case.what}, beside, {mode.name}",
            found.steps,
            work=case.step_work,
            inputs={**case.inputs, "firsts": counts[0], "steps": counts[1], "whole_s": found.whole_s},
            peers={"alone": turns.second},
            model=subject.name,
            gain=gain,
            gain_best=best,
            share_of_best=gain_share(1.0, 1 / gain, 1 / best),
            gain_bound=least / overlap_s(mix, rates),
            first_slowdown=slowdowns[0],
            decode_slowdown=slowdowns[1],
            alone_s={"first": turns.first._asdict(), "decode": turns.second._asdict()},
        )
        text = (
            f"steady-state gain {gain:.2f} of {best:.2f}; decodes {slowdowns[1]:.2f}x slower, other {slowdowns[0]:.2f}x"
        )
        print(f"{'':60}{text}", flush=True)


def _pairs(report: Report, subject: Subject, case: Case, duos: dict[Mode, Duo]) -> None:
    turns = next(iter(duos.values())).in_turn(report.effort)
    serial = turns.first.median + turns.second.median
    for mode, duo in duos.items():
        times = duo.together(report.effort)
        report.row(
            f"{case.what}, pair, {mode.name}",
            times.whole,
            work=case.work,
            overlap=True,
            inputs=case.inputs,
            peers={"in turn": turns.whole},
            model=subject.name,
            serial_over_pair=serial / times.whole.median,
        )


def _duo(subject: Subject, case: Case, mode: Mode, vision: Lane, language: Lane) -> Duo:
    return Duo(subject.backend.device, vision, language, case.first, case.steps[mode], mode.partition)


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
    """Work of a step that does both: layers and head read their weights once, attention is separate."""
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
        run_models("colocate", arguments, partial(measure, arguments), sharings(arguments))


if __name__ == "__main__":
    main()
