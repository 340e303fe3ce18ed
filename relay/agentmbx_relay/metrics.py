"""Counters of the relay, kept as things happen, and the page that Prometheus scrapes.

No label holds a queue, a key, a name or an address.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from agentmbx_protocol.errors import REFUSALS, Refusal

_PREFIX: Final = "agentmbx_relay_"
_SECONDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_WORKS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_COUNTERS: Final = {
    "accepted": "Envelopes newly held.",
    "duplicate": "Deposits answered with known facts.",
    "handed_out": "Envelopes in answers to collect.",
    "acked": "Envelopes acked by their queue's owner.",
    "expired": "Envelopes whose until time passed.",
    "dropped": "Envelopes of retired queues.",
    "commit_failures": "Commits that did not happen.",
    "faults": "Requests that met a fault of the relay.",
}
_HISTOGRAMS: Final = {
    "accept_seconds": ("From a deposit's last byte to its answer.", _SECONDS),
    "commit_seconds": ("One commit, with its fsync.", _SECONDS),
    "commit_works": ("How many requests one commit served.", _WORKS),
}
_GAUGES: Final = {
    "ready": "1 while /readyz is green.",
    "long_polls": "Collects that wait now.",
    "queues": "Queues that are not retired.",
    "envelopes": "Envelopes held now.",
    "tombstones": "Facts kept of envelopes that are not held any more.",
    "bytes": "What all queues are charged, in bytes.",
    "free_bytes": "What the disk has free, in bytes.",
}


class _Histogram:
    """How many values fell below each bound; of the event loop alone, so without a lock."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        below = list(zip(names, itertools.accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, text, buckets=below, sum_value=self._sum)


class _Counts(Collector):
    """Shows plain numbers as metrics when the page is made."""

    def __init__(self, counts: Mapping[str, int], histograms: Mapping[str, _Histogram]) -> None:
        self._counts = counts
        self._histograms = histograms

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=self._counts[name])
        for name, histogram in self._histograms.items():
            yield histogram.family(_PREFIX + name, _HISTOGRAMS[name][0])


class Metrics:
    """One registry of its own; all names begin with `agentmbx_relay_`."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # it has no types
        registry = CollectorRegistry()
        self._registry = registry
        # Counted by the event loop alone, so plain numbers do, without a lock for each.
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        registry.register(_Counts(self._counts, self._histograms))
        self._gauges = {
            name: Gauge(_PREFIX + name, text, registry=registry) for name, text in _GAUGES.items()
        }
        text = "Requests and envelopes that were refused, by code."
        self._refused = Counter(_PREFIX + "refused", text, ["code"], registry=registry)
        for code in REFUSALS:
            self._refused.labels(code)
        info = Gauge(_PREFIX + "build_info", "Always 1.", ["version"], registry=registry)
        info.labels(version).set(1)

    def deposited(self, accepted: int, duplicate: int, seconds: float) -> None:
        """Count one answered deposit."""
        self._counts["accepted"] += accepted
        self._counts["duplicate"] += duplicate
        self._histograms["accept_seconds"].observe(seconds)

    def refused(self, refusal: Refusal, count: int = 1) -> None:
        """Count a refusal by its code."""
        self._refused.labels(refusal.code).inc(count)

    def collected(self, handed_out: int) -> None:
        """Count one answered collect."""
        self._counts["handed_out"] += handed_out

    def acked(self, count: int) -> None:
        """Count acks that turned an envelope into a tombstone."""
        self._counts["acked"] += count

    def swept(self, expired: int, dropped: int) -> None:
        """Count what a sweep removed."""
        self._counts["expired"] += expired
        self._counts["dropped"] += dropped

    def committed(self, works: int, seconds: float) -> None:
        """Count one commit."""
        self._histograms["commit_works"].observe(works)
        self._histograms["commit_seconds"].observe(seconds)

    def commit_failed(self) -> None:
        """Count a commit that did not happen."""
        self._counts["commit_failures"] += 1

    def fault(self) -> None:
        """Count a request that met a fault of the relay itself."""
        self._counts["faults"] += 1

    def watch(self, *, ready: Callable[[], bool], polls: Callable[[], int]) -> None:
        """Say where two gauges are read when the page is made."""
        self._gauges["ready"].set_function(lambda: float(ready()))
        self._gauges["long_polls"].set_function(lambda: float(polls()))

    def page(self, totals: Mapping[str, int]) -> bytes:
        """The page in Prometheus's text format, with these running totals."""
        for name, value in totals.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)
