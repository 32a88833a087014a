"""docs/metrics.md names every key of the JSON and every metric of a server, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.batch.prometheus import METRICS as OF_BATCHES
from cosched.batch.prometheus import Kind
from cosched.engine.features.exporter import METRICS
from cosched.engine.figures import FIGURES
from cosched.lab.metrics.iterations import KvShare
from cosched.lab.metrics.slo import Attainment
from cosched.lab.metrics.stats import Distribution
from cosched.lab.metrics.summary import summarize

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
LEAVES = [set(c.__dataclass_fields__) for c in (Distribution, Attainment, KvShare)]


def keys(value, path=()):
    if not isinstance(value, dict) or set(value) in LEAVES:
        yield ".".join(path)
        return
    for key, part in value.items():
        name = "CLASS" if not path and key in ("online", "offline") else key
        yield from keys(part, (*path, name))


def test_the_list_of_keys_is_complete():
    table = DOCS.read_text().split("## Keys\n", 1)[1].split("\n## ", 1)[0]
    documented = re.findall(r"`(\w+(?:\.\w+)+|observed_until_s)`", table)
    assert len(documented) == len(set(documented))
    real = set(keys(summarize([]).to_dict()))
    assert set(documented) == real


@pytest.mark.parametrize(
    ("section", "metrics"), [("Of a running server", METRICS), ("Of batches", OF_BATCHES)]
)
def test_the_table_of_prometheus_metrics_is_complete(section, metrics):
    table = DOCS.read_text().split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|[^|]*\| `(cosched:[^`{]+)(\{[^`]*\})?`( \(histogram\))? \|", table, re.M)
    documented = {
        name: (tuple(filter(None, labels.strip("{}").split(","))), bool(histogram))
        for name, labels, histogram in rows
    }
    assert len(documented) == len(rows)
    assert documented == {
        metric.shown_name: (metric.labels, metric.kind is Kind.HISTOGRAM) for metric in metrics
    }


def test_the_table_says_where_each_figure_is_in_the_state():
    """`num_waiting_online`, `tiers.TIER.attainment.TARGET[0]`: as the paths have it."""
    table = DOCS.read_text().split("## Of a running server\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|[^|]*\| `(cosched:[^`{]+)[^|]*\|([^|]*)\|", table, re.M)
    documented = {name: re.findall("`([^`]+)`", places) for name, places in rows}
    for metric, paths, _ in FIGURES:
        if not paths:
            continue
        matched = set()
        for place in documented[metric.shown_name]:
            pattern = re.sub(r"[A-Z]+", "[^.]+", re.sub(r"\[(\d)\]", r".\1", place))
            # A dictionary is named as a whole where its keys are the label.
            here = {path for path in paths.values() if re.fullmatch(rf"{pattern}(\.\*)?", path)}
            assert here, place
            matched |= here
        assert matched == {*paths.values()}, metric.name


def test_each_help_text_stands_alone():
    """/metrics is read a line at a time: no text may refer to the one before it."""
    refers = re.compile(
        r"^(That|Of|Until|Since|What|How|Their|The same)\b"
        r"|\b(the same|of these|of them|of its|they|it is|somebody|nobody|that is)\b",
        re.IGNORECASE,
    )
    for metric in (*METRICS, *OF_BATCHES):
        assert not refers.search(metric.text), (metric.name, metric.text)


def test_the_dashboard_asks_for_what_there_is():
    dashboard = json.loads(DOCS.with_name("grafana.json").read_text())
    metrics = {metric.shown_name: metric for metric in (*METRICS, *OF_BATCHES)}
    shown = set()
    places = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert (place["x"], place["y"]) not in places and place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
        for target in panel["targets"]:
            text = target["expr"]
            assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
            for name, bucket, selector in re.findall(
                r"(cosched:\w+?)(_bucket)?\b(?:\{(.*?)\})?(?=[\[)\s]|$)", text
            ):
                assert (metrics[name].kind is Kind.HISTOGRAM) == bool(bucket), text
                labels = re.findall(r"(\w+)=", selector) + re.findall(r"\bby \((\w+)\)", text)
                labels += re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                assert set(labels) <= {*metrics[name].labels, "le"}, text
                shown.add(name)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    host = {name for name in metrics if "kv_host" in name or "kv_demoted" in name}
    host |= {name for name in metrics if "kv_transferred" in name or "kv_waited" in name}
    # What says the same as another one, or is a detail of it.
    left_out = {"e2e_seconds", "prediction_error_ratio", "policy_given_up", "pool_tokens"}
    left_out |= {"pool_sharing_ratio", "pool_expected_hit_ratio", "batches_tokens_total"}
    left_out |= {"batch_lines", "batch_tokens", "batch_age_seconds", "cancelled_total"}
    left_out |= {"shared_prefix_iterations_total", "shared_prefix_decodes_total"}
    assert set(metrics) - shown - host == {f"cosched:{name}" for name in left_out}


def test_alerts_ask_for_what_there_is():
    text = DOCS.with_name("operate.md").read_text()
    named = {name.removesuffix("_bucket") for name in re.findall(r"cosched:\w+", text)}
    assert named <= {metric.shown_name for metric in (*METRICS, *OF_BATCHES)}
