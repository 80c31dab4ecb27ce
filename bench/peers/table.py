"""The output of `bench.compare`: a Markdown table of the systems for each number of threads and precision, with the
processor and its instruction sets. Does not know how anything is measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_OURS = "hydra-engine"
_HEAD = (
    "system",
    "weights / products / KV cache",
    "load",
    "tokens/s",
    "TPOT ms",
    "last first token s",
    "ours/theirs",
    "ready s; MiB",
)


def features(cpuinfo: str | None = None) -> frozenset[str]:
    """The flags of the first processor in /proc/cpuinfo."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def processor(cpu: str, flags: frozenset[str]) -> str:
    has, lacks = ([name for name in _FEATURES if (name in flags) is wanted] for wanted in (True, False))
    return f"{cpu} with {', '.join(has) or 'no vectors'}; without {', '.join(lacks) or 'nothing'}"


def sections(
    documents: Sequence[dict[str, Any]], cpu: str, flags: frozenset[str]
) -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """Yields the heading of each number of threads and precision, and the rounds of its systems; none if left out."""
    groups: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = {}
    for one in documents:
        systems = groups.setdefault((one["threads"], one["precision"]), {})
        systems.setdefault(one["system"], []).extend([one] if "left_out" not in one else [])
    for (threads, precision), systems in groups.items():
        yield f"\n{processor(cpu, flags)}; {threads} thread{'s' * (threads > 1)}, --quantization {precision}\n", systems


def table(documents: Sequence[dict[str, Any]], cpu: str, flags: frozenset[str]) -> Iterator[str]:
    """Medians of the rounds. The ratios are ours over theirs, of tokens/s (better above 1) and of TPOT (below 1)."""
    for heading, systems in sections(documents, cpu, flags):
        yield heading
        yield _line(*_HEAD)
        yield _line(*["---"] * len(_HEAD))
        for kind in ("text", "pictures"):
            for name, rounds in systems.items():
                yield from _at_once(name, kind, rounds, systems.get(_OURS, []) if name != _OURS else [])
        for name, rounds in systems.items():
            yield from _beside(name, rounds) if rounds else [_line(name, "left out", *[""] * 6)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _at_once(name: str, kind: str, rounds: list[dict[str, Any]], ours: list[dict[str, Any]]) -> Iterator[str]:
    if not rounds or not rounds[0][kind]:
        return
    levels = " / ".join(str(entry["concurrency"]) for entry in rounds[0][kind])
    rates, tpots, lasts = (_medians(rounds, kind, key) for key in ("tokens_per_s", "tpot_median_ms", "ttft_max_s"))
    ratios = ""
    if ours:
        our_rates, our_tpots = (_medians(ours, kind, key) for key in ("tokens_per_s", "tpot_median_ms"))
        ratios = f"{_ratios(our_rates, rates)}; {_ratios(our_tpots, tpots)}"
    load = f"{levels} {'texts' if kind == 'text' else 'with a picture each'}"
    yield _line(
        name,
        rounds[0]["arithmetic"],
        load,
        " / ".join(f"{rate:.1f}" for rate in rates),
        " / ".join(f"{tpot:.1f}" for tpot in tpots),
        " / ".join(f"{last:.2f}" for last in lasts),
        ratios,
        f"{_median(rounds, 'ready_s'):.1f}; {_median(rounds, 'memory_mib'):.0f}",
    )


def _medians(rounds: list[dict[str, Any]], kind: str, key: str) -> list[float]:
    return [statistics.median(one[kind][index][key] for one in rounds) for index in range(len(rounds[0][kind]))]


def _median(rounds: list[dict[str, Any]], key: str) -> float:
    return statistics.median(one[key] for one in rounds)


def _ratios(ours: list[float], theirs: list[float]) -> str:
    pairs = zip(ours, theirs, strict=True)
    return " / ".join(f"{mine / other:.2f}" if other else "unknown" for mine, other in pairs)


def _beside(name: str, rounds: list[dict[str, Any]]) -> Iterator[str]:
    if "beside" not in rounds[0]:
        return
    median, p99, longest, pictures_s = (
        statistics.median(one["beside"][key] for one in rounds)
        for key in ("gap_median_ms", "gap_p99_ms", "gap_longest_ms", "pictures_s")
    )
    gaps = f"gaps: median {median:.0f}, p99 {p99:.0f}, longest {longest:.0f} ms"
    yield _line(
        name, rounds[0]["arithmetic"], "a text beside pictures", "", gaps, f"{pictures_s:.1f} (pictures)", "", ""
    )
