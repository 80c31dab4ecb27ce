"""Building blocks of the metrics page: a histogram with labels, and families that share their first labels.

Does not know what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

LABELS = ("model_name", "engine")


class Histogram:
    """A histogram: counts in buckets per value of its labels."""

    def __init__(
        self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = (), known: Iterable[str] = ()
    ) -> None:
        """`known`: values of its only label that are shown before anything is counted."""
        self.name = name
        self.help = help
        self._bounds = bounds
        self._shown = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._labels = tuple(labels)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        for values in [(value,) for value in known] if labels else [()]:
            self._begin(values)

    def _begin(self, values: tuple[str, ...]) -> None:
        self._counts[values] = [0] * len(self._shown)
        self._sums[values] = 0.0

    def observe(self, value: float, *values: str) -> None:
        """Counts `value` in the series with these label values."""
        if values not in self._counts:
            self._begin(values)
        self._counts[values][bisect_left(self._bounds, value)] += 1
        self._sums[values] += value

    def observe_all(self, seconds: Sequence[float]) -> None:
        """Counts many values at once. Only for a histogram without labels."""
        values = np.asarray(seconds, dtype=np.float64)
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._shown))
        self._counts[()] = [before + count for before, count in zip(self._counts[()], found.tolist(), strict=True)]
        self._sums[()] += float(values.sum())

    def family(self, labels: Sequence[str]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=(*LABELS, *self._labels))
        for values, counts in self._counts.items():
            buckets, total = [], 0
            for bound, count in zip(self._shown, counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric((*labels, *values), buckets=buckets, sum_value=self._sums[values])
        return family


class Families:
    """A factory of families whose series all begin with `labels`, the values of `LABELS`."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)

    def gauge(self, name: str, help: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(name, help, labels=LABELS), {(): value})

    def gauge_by(self, name: str, help: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(name, help, labels=(*LABELS, label))
        return self._filled(family, {(key,): value for key, value in values.items()})

    def info(self, name: str, help: str, facts: dict[str, str]) -> Metric:
        """A gauge that is always 1; its labels carry the facts."""
        return self._filled(GaugeMetricFamily(name, help, labels=(*LABELS, *facts)), {tuple(facts.values()): 1})

    def counter(self, name: str, help: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(name, help, labels=LABELS), {(): value})

    def counter_by(self, name: str, help: str, label: str, values: Iterable[str], counts: Counter[str]) -> Metric:
        """A counter with a series for each of `values`, counted or not."""
        family = CounterMetricFamily(name, help, labels=(*LABELS, label))
        return self._filled(family, {(value,): counts[value] for value in values})

    def counter_by_labels(
        self, name: str, help: str, labels: Sequence[str], counts: dict[tuple[str, ...], float]
    ) -> Metric:
        """A counter with a series for each key of `counts`, which has a value for each of `labels`."""
        return self._filled(CounterMetricFamily(name, help, labels=(*LABELS, *labels)), dict(sorted(counts.items())))

    def mean(self, name: str, help: str, count: int, total: float) -> Metric:
        """A histogram with one bucket, for a sum and a count without their distribution."""
        family = HistogramMetricFamily(name, help, labels=LABELS)
        family.add_metric(self.labels, buckets=[("+Inf", count)], sum_value=total)
        return family

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, series: dict[tuple[str, ...], float]) -> Metric:
        for values, value in series.items():
            family.add_metric((*self.labels, *values), value)
        return family
