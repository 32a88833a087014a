"""Who has the KV memory over time, what was evicted, and what was computed anew."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.metrics.plots import KV_USES
from cosched.lab.metrics.records import write_rows
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, config_of, engine_flags, execute_requests
from cosched.lab.simulation.setting import setting_of, with_eviction
from cosched.memory.config import EVICTION_ORDERS
from cosched.simulate import main
from cosched_traces.workload import Segment, TraceRequest


def make_spec(name, *, kv_tokens, **changes):
    return replace(
        RunSpec(
            setting=setting_of(name),
            machine=Machine(kv_tokens=kv_tokens, chunk_tokens=512, max_running_requests=32),
            cost=CostSpec(name="roofline"),
            duration_s=10.0,
        ),
        **changes,
    )


def run(name, *, kv_tokens):
    """Every second a chat turn of 1,000 tokens of which 960 are those of the turn before, beside
    more documents that share nothing than there is time for."""
    segments = (Segment(key=1, num_tokens=960),)
    online = [
        TraceRequest(
            rid=f"chat-{turn}",
            request_class=RequestClass.ONLINE,
            arrival_s=float(turn),
            num_output_tokens=8,
            segments=(*segments, Segment(key=2 + turn, num_tokens=40)),
        )
        for turn in range(8)
    ]
    offline = [
        TraceRequest(
            rid=f"document-{number}",
            request_class=RequestClass.OFFLINE,
            arrival_s=0.0,
            num_output_tokens=16,
            segments=(Segment(key=1000 + number, num_tokens=600),),
        )
        for number in range(300)
    ]
    return execute_requests(make_spec(name, kv_tokens=kv_tokens), online, offline)


@pytest.fixture(scope="module")
def tight():
    return run("hygen", kv_tokens=2_000)


def test_the_uses_add_up_and_the_counts_only_grow(tight, tmp_path):
    path = tmp_path / "kv.jsonl"
    write_rows(tight.kv, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 9
    for before, row in zip([dict.fromkeys(rows[0], 0), *rows], rows, strict=False):
        assert sum(row[use] for use in KV_USES) == 2_000
        assert row["time_s"] >= before["time_s"]
        for name in ("evicted_online", "evicted_offline", "recomputed_online"):
            assert row[name] >= before[name]
    assert rows[-1]["evicted_offline"] > 5_000
    assert max(row["running_online"] for row in rows) > 0
    assert max(row["returning"] for row in rows) > 0


def test_with_room_for_all_nothing_is_lost():
    roomy = run("hygen", kv_tokens=400_000)
    online = roomy.summary.online
    assert (online.num_lost_tokens, roomy.summary.offline.num_lost_tokens) == (0, 0)
    assert online.num_cached_tokens == 7 * 960
    last = list(roomy.kv.rows())[-1]
    assert last["recomputed_online"] == last["recomputed_offline"] == last["evicted_online"] == 0


@pytest.mark.parametrize("name", ["hygen/lru", "priority/lru"])
def test_what_was_evicted_and_is_asked_for_again_is_lost(name, tight):
    """Known of SGLang's own orders all the same."""
    by_use = run(name, kv_tokens=2_000)
    assert not len(by_use.kv)
    online = by_use.summary.online
    known = 7 * 960
    assert 0 < online.num_lost_tokens == known - online.num_cached_tokens
    assert tight.summary.online.num_lost_tokens < online.num_lost_tokens
    assert by_use.summary.offline.num_lost_tokens == 0, "they share nothing"
    assert by_use.to_dict()["spec"]["scenario"] == name


def test_an_order_of_eviction_is_a_word_behind_the_scenario():
    stock = make_spec("priority/slru", kv_tokens=6_000)
    assert engine_flags(stock)[-2:] == ["--radix-eviction-policy", "slru"]
    assert "--radix-eviction-policy" not in engine_flags(make_spec("priority", kv_tokens=6_000))
    ours = make_spec("hygen/echo", kv_tokens=6_000, config=(("kv", {"reserve": False}),))
    assert "--radix-eviction-policy" not in engine_flags(ours)
    assert setting_of("hygen/lru") == with_eviction(setting_of("hygen"), "lru")
    echo = make_spec("echo-bs+e+s+m", kv_tokens=6_000)
    assert config_of(echo).named_kv().eviction == "echo"
    for order in EVICTION_ORDERS:
        named = config_of(make_spec(f"echo-bs+e+s+m/{order}", kv_tokens=6_000))
        assert named.named_kv().eviction == order
    for name in ("priority/value", "hygen/fifo", "s0/echo"):
        with pytest.raises(ConfigError, match="cannot evict by"):
            setting_of(name)


def test_the_command_takes_the_order_and_writes_the_log(tmp_path, capsys):
    path = tmp_path / "kv.jsonl"
    asked = "--online multi-turn --online-sessions 2 --kv-tokens 9000 --duration 20 --quiet"
    main([*asked.split(), "--kv-eviction", "echo", "--kv-log", str(path)])
    times_s = [json.loads(line)["time_s"] for line in path.read_text().splitlines()]
    assert len(times_s) >= 3 and times_s[0] < 1.0
    assert all(1.0 <= later - earlier < 1.1 for earlier, later in pairwise(times_s))
    with pytest.raises(SystemExit):
        main([*asked.split(), "--policy", "sglang", "--kv-eviction", "value"])
    assert "sglang cannot evict by 'value'; choose from" in capsys.readouterr().err
