"""Prometheus metrics of batches: ``GET /cosched/metrics`` (docs/metrics.md).

They are read from the store at each request. Samples with a batch as a label are limited to the
open batches whose windows end first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from cosched.batch.batch_records import Batch, Status
from cosched.batch.forecast import BatchOutlook

_MAX_BATCHES = 50
_BATCH = ("batch",)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric as it is declared to Prometheus, without the prefix ``cosched:``."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """As in ``/metrics``; lines of a histogram add ``_bucket`` and others."""
        return f"cosched:{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


_TOKENS_TEXT = "Tokens of the answered lines of one batch, by kind."
_RATE_TEXT = "Measured rate of offline work: prompt tokens, and output tokens times 3."
_CALLBACKS_TEXT = "Callbacks delivered or given up, and attempts to be repeated, since the start."
_WANTED_TEXT = "Replicas needed for the chat of this server and its share of batches; sum them."
_SLACK_TEXT = "Time that the window of the batch leaves at its fair share of the rate."

METRICS = (
    _gauge("batches", "Batches in the store by status.", ("status",)),
    _gauge("batches_lines", "Lines of open batches by state.", ("state",)),
    _counter(
        "batches_finished_lines", "Lines that got a result since the start, by kind.", ("result",)
    ),
    _counter("batches_tokens", "Tokens of answered lines since the start, by kind.", ("kind",)),
    _gauge("batches_servers", "Live servers sharing this store."),
    _counter("batches_callbacks", _CALLBACKS_TEXT, ("result",)),
    _gauge("batches_callbacks_waiting", "Callbacks in the store waiting for delivery."),
    _gauge("http_loop_lag_seconds", "Longest lag of the HTTP event loop in the last minute."),
    _gauge("batches_tokens_per_second", _RATE_TEXT),
    _gauge("replicas_wanted", _WANTED_TEXT),
    _gauge("batch_lines", "Lines of one batch by state.", ("batch", "state")),
    _gauge("batch_tokens", _TOKENS_TEXT, ("batch", "kind")),
    _gauge("batch_age_seconds", "Time since the batch was created.", _BATCH),
    _gauge("batch_seconds_left", "Time until the window of the batch ends.", _BATCH),
    _gauge("batch_finish_seconds", "Time until the batch is expected to be finished.", _BATCH),
    _gauge("batch_slack_seconds", _SLACK_TEXT, _BATCH),
    _gauge("batch_miss_chance", "Probability that the batch misses its window.", _BATCH),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """now           seconds of the epoch
    num_by_status  of all batches of the store
    open           those that have not ended
    in_flight      batch -> its lines at the scheduler
    finished       since the start: answered, failed, input, output -> lines and tokens
    num_servers    live servers that share the store
    loop_lag_s     longest lag of the event loop in the last minute
    replicas_wanted  see `scaling.replicas_wanted`; None: nothing is known of chat
    callbacks      since the start: `CallbackSender.ended`; None: the server sends none
    num_callbacks_waiting  of the store
    """

    now: int
    num_by_status: Mapping[str, int]
    open: tuple[Batch, ...]
    outlooks: Mapping[str, BatchOutlook]
    in_flight: Mapping[str, int]
    finished: Mapping[str, int]
    tokens_per_s: float | None
    num_servers: int = 1
    loop_lag_s: float = 0.0
    replicas_wanted: float | None = None
    callbacks: Mapping[str, int] | None = None
    num_callbacks_waiting: int = 0


def exposition(found: Snapshot) -> bytes:
    """In Prometheus' text format."""
    # SGLang must set the folder of its files before prometheus_client is imported.
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
    yield "http_loop_lag_seconds", (), found.loop_lag_s
    if found.callbacks is not None:
        for result in ("delivered", "retried", "failed"):
            yield "batches_callbacks", (result,), found.callbacks.get(result, 0)
        yield "batches_callbacks_waiting", (), found.num_callbacks_waiting
    if found.tokens_per_s is not None:
        yield "batches_tokens_per_second", (), found.tokens_per_s
    if found.replicas_wanted is not None:
        yield "replicas_wanted", (), found.replicas_wanted
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
    running = found.in_flight.get(batch.id, 0)
    return {
        "waiting": max(batch.num_left - running, 0),
        "running": running,
        "answered": batch.completed,
        "failed": batch.failed,
    }
