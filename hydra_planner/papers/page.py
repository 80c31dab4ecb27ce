"""The page of all experiments (docs/papers.md), from stored results: equal results give an equal page.

Does not know files, but for the names of pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap

from hydra_planner.papers.experiments import EXPERIMENTS
from hydra_planner.papers.results import Experiment, Result, Stored, tables_of, text_lines

_WIDTH = 120
PICTURES = "pictures/papers"
DRAWN = (  # have a picture
    "heteroserve-f1",
    "epd-f6",
    "hydrainfer-f5",
    "hydrainfer-f6",
    "hydrainfer-f11",
    "epd-serve-f2",
    "epd-serve-f14",
    "epd-serve-f15",
)
_TITLES = {
    "HeteroServe": ("2603.12707", "encodes on cheap devices, tokens on others"),
    "EPD": ("2501.05460", "encode, prefill and decode apart, for requests with several large pictures"),
    "HydraInfer": ("2505.12658", "stages scheduled one by one, and deployments chosen by limits"),
    "EPD-Serve": ("2601.11590", "instances that share a device, on Ascend"),
}
_HEAD = """# The papers' experiments

The engine puts together ideas of four papers. Here are their tables and figures again, ours beside theirs. **Closed
form** follows from the sizes of a model and a device's datasheet; **simulated** is a load through this engine's own
router, scheduler and migration in virtual time, with step times of a roofline (shares of a datasheet's peaks,
`hydra_planner/hardware/roofline.py`). A roofline has none of the overheads of the papers' engines, so latencies are
shorter and queues come at higher rates than theirs; what can be compared is which deployment is better, and where that
changes. **On a GPU** names the command that measures it. Which of the papers' mechanisms the engine has is in
[mechanisms.md](mechanisms.md).

How a load is simulated: as long as `hydra-engine plan` has it last (a request at its limits, and 120 requests at
least), its first 30 % not judged, with three seeds, if its entry says nothing else. A cell is the median of the seeds
and, where they differ, their range in brackets. **Falls behind** names deployments whose first tokens come later and
later: their numbers would be worse in a longer load, and such a rate is not kept, whatever its attainment. A load of
which fewer than 45 % keep the limits is ended early and may name nothing, for a trend needs more of it. Every
deployment gets the limits that judge it, if no sentence says otherwise. Where ranges over seeds meet, the best one is
not told from the next, and all are named. Other engines' schedules (`hydra_planner/simulator/schedules.py`) are in
the same simulator: **prefill first** is whole prompts before decodes, **one lane** takes encodes and steps of the
decoder in turns, **batches to completion** starts nothing before the last request of a batch has ended.

`make papers` makes all results and this page anew. They repeat themselves to the last digit, and `make test-all`
repeats some. `hydra-engine reproduce NAME` takes seconds for shorter loads of one seed, and `--full` simulates those of
this page. Columns with the word "paper" are the paper's numbers; where those do not add up, a sentence says so.
"""


def page_text(stored: Mapping[str, Stored]) -> str:
    """`stored` by name; what is not among it is said to be missing."""
    lines = [_HEAD]
    for paper, (number, about) in _TITLES.items():
        lines += [f"## {paper}", "", f"[arXiv {number}](https://arxiv.org/abs/{number}): {about}.", ""]
        for experiment in EXPERIMENTS:
            if experiment.paper == paper:
                found = stored.get(experiment.name)
                lines += [*_section(experiment, found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(experiment: Experiment, stored: Stored | None) -> Iterator[str]:
    result = None if stored is None else stored.result
    yield f"### {experiment.name}: {experiment.title}"
    yield ""
    yield from _paragraph(f"{_opening(experiment.how)}. {_opening(experiment.setting)}")
    for title, shown in tables_of(experiment, result):
        yield ""
        yield f"{_opening(title)}:"
        yield ""
        yield "```text"
        yield from text_lines(shown)
        yield "```"
    if experiment.name in DRAWN and result is not None:
        yield ""
        yield f"![{experiment.title}]({PICTURES}/{experiment.name}.svg)"
    if stored is not None and stored.loads:
        yield ""
        yield from _paragraph(f"{_opening(stored.loads)}.")
    yield from _sentences(experiment, result)


def _sentences(experiment: Experiment, result: Result | None) -> Iterator[str]:
    found = []
    if result is not None:
        found.append(_opening(result.finding))
    elif experiment.run is not None:
        found.append("No result is stored.")
    if experiment.before:
        found.append(f"This page said otherwise before: {experiment.before}")
    if experiment.remark:
        found.append(f"In the paper: {experiment.remark}")
    if experiment.command:
        found.append(f"To measure: `{experiment.command}`.")
    for sentence in found:
        yield ""
        yield from _paragraph(sentence)


def _opening(text: str) -> str:
    return text[0].upper() + text[1:]


def _paragraph(text: str) -> list[str]:
    return wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
