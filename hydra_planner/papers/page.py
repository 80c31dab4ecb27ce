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

The engine puts together ideas of four papers. Here are their tables and figures again, ours beside theirs. No number of
ours was measured on a GPU: **closed form** follows from the sizes of a model and a device's datasheet; **simulated** is
a load through this engine's own router, scheduler and migration in virtual time, with step times of a roofline (shares
of a datasheet's peaks, `hydra_planner/hardware/roofline.py`). A roofline has none of the overheads of the
papers' engines, so latencies are shorter and queues come at higher rates than theirs; what can be compared is which
deployment is better, and where that changes. **On a GPU** names the command that measures it.

Every result is that of `hydra-engine reproduce NAME`, which runs in seconds on one core and repeats itself to the last
digit; `hydra-engine reproduce NAME --full` takes four times the requests and all points. Columns with the word "paper"
are the paper's numbers; where those do not add up, a sentence says so.
"""


def page_text(stored: Mapping[str, Stored]) -> str:
    """`stored` by name; what is not among it is said to be missing."""
    lines = [_HEAD]
    for paper, (number, about) in _TITLES.items():
        lines += [f"## {paper}", "", f"[arXiv {number}](https://arxiv.org/abs/{number}): {about}.", ""]
        for experiment in EXPERIMENTS:
            if experiment.paper == paper:
                found = stored.get(experiment.name)
                lines += [*_section(experiment, None if found is None else found.result), ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(experiment: Experiment, result: Result | None) -> Iterator[str]:
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
    yield from _sentences(experiment, result)


def _sentences(experiment: Experiment, result: Result | None) -> Iterator[str]:
    found = []
    if result is not None:
        found.append(_opening(result.finding))
    elif experiment.run is not None:
        found.append("No result is stored.")
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
