"""Metrics of several processes as one: what a process tells, and the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Sample = tuple[str, list[tuple[str, str]], float]
Family = tuple[str, str, str, list[Sample]]
"""Name, description, type, samples: what messages can carry of a metric."""

COUNTED = ("counter", "histogram")
CREATED = "_created"
_OTHERS: dict[str, Callable[[float, float], float]] = {
    "canter:event_loop_lag_max_seconds": max,
    "process_start_time_seconds": min,
    "process_max_fds": min,
    "python_info": max,
}
"""Gauges that are not summed."""


def figures(registry: Collector | CollectorRegistry) -> list[Family]:
    """Everything that a process counts."""
    return [
        (family.name, family.documentation, family.type, [(s.name, sorted(s.labels.items()), float(s.value)) for s in family.samples])
        for family in registry.collect()
    ]


class Sum:
    """Figures added up. Counters of processes that have ended stay in it (`keep`), so that no sum runs backwards."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[str, str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}

    def copy(self) -> Sum:
        made = Sum()
        made._families = {name: (doc, kind, dict(values)) for name, (doc, kind, values) in self._families.items()}
        return made

    def keep(self, families: Iterable[Family]) -> None:
        """Add what a process that has ended had counted; what it measured is over."""
        self.add(family for family in families if family[2] in COUNTED)

    def add(self, families: Iterable[Family]) -> None:
        """Add what a process has told."""
        for name, doc, kind, samples in families:
            _, _, values = self._families.setdefault(name, (doc, kind, {}))
            for sample, labels, value in samples:
                key = sample, tuple((label, text) for label, text in labels)
                known = values.get(key)
                values[key] = value if known is None else self._joined(name, sample, known, value)

    def value(self, sample: str) -> float:
        """The sum of a sample over all labels."""
        return sum(value for _, _, values in self._families.values() for (name, _), value in values.items() if name == sample)

    def expose(self) -> tuple[bytes, str]:
        """(text, content type) for a scrape."""
        registry = CollectorRegistry()
        registry.register(_Fixed(self._metrics()))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _joined(self, name: str, sample: str, known: float, value: float) -> float:
        return min(known, value) if sample.endswith(CREATED) else _OTHERS.get(name, float.__add__)(known, value)

    def _metrics(self) -> Iterator[Metric]:
        for name, (doc, kind, values) in self._families.items():
            metric = Metric(name, doc, kind)
            for (sample, labels), value in values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


class _Fixed(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return self._metrics
