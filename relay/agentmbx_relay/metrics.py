"""Counters of the relay, kept as things happen, and the page that Prometheus scrapes.

No label holds a queue, a key, a name or an address.
"""

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from agentmbx_protocol.errors import REFUSALS, Refusal

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """One registry of its own; all names begin with `agentmbx_relay_`."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # it has no types
        registry = CollectorRegistry()
        self._registry = registry
        self._info = Gauge("agentmbx_relay_build_info", "Always 1.", ["version"], registry=registry)
        self._info.labels(version).set(1)
        self._accepted = Counter(
            "agentmbx_relay_accepted", "Envelopes newly held.", registry=registry
        )
        self._duplicate = Counter(
            "agentmbx_relay_duplicate", "Deposits answered with known facts.", registry=registry
        )
        self._refused = Counter(
            "agentmbx_relay_refused",
            "Requests and envelopes that were refused, by code.",
            ["code"],
            registry=registry,
        )
        for code in REFUSALS:
            self._refused.labels(code)
        self._handed_out = Counter(
            "agentmbx_relay_handed_out", "Envelopes in answers to collect.", registry=registry
        )
        self._acked = Counter(
            "agentmbx_relay_acked", "Envelopes acked by their queue's owner.", registry=registry
        )
        self._expired = Counter(
            "agentmbx_relay_expired", "Envelopes whose until time passed.", registry=registry
        )
        self._dropped = Counter(
            "agentmbx_relay_dropped", "Envelopes of retired queues.", registry=registry
        )
        self._accept_seconds = Histogram(
            "agentmbx_relay_accept_seconds",
            "From a deposit's last byte to its answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._commit_seconds = Histogram(
            "agentmbx_relay_commit_seconds",
            "One commit, with its fsync.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._commit_works = Histogram(
            "agentmbx_relay_commit_works",
            "How many requests one commit served.",
            buckets=_BATCH,
            registry=registry,
        )
        self._commit_failures = Counter(
            "agentmbx_relay_commit_failures", "Commits that did not happen.", registry=registry
        )
        self._faults = Counter(
            "agentmbx_relay_faults", "Requests that met a fault of the relay.", registry=registry
        )
        self._ready = Gauge("agentmbx_relay_ready", "1 while /readyz is green.", registry=registry)
        self._polls = Gauge(
            "agentmbx_relay_long_polls", "Collects that wait now.", registry=registry
        )
        self._totals = {
            name: Gauge(f"agentmbx_relay_{name}", text, registry=registry)
            for name, text in (
                ("queues", "Queues that are not retired."),
                ("envelopes", "Envelopes held now."),
                ("tombstones", "Facts kept of envelopes that are not held any more."),
                ("bytes", "What all queues are charged, in bytes."),
                ("free_bytes", "What the disk has free, in bytes."),
            )
        }

    def deposited(self, accepted: int, duplicate: int, seconds: float) -> None:
        """Count one answered deposit."""
        self._accepted.inc(accepted)
        self._duplicate.inc(duplicate)
        self._accept_seconds.observe(seconds)

    def refused(self, refusal: Refusal, count: int = 1) -> None:
        """Count a refusal by its code."""
        self._refused.labels(refusal.code).inc(count)

    def collected(self, handed_out: int) -> None:
        """Count one answered collect."""
        self._handed_out.inc(handed_out)

    def acked(self, count: int) -> None:
        """Count acks that turned an envelope into a tombstone."""
        self._acked.inc(count)

    def swept(self, expired: int, dropped: int) -> None:
        """Count what a sweep removed."""
        self._expired.inc(expired)
        self._dropped.inc(dropped)

    def committed(self, works: int, seconds: float) -> None:
        """Count one commit."""
        self._commit_works.observe(works)
        self._commit_seconds.observe(seconds)

    def commit_failed(self) -> None:
        """Count a commit that did not happen."""
        self._commit_failures.inc()

    def fault(self) -> None:
        """Count a request that met a fault of the relay itself."""
        self._faults.inc()

    def watch(self, *, ready: Callable[[], bool], polls: Callable[[], int]) -> None:
        """Say where two gauges are read when the page is made."""
        self._ready.set_function(lambda: float(ready()))
        self._polls.set_function(lambda: float(polls()))

    def page(self, totals: Mapping[str, int]) -> bytes:
        """The page in Prometheus's text format, with these running totals."""
        for name, value in totals.items():
            self._totals[name].set(value)
        return generate_latest(self._registry)
