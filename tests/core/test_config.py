"""The configuration that switches cosched on."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cosched.config import ENV_VAR, Config, load_config, parse_config
from cosched.errors import ConfigError
from cosched.limits.claims import digest_of
from cosched.memory.config import KvConfig
from cosched.policies import EVICTION_NAMES, POLICIES
from cosched.pool.prefix_pool import PoolConfig


def test_absent_or_empty_means_off():
    assert load_config({}) is None
    assert load_config({ENV_VAR: "  "}) is None


def test_json_and_file_give_the_same(tmp_path):
    text = json.dumps({"policy": "sarathi", "slo": {"ttft_ms": 500}})
    path = tmp_path / "cosched.json"
    path.write_text(text)
    inline = load_config({ENV_VAR: text})
    assert inline == load_config({ENV_VAR: str(path)})
    assert inline.slo.ttft_ms == 500 and inline.slo.tpot_ms == Config().slo.tpot_ms


def test_what_is_written_reads_back():
    config = Config(policy="priority", latency_budget_ms=40.0)
    assert parse_config(config.to_json(), source="x") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"policy": "ehco"}', "unknown policy 'ehco'; choose from .*sarathi"),
        ('{"polcy": "sarathi"}', "unknown field `polcy`"),
        ('{"slo": {"ttft_ms": -1}}', "ttft_ms must be a positive number of milliseconds, not -1"),
        ('{"slo": {"ttft": 1}}', "unknown field `ttft`"),
        ('{"latency_budget_ms": 0}', "latency_budget_ms must be a positive"),
        ('{"predictor_error": 1.5}', r"predictor_error must be in \[0, 1\], not 1.5"),
        ('{"budgets": {"aim": 1.5}}', "aim 1.5 is not above 0 and up to 1"),
        ('{"budgets": {"crowded_share": 1}}', "crowded_share 1.0 is not from 0 to below 1"),
        ('{"budgets": {"late_bound": 0}}', "late_bound 0.0 is not a positive number"),
        ('{"budgets": {"ami": 1}}', "unknown field `ami`"),
        ('{"pool": {"patient": 1}}', "unknown field `patient`"),
        ('{"pool": {"least_shared": 0}}', "least_shared 0 is below 1"),
        ("{", "COSCHED_CONFIG: .*truncated"),
        ("/no/such/file", "neither a JSON object nor a readable file: '/no/such/file'"),
    ],
)
def test_bad_values_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        load_config({ENV_VAR: text})


@pytest.mark.parametrize("name", POLICIES)
def test_an_order_of_eviction_that_is_named_wins_over_the_policys(name):
    needs_profile = POLICIES[name].predictor is not None
    profile = {"latency_model": "profile.json"} if needs_profile else {}
    own = Config(policy=name, **profile).named_kv().eviction
    theirs = dict.fromkeys(("echo-bs+e+s+m", "echo-regular", "echo-literal"), "echo")
    assert own == theirs.get(name, "value")
    for order in EVICTION_NAMES:
        text = json.dumps({"policy": name, "kv": {"eviction": order}} | profile)
        config = parse_config(text, source="x")
        assert config.named_kv().eviction == order


@pytest.mark.parametrize(("policy", "num"), [("cosched", 4), ("hygen", None)])
def test_another_key_of_the_pool_leaves_the_policy_its_buckets(policy, num):
    for pool in (None, PoolConfig(least_shared=3)):
        assert Config(policy=policy, pool=pool).named_pool().num_buckets == num
    named = Config(policy=policy, pool=PoolConfig(least_shared=3, num_buckets=2)).named_pool()
    assert (named.num_buckets, named.least_shared) == (2, 3)
    assert Config(policy="sarathi", pool=PoolConfig()).named_pool() is None


def test_a_policy_of_another_package_may_name_its_order(monkeypatch):
    entry = replace(POLICIES["hygen"], kv=KvConfig(eviction="slru"))
    monkeypatch.setitem(sys.modules, "somebody", SimpleNamespace(theirs=entry))
    found = Config(policy="somebody:theirs").named_kv()
    assert (found.eviction, found.reservation) == ("slru", "cosched")
    wrong = replace(entry, kv=KvConfig(eviction="fifo"))
    monkeypatch.setitem(sys.modules, "nobody", SimpleNamespace(theirs=wrong))
    with pytest.raises(ConfigError, match="'fifo' is unknown"):
        Config(policy="nobody:theirs")


def test_keys_have_the_names_of_their_owners_and_the_least_of_their_limits():
    digest = "sha256:" + "ab" * 32
    text = {
        "claims": {
            "keys": {
                "one": {"name": "acme", "max_running_offline": 5},
                "two": {"max_running_offline": 3},
                digest: {"max_running_offline": 2},
                "*": {"max_running_offline": 1},
            }
        },
        "batches": {"owners": {"acme": ["two"], "bob": ["three"]}},
    }
    config = parse_config(json.dumps(text), source="x")
    names = [*(digest_of(key) for key in ("one", "two", "three")), digest]
    assert [config.key_names()[name] for name in names] == ["acme", "acme", "bob", "abababab"]
    assert config.most_running_offline() == {"acme": 3, "abababab": 2, "": 1}
    with pytest.raises(ConfigError, match="must not have a slash"):
        parse_config('{"batches": {"owners": {"a/b": ["k"]}}}', source="x")
