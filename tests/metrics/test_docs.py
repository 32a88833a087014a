"""docs/metrics.md names every key of the JSON and every metric of a server, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.exporter import METRICS, Kind
from cosched.metrics.slo import Attainment
from cosched.metrics.stats import Distribution
from cosched.metrics.summary import Comparison, KvShare, summarize

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LEAVES = [set(c.__dataclass_fields__) for c in (Distribution, Attainment, KvShare)]


def keys(value, path=()):
    if not isinstance(value, dict) or set(value) in LEAVES:
        yield ".".join(path)
        return
    for key, part in value.items():
        name = "CLASS" if not path and key in ("online", "offline") else key
        yield from keys(part, (*path, name))


def test_the_table_of_keys_is_complete():
    table = DOCS.read_text().split("## Table of keys", 1)[1].split("\n## ", 1)[0]
    documented = re.findall(r"^\|[^|]*\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    real = set(keys(summarize([]).to_dict()))
    real |= {f"comparison.{name}" for name in Comparison.__dataclass_fields__}
    assert set(documented) == real


def test_the_table_of_prometheus_metrics_is_complete():
    table = DOCS.read_text().split("## Of a running server", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|[^|]*\| `(cosched:[^`{]+)(\{[^`]*\})?`( \(histogram\))? \|", table, re.M)
    documented = {
        name: (tuple(filter(None, labels.strip("{}").split(","))), bool(histogram))
        for name, labels, histogram in rows
    }
    assert len(documented) == len(rows)
    assert documented == {
        metric.shown_name: (metric.labels, metric.kind is Kind.HISTOGRAM) for metric in METRICS
    }
