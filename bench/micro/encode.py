"""Pictures to features: seconds of one encode of 1 to 16 pictures, whole tower and projector, into the image cache.

A row says `eager` (launch by launch) or `graph` (replayed as the engine does it, with what it plans, cuts and copies).
The floor is the tower's FLOP at the rate of the same run's best matrix product, or the reading of its weights where
that takes longer. The peer is transformers' module on the same pictures, normalised and cut beforehand, with the same
weights; features are compared first. `hydra-engine bench encode [--full] [--model NAMES]`.
"""

from __future__ import annotations

import argparse

import torch

from bench.micro.floors import ImageWork, encode_work, image_work
from bench.micro.harness import Report, Run, agree, parse, require, timed
from bench.micro.peers import HfPeer, compiled, peer_of
from bench.micro.subject import Subject, noise, run_bench

QUICK_COUNTS, FULL_COUNTS = (1, 4), (1, 2, 4, 8, 16)
_TOWER_LAYERS = 32  # of the largest towers, to bound rounding


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counts", help="pictures at once, with commas")
    parser.add_argument("--picture", default="896x896", help="width x height of a picture")
    parser.add_argument("--no-peers", action="store_true", help="without transformers")
    parser.add_argument("--compile", action="store_true", help="also transformers under torch.compile")


def picture_of(arguments: argparse.Namespace) -> tuple[int, int]:
    width, _, height = arguments.picture.partition("x")
    return int(width), int(height)


def numbers(text: str | None, quick: bool, few: tuple[int, ...], many: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of a flag, or the default of the mode."""
    if text is None:
        return few if quick else many
    return tuple(int(word) for word in text.split(","))


def measure(arguments: argparse.Namespace, report: Report, subject: Subject) -> None:
    if subject.spec.vision is None:
        report.skip(f"{subject.name} encode", "it has no tower")
        return
    picture = picture_of(arguments)
    image = image_work(subject.spec, picture, subject.width)
    peer = None if arguments.no_peers else peer_of(report, subject)
    for count in numbers(arguments.counts, report.quick, QUICK_COUNTS, FULL_COUNTS):
        with report.case(f"{subject.name} encode b={count}"):
            _measure(report, subject, count, picture, image, peer, with_compiled=arguments.compile)


def _measure(
    report: Report,
    subject: Subject,
    count: int,
    picture: tuple[int, int],
    image: ImageWork,
    peer: HfPeer | None,
    *,
    with_compiled: bool,
) -> None:
    what = f"{subject.name} encode of {count}"
    encode = subject.encode(count, picture, subject.image_cache(count * image.tokens))
    encode()
    expected = encode.features().clone()
    require(bool(torch.isfinite(expected).all()), what)
    runs: dict[str, Run] = {"eager": encode}
    graph = encode.graph()
    if not isinstance(graph, str):
        encode.cache.data.zero_()
        graph()
        agree(f"{what}, graph", encode.features(), expected)
        runs["graph"] = graph
    elif subject.on_gpu:
        report.skip(f"{subject.name} encode graph b={count}", graph)
    if peer is not None:
        with report.optional(f"{what} of transformers"):
            theirs = peer.encode(encode)
            agree(what, expected, theirs(), tolerance=noise(_TOWER_LAYERS))
            runs["transformers"] = theirs
            if with_compiled:
                runs["compiled"] = compiled(theirs)
    seconds = timed(report.device, runs, report.effort)
    for how in [how for how in ("graph", "eager") if how in seconds]:
        ours = seconds.pop(how)
        report.row(
            f"{subject.name} encode {how} b={count}",
            ours,
            work=encode_work(image, count),
            inputs={"count": count, "picture": picture, "patches": image.patches, "tokens": image.tokens},
            peers={name: value for name, value in seconds.items() if name != "eager"},
            model=subject.name,
            per_image_s=ours.median / count,
        )


def main() -> None:
    arguments = parse(__doc__, options)
    run_bench("encode", arguments, lambda report, subject: measure(arguments, report, subject))


if __name__ == "__main__":
    main()
