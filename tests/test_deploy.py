"""The files of deploy/: by the schemas of the programs that read them; flags, metrics, alerts."""

from __future__ import annotations

import importlib.resources
import json
import re
import shlex

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml

from cosched.batch.prometheus import METRICS as OF_BATCHES
from cosched.batch.prometheus import Kind
from cosched.cli import new_app
from cosched.config import ENV_VAR
from cosched.engine.arguments import check_flags
from cosched.engine.features.exporter import METRICS
from cosched.engine.options import ServerFlags, config_from
from tests.serving import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


def load(name):
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_kubernetes_takes_the_manifests(manifest):
    for version in ("1.30", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_takes_its_files(name):
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(load(name))


def container(name):
    [found] = (
        one["spec"]["template"]["spec"]["containers"][0]
        for one in MANIFESTS
        if one["kind"] in ("StatefulSet", "Deployment") and one["metadata"]["name"] == name
    )
    return found


def in_systemd():
    unit = (DEPLOY / "cosched.service").read_text().replace("\\\n", " ")
    return shlex.split(re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.M)[1])


SERVERS = {
    "compose": load("compose.yaml")["services"]["replica-1"]["command"],
    "kubernetes": container("cosched")["args"],
    "systemd": in_systemd(),
}


@pytest.mark.parametrize("where", SERVERS)
def test_a_server_knows_its_flags(where, monkeypatch):
    configs = [one["data"]["config.json"] for one in MANIFESTS if one["kind"] == "ConfigMap"]
    monkeypatch.setenv(ENV_VAR, configs[0] if where == "kubernetes" else "{}")
    command = new_app("server")
    command.default(ServerFlags)
    _, bound, _ = command.parse_args(SERVERS[where])
    [flags] = bound.args
    config = config_from(bound.kwargs["options"])
    assert config.batches.folder and config.drain_s == 30
    check_flags(flags, own=())
    graces = {
        "compose": load("compose.yaml")["services"]["replica-1"]["stop_grace_period"],
        "systemd": re.search(r"TimeoutStopSec=(.*)", (DEPLOY / "cosched.service").read_text())[1],
    }
    assert graces.get(where, "55").rstrip("s") == "55"


def test_the_key_of_the_operator_is_no_flag():
    """Each user of a machine sees flags."""
    assert not [flag for flags in SERVERS.values() for flag in flags if "api-key" in flag]
    environments = [
        load("compose.yaml")["services"]["replica-1"]["environment"],
        [one["name"] for one in container("cosched")["env"]],
        (DEPLOY / "cosched.service").read_text(),
    ]
    assert all("COSCHED_ADMIN_API_KEY" in one for one in environments)


def test_compose_listens_on_this_machine_and_has_no_default_password():
    text = (DEPLOY / "compose.yaml").read_text()
    services = load("compose.yaml")["services"]
    ports = [port for one in services.values() for port in one.get("ports", ())]
    assert len(ports) == 5
    assert all(port.startswith("${BIND:-127.0.0.1}:") for port in ports)
    for name in ("ADMIN_KEY", "POSTGRES_PASSWORD", "GRAFANA_PASSWORD"):
        assert f"${{{name}:?" in text  # an unset one is an error that says what it is
    assert "GF_SECURITY_ADMIN_PASSWORD" in services["grafana"]["environment"]


def test_every_alert_has_a_severity():
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning"}


def test_both_routers_have_the_same_flags():
    ours = load("compose.yaml")["services"]["router"]["command"]
    assert [one.replace("replica-1", "cosched-0.cosched").replace("replica-2", "cosched-1.cosched")
            for one in ours] == container("cosched-router")["args"]  # fmt: skip


def test_rules_ask_for_metrics_that_there_are():
    known = {metric.shown_name: metric for metric in (*METRICS, *OF_BATCHES)}
    jobs = {one["job_name"] for one in load("prometheus.yml")["scrape_configs"]}

    def check(node):
        node = getattr(node, "vector_selector", node)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            grouped.update(node.modifier.labels)
        if not isinstance(node, promql_parser.VectorSelector):
            return
        labels = {one.name: one.value for one in node.matchers.matchers}
        if node.name == "up":
            assert labels.keys() == {"job"} and set(labels["job"].split("|")) <= jobs
            return
        metric = known[node.name.removesuffix("_bucket")]
        assert (metric.kind is Kind.HISTOGRAM) == node.name.endswith("_bucket"), node
        assert labels.keys() <= set(metric.labels), node
        allowed.update(metric.labels)

    page = (ROOT / "docs" / "batch_cost.md").read_text()
    [queries] = re.findall(r"```promql\n(.*?)```", page, re.DOTALL)
    for query in queries.splitlines():
        grouped, allowed = set(), set()
        promql_parser.walk(promql_parser.parse(query), check)
        assert allowed, query
    [scaled] = yaml.safe_load_all((DEPLOY / "keda.yaml").read_text())
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) in {
        (one["kind"], one["metadata"]["name"]) for one in MANIFESTS
    }
    [trigger] = scaled["spec"]["triggers"]
    promql_parser.walk(promql_parser.parse(trigger["metadata"]["query"]), check)
    for rule in RULES:
        grouped, allowed = set(), {"le", "instance", "job"}
        promql_parser.walk(promql_parser.parse(rule["expr"]), check)
        assert grouped <= allowed, rule
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= allowed, rule
    page = (ROOT / "docs" / "operate.md").read_text().split("## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", page, re.M) == [rule["alert"] for rule in RULES]
