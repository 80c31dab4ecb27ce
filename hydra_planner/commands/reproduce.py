"""`hydra-engine reproduce NAME`: an experiment of a paper that the engine builds on, with our numbers beside the
paper's.

Uses simulated deployments and closed forms, from the sizes of models and the datasheets of devices, and starts nothing;
experiments that need a GPU are listed with the command that measures them. `--page` writes docs/papers.md anew from
stored results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hydra_engine.errors import ConfigError
from hydra_planner.commands.output import check_output

if TYPE_CHECKING:  # `--help` needs none
    from hydra_planner.papers.results import Experiment, Scale, Stored

_TREE = Path(__file__).parents[2]
_RESULTS = _TREE / "bench" / "results" / "papers"
SIMULATED = "simulated.jsonl"  # all loads, beside the results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, or `all`; without a name, lists them")
    group = parser.add_argument_group("reproduce")
    group.add_argument("--full", action="store_true", help="loads that last, three seeds, and all points of a sweep")
    group.add_argument("--output", type=Path, metavar="FILE", help="also write the result to this file, as JSON")
    group.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="store the results of NAME, and the loads behind them, in the source tree and write the page of all "
        "stored ones (needs matplotlib); loads that the same sources have simulated are not repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    from hydra_planner.papers.experiments import EXPERIMENTS, find
    from hydra_planner.papers.results import FULL, QUICK

    scale = FULL if arguments.full else QUICK
    chosen = EXPERIMENTS if arguments.names == ["all"] else tuple(find(name) for name in arguments.names)
    if arguments.page is not None:
        return _write_page(arguments.page, chosen, scale)
    if not chosen:
        sys.stdout.write("\n".join(_listed(EXPERIMENTS)) + "\n")
        return 0
    if arguments.output is not None and len(chosen) != 1:
        raise ConfigError("--output takes the result of one experiment", param="output")
    if arguments.output is not None:
        check_output(arguments.output)
    for experiment in chosen:
        stored = result_of(experiment, scale)
        sys.stdout.write("\n".join(_told(experiment, stored)) + "\n")
        if arguments.output is not None:
            if stored is None:
                raise ConfigError(f"{experiment.name} has no result here: {experiment.command}", param="output")
            arguments.output.write_bytes(encoded(stored))
    return 0


def stored_results(folder: Path = _RESULTS) -> dict[str, Stored]:
    from hydra_planner.papers.results import Stored

    found = [msgspec.json.decode(path.read_bytes(), type=Stored) for path in sorted(folder.glob("*.json"))]
    return {stored.name: stored for stored in found}


def _listed(experiments: Sequence[Experiment]) -> Iterator[str]:
    width = max(len(experiment.name) for experiment in experiments)
    for experiment in experiments:
        yield f"{experiment.name:{width}}  {experiment.how:15}  {experiment.title}"


def result_of(experiment: Experiment, scale: Scale, keys: set[str] | None = None) -> Stored | None:
    """Runs the experiment; None if it needs a GPU. `keys`: gets those of its loads."""
    from hydra_planner.papers.results import Stored
    from hydra_planner.papers.simulations import loads_text
    from hydra_planner.search.plan import COLD

    if experiment.run is None:
        return None
    scale.simulations.take_used()
    result = experiment.run(scale)
    used = scale.simulations.take_used()
    if keys is not None:
        keys.update(used)
    return Stored(experiment.name, scale.name, result, loads_text(used.values(), COLD))


def _told(experiment: Experiment, stored: Stored | None) -> Iterator[str]:
    from hydra_planner.papers.results import tables_of, text_lines

    yield f"{experiment.name}: {experiment.title} ({experiment.paper}; {experiment.how})"
    yield experiment.setting
    for title, shown in tables_of(experiment, None if stored is None else stored.result):
        yield ""
        yield f"{title}:"
        yield from text_lines(shown)
    yield ""
    if stored is not None:
        if stored.loads:
            yield f"simulated   {stored.loads}"
        yield f"found       {stored.result.finding}"
    if experiment.remark:
        yield f"the paper   {experiment.remark}"
    if experiment.command:
        yield f"to measure  {experiment.command}"


def encoded(stored: Stored) -> bytes:
    return msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n"


def _drawing() -> Callable[[Mapping[str, Stored], Path], None]:
    """Imports the drawing function. Raises ConfigError without matplotlib, before anything runs."""
    try:
        from hydra_planner.papers.pictures import draw
    except ImportError as error:
        raise ConfigError("--page needs matplotlib; install it with `pip install matplotlib`", param="page") from error
    return draw


def _write_page(page: Path, chosen: Sequence[Experiment], scale: Scale) -> int:
    if not _RESULTS.parent.is_dir():
        raise ConfigError(
            "results are stored in the source tree; run this from a clone of the repository", param="page"
        )
    if not page.parent.is_dir():
        raise ConfigError(f"--page: there is no folder {page.parent}", param="page")
    draw = _drawing()
    from hydra_planner.papers.page import PICTURES, page_text

    _RESULTS.mkdir(exist_ok=True)
    _store(chosen, scale)

    results: Mapping[str, Stored] = stored_results()
    draw(results, page.parent / PICTURES)
    page.write_text(page_text(results), encoding="utf-8")
    return 0


def _store(chosen: Sequence[Experiment], scale: Scale) -> None:
    """Stores results and the loads behind them. What ended before it was complete goes on where it was."""
    from hydra_planner.papers.experiments import EXPERIMENTS
    from hydra_planner.papers.simulations import Simulations, sources_digest

    simulations = Simulations(_RESULTS / SIMULATED, sources_digest())
    scale, keys = replace(scale, simulations=simulations), set[str]()
    for experiment in chosen:
        began_s = time.monotonic()
        sys.stderr.write(f"{experiment.name}\n")
        stored = result_of(experiment, scale, keys)
        if stored is not None:
            (_RESULTS / f"{experiment.name}.json").write_bytes(encoded(stored))
            sys.stderr.write(f"  {time.monotonic() - began_s:.0f} s\n")
    if len(chosen) == len(EXPERIMENTS):
        simulations.write(keys)
