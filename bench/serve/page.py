"""Reads figures from a server's /metrics page. Does not know which figures matter."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families


def figures(text: str) -> dict[str, float]:
    """Sample name -> value, summed over labels; parts of histograms included."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def growth(pages: Sequence[tuple[float, str]], name: str) -> float | None:
    """Growth of a counter from the first page to the last; None without such a counter or a second page."""
    if len(pages) < 2:
        return None
    first, last = figures(pages[0][1]), figures(pages[-1][1])
    return last[name] - first.get(name, 0.0) if name in last else None


def readings(pages: Sequence[tuple[float, str]], name: str) -> list[float]:
    """A gauge's values, one for each page that has it."""
    values = (figures(text).get(name) for _, text in pages)
    return [value for value in values if value is not None]
