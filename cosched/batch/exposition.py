"""What the server's batches do, as Prometheus metrics: ``GET /cosched/metrics`` (docs/metrics.md).

They are read from the store when they are asked for. Samples with a batch in a label are few: those
of the open batches that end first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cosched.batch.data import Batch, Status
from cosched.batch.forecast import Outlook
from cosched.batch.prometheus import Kind, Metric

_MAX_BATCHES = 50

_BATCH = ("batch",)

METRICS = (
    Metric("batches", Kind.GAUGE, "Batches in the store by status.", ("status",)),
    Metric("batches_lines", Kind.GAUGE, "Lines of open batches by state.", ("state",)),
    Metric(
        "batches_finished_lines",
        Kind.COUNTER,
        "Lines that got a result since the start, by kind.",
        ("result",),
    ),
    Metric(
        "batches_tokens",
        Kind.COUNTER,
        "Tokens of answered lines since the start, by kind.",
        ("kind",),
    ),
    Metric("batches_servers", Kind.GAUGE, "Live servers sharing this store."),
    Metric(
        "batches_tokens_per_second",
        Kind.GAUGE,
        "Measured rate of offline work: prompt tokens, and output tokens times 3.",
    ),
    Metric("batch_lines", Kind.GAUGE, "Lines of one batch by state.", ("batch", "state")),
    Metric(
        "batch_tokens",
        Kind.GAUGE,
        "Tokens of the answered lines of one batch, by kind.",
        ("batch", "kind"),
    ),
    Metric("batch_age_seconds", Kind.GAUGE, "Time since the batch was created.", _BATCH),
    Metric("batch_seconds_left", Kind.GAUGE, "Time until the window of the batch ends.", _BATCH),
    Metric(
        "batch_finish_seconds",
        Kind.GAUGE,
        "Time until the batch is expected to be finished.",
        _BATCH,
    ),
    Metric(
        "batch_slack_seconds",
        Kind.GAUGE,
        "Time that the window of the batch leaves at its fair share of the rate.",
        _BATCH,
    ),
    Metric(
        "batch_miss_chance", Kind.GAUGE, "Probability that the batch misses its window.", _BATCH
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """now           seconds of the epoch
    num_by_status  of all batches that the store has
    open           those that have not ended
    under_way      batch -> lines of it that are at the scheduler
    finished       since the start: answered, failed, input, output -> lines and tokens
    num_servers    that live and share the store
    """

    now: int
    num_by_status: Mapping[str, int]
    open: tuple[Batch, ...]
    outlooks: Mapping[str, Outlook]
    under_way: Mapping[str, int]
    finished: Mapping[str, int]
    tokens_per_s: float | None
    num_servers: int = 1


def exposition(found: Snapshot) -> bytes:
    """In Prometheus' text format."""
    # SGLang says where its files are before anything may import prometheus_client.
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    samples: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    for name, labels, value in _samples(found):
        samples.setdefault(name, []).append((labels, value))

    class _Collector:
        def collect(self) -> Iterable[Any]:
            for metric in METRICS:
                make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                family = make(f"cosched:{metric.name}", metric.text, labels=metric.labels)
                for labels, value in samples.get(metric.name, ()):
                    family.add_metric(labels, value)
                yield family

    registry = CollectorRegistry()
    registry.register(_Collector())
    return generate_latest(registry)


def _samples(found: Snapshot) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for status in Status:
        yield "batches", (status.value,), found.num_by_status.get(status.value, 0)
    states: dict[str, int] = {}
    for batch in found.open:
        for state, count in _lines(batch, found).items():
            states[state] = states.get(state, 0) + count
    for state in ("waiting", "running", "answered", "failed"):
        yield "batches_lines", (state,), states.get(state, 0)
    for result in ("answered", "failed"):
        yield "batches_finished_lines", (result,), found.finished.get(result, 0)
    for kind in ("input", "output"):
        yield "batches_tokens", (kind,), found.finished.get(kind, 0)
    yield "batches_servers", (), found.num_servers
    if found.tokens_per_s is not None:
        yield "batches_tokens_per_second", (), found.tokens_per_s
    for batch in sorted(found.open, key=lambda one: one.expires_at)[:_MAX_BATCHES]:
        own = (batch.id,)
        for state, count in _lines(batch, found).items():
            yield "batch_lines", (*own, state), count
        yield "batch_tokens", (*own, "input"), batch.input_tokens
        yield "batch_tokens", (*own, "output"), batch.output_tokens
        yield "batch_age_seconds", own, found.now - batch.created_at
        yield "batch_seconds_left", own, batch.expires_at - found.now
        outlook = found.outlooks.get(batch.id)
        if outlook is not None and (forecast := outlook.forecast) is not None:
            yield "batch_finish_seconds", own, forecast.finish_s
            yield "batch_slack_seconds", own, forecast.slack_s
            yield "batch_miss_chance", own, forecast.miss_chance


def _lines(batch: Batch, found: Snapshot) -> dict[str, int]:
    running = found.under_way.get(batch.id, 0)
    left = batch.total - batch.completed - batch.failed
    return {
        "waiting": max(left - running, 0),
        "running": running,
        "answered": batch.completed,
        "failed": batch.failed,
    }
