"""How a metric of a running server is declared; the names are those of docs/metrics.md."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


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
        """As it stands in ``/metrics``, where a histogram's lines add ``_bucket`` and others."""
        return f"cosched:{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")
