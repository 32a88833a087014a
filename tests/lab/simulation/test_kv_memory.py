"""KV memory in virtual time: who has it, what is evicted, preempted, or kept on the host."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.metrics.plots import KV_USES
from cosched.lab.metrics.records import read_records, write_records, write_rows
from cosched.lab.metrics.slo import JctTarget
from cosched.lab.simulation.clock import VirtualClock
from cosched.lab.simulation.run import config_of, engine_flags, execute, execute_requests
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched.lab.simulation.setting import setting_of, with_eviction
from cosched.lab.simulation.virtual_host import VirtualTransfers
from cosched.policies import EVICTION_NAMES
from cosched.simulate import main
from tests.simulated import bytes_of, make_spec, watch_plans
from tests.traces.samples import request

# -- the log of uses ------------------------------------------------------------------------------


def spec_with_kv(name, kv_tokens, **changes):
    return make_spec(
        name,
        machine={"kv_tokens": kv_tokens},
        online=None,
        offline=None,
        duration_s=10.0,
        **changes,
    )


def run(name, *, kv_tokens):
    """Every second a chat turn of 1,000 tokens of which 960 are those of the turn before, beside
    more documents that share nothing than there is time for."""
    online = [
        request(f"chat-{turn}", float(turn), ((1, 960), (2 + turn, 40)), output=8)
        for turn in range(8)
    ]
    offline = [
        request(f"document-{number}", prompt=600, output=16, request_class=RequestClass.OFFLINE)
        for number in range(300)
    ]
    return execute_requests(spec_with_kv(name, kv_tokens), online, offline)


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


def test_with_headroom_for_all_nothing_is_lost():
    roomy = run("hygen", kv_tokens=400_000)
    online = roomy.summary.online
    assert (online.num_lost_tokens, roomy.summary.offline.num_lost_tokens) == (0, 0)
    assert online.num_cached_tokens == 7 * 960
    last = list(roomy.kv.rows())[-1]
    assert last["recomputed_online"] == last["recomputed_offline"] == last["evicted_online"] == 0


@pytest.mark.parametrize("name", ["hygen/lru", "priority/lru"])
def test_what_was_evicted_and_is_asked_for_again_is_lost(name, tight):
    """Known of SGLang's own orders too."""
    by_use = run(name, kv_tokens=2_000)
    assert not len(by_use.kv)
    online = by_use.summary.online
    assert 0 < online.num_lost_tokens == 7 * 960 - online.num_cached_tokens
    assert tight.summary.online.num_lost_tokens < online.num_lost_tokens
    assert by_use.summary.offline.num_lost_tokens == 0, "they share nothing"
    assert by_use.to_dict()["spec"]["scenario"] == name


def test_an_order_of_eviction_is_a_word_behind_the_setting():
    stock = spec_with_kv("priority/slru", 6_000)
    assert engine_flags(stock)[-2:] == ["--radix-eviction-policy", "slru"]
    assert "--radix-eviction-policy" not in engine_flags(spec_with_kv("priority", 6_000))
    ours = spec_with_kv("hygen/echo", 6_000, config=(("kv", {"reservation": "off"}),))
    flags = engine_flags(ours)
    assert flags[flags.index("--radix-eviction-policy") + 1] == "lru", "the order is ours"
    assert setting_of("hygen/lru") == with_eviction(setting_of("hygen"), "lru")
    for order in (None, *EVICTION_NAMES):
        name = f"echo-bs+e+s+m/{order}" if order else "echo-bs+e+s+m"
        assert config_of(spec_with_kv(name, 6_000)).named_kv().eviction == (order or "echo")
    for name in ("priority/value", "hygen/fifo", "s0/echo"):
        with pytest.raises(ConfigError, match="cannot evict by"):
            setting_of(name)


def test_the_command_takes_the_order_and_writes_the_log(tmp_path, capsys):
    path = tmp_path / "kv.jsonl"
    asked = "--online multi-turn --online-sessions 2 --kv-tokens 9000 --duration 4 --quiet"
    main([*asked.split(), "--kv-eviction", "echo", "--kv-log", str(path)])
    times_s = [json.loads(line)["time_s"] for line in path.read_text().splitlines()]
    assert len(times_s) >= 3 and times_s[0] < 1.0
    assert all(1.0 <= later - earlier < 1.1 for earlier, later in pairwise(times_s))
    with pytest.raises(SystemExit):
        main([*asked.split(), "--policy", "sglang", "--kv-eviction", "value"])
    assert "sglang cannot evict by 'value'; choose from" in capsys.readouterr().err


# -- preemptions and deadlines --------------------------------------------------------------------

TARGET = JctTarget(prompt_s=0.02, token_s=0.02)


def short_of_memory(name, **machine):
    """Where stock admits by a tenth of what it would take requests to need."""
    few = {"kv_tokens": 3_000, "max_running_requests": 64, "schedule_conservativeness": 0.1}
    return make_spec(
        name,
        machine={**few, **machine},
        online=WorkloadSpec(name="sharegpt", rate=8.0, num_requests=24),
        offline=None,
        duration_s=120.0,
        jct=TARGET,
    )


@pytest.mark.parametrize("radix_cache", [pytest.param(True, marks=pytest.mark.long), False])
def test_each_preemption_of_the_engine_is_noted_and_when_the_request_ran_again(
    radix_cache, tmp_path
):
    """Requests that soon need several times the memory that there is."""
    requests = [
        request(f"r{n}", 0.02 * n, prompt=50, output=200 + 10 * n, max_new_tokens=1000)
        for n in range(48)
    ]
    result = execute_requests(short_of_memory("s0", radix_cache=radix_cache), requests, [])
    records = result.records
    assert all(record.is_finished for record in records)
    assert sum(len(record.pauses) for record in records) >= 2
    starts = set(result.iterations.column("start_s"))
    for record in records:
        assert len(record.pauses) == record.num_preemptions
        times = [time_s for pause in record.pauses for time_s in pause]
        assert times == sorted(times) and all(again_s in starts for again_s in times[1::2])
        assert not times or record.admitted_s <= times[0] <= times[-1] <= record.finish_s
        for preempted_s, again_s in record.pauses:
            assert not [t for t in record.token_times if preempted_s < t <= again_s]
    write_records(records, tmp_path / "records.jsonl")
    assert list(read_records(tmp_path / "records.jsonl")) == list(records)


def test_deadlines_reach_the_policy_and_are_judged(monkeypatch):
    seen = {}

    def look(policy, view, state, made):
        seen.update((r.rid, r.slo.deadline_s) for r in (*view.online, *view.running))

    watch_plans(monkeypatch, look)
    result = execute(short_of_memory("sarathi"))
    records = result.records
    # The server takes no target below a quarter of its own for the first token.
    limits = {r.rid: TARGET.limit_s(r.num_output_tokens) for r in records}
    assert seen == {rid: pytest.approx(max(limit, 0.25)) for rid, limit in limits.items()}
    met = sum(r.e2e_s <= limits[r.rid] for r in records)
    attainment = result.summary.online.attainment
    assert 0 < met < len(records)
    assert attainment.jct.num_met == attainment.deadline.num_met == met


def test_only_stock_scheduling_goes_without_a_radix_cache():
    spec = short_of_memory("sarathi", radix_cache=False)
    assert "--disable-radix-cache" in engine_flags(spec)
    assert "--disable-radix-cache" not in engine_flags(short_of_memory("sarathi"))
    with pytest.raises(ConfigError, match="--disable-radix-cache cannot go with"):
        execute(spec)


# -- host memory ----------------------------------------------------------------------------------


def sessions():
    """Four contexts of 2,000 tokens, taken up in turn: the device holds two of them."""
    return [
        request(
            f"{session}.{turn}",
            0.5 + 2.0 * session,
            ((session + 1, 2000 + 50 * turn),),
            output=10,
            session=f"s{session}",
            after=f"{session}.{turn - 1}" if turn else None,
            think_s=8.0,
        )
        for session in range(4)
        for turn in range(3)
    ]


def run_sessions(config=(), **machine):
    spec = spec_with_kv("hygen", 5000, config=config)
    spec = replace(spec, machine=replace(spec.machine, **machine), duration_s=60.0)
    return execute_requests(spec, sessions(), [])


def hit_ratio(result):
    """Of the turns that continue something."""
    later = [r for r in result.records if not r.rid.endswith(".0")]
    assert len(later) == 8
    return sum(r.num_cached_tokens for r in later) / sum(r.num_prompt_tokens for r in later)


def test_contexts_come_back_from_the_host_and_two_runs_give_the_same_bytes():
    before, first, second = (run_sessions(host_kv_tokens=n) for n in (0, 20_000, 20_000))
    assert before.cosched["kv"]["host"] is None
    host = first.cosched["kv"]["host"]
    assert host["to_host"] > 0 and host["to_device"] > 0
    assert hit_ratio(before) < 0.6 < 0.9 < hit_ratio(first)
    assert bytes_of(first) == bytes_of(second)
    assert '"host_bandwidth_gb_s": 20.0' in bytes_of(first)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_the_engines_own_order_has_host_memory_too(write):
    config = (("kv", {"eviction": "lru"}),)
    result = run_sessions(config, host_kv_tokens=20_000, host_write_policy=write)
    assert result.cosched["kv"] is None
    assert hit_ratio(result) > 0.9


def test_a_link_too_slow_is_not_used():
    result = run_sessions(host_kv_tokens=20_000, host_bandwidth_gb_s=0.001)
    assert result.cosched["kv"]["host"]["to_host"] == 0


class Transfer:
    def __init__(self, num_tokens):
        self.device_indices = range(num_tokens)


def transfers_of(clock, gpu_free_s=0.0):
    return VirtualTransfers(
        clock=clock, s_per_token=0.01, num_layers=10, gpu_free_s=lambda: gpu_free_s
    )


def test_copies_of_one_direction_follow_each_other():
    clock = VirtualClock()
    transfers = transfers_of(clock)
    first = transfers.submit_device_to_host([Transfer(100)])
    second = transfers.submit_device_to_host([Transfer(50)])
    back = transfers.submit_host_to_device([Transfer(20)])
    assert not first.finish_event.query()
    assert transfers.next_done_s() == pytest.approx(0.2)
    back.finish_event.synchronize()
    assert clock.now_s() == pytest.approx(0.2)
    second.finish_event.synchronize()
    assert clock.now_s() == pytest.approx(1.5)
    assert first.finish_event.query()
    assert transfers.next_done_s() is None


@pytest.mark.parametrize(
    ("compute_s", "expected_s"),
    [(5.0, 5.1), (0.5, 1.05), (0.0, 1.0)],  # the first layer's part, or the last layer
)
def test_layers_compute_while_others_are_loaded(compute_s, expected_s):
    transfers = transfers_of(VirtualClock())
    transfers.submit_host_to_device([Transfer(100)])
    assert transfers.iteration_s(0.0, compute_s) == pytest.approx(expected_s)
    assert transfers.iteration_s(2.0, compute_s) == pytest.approx(compute_s)


# -- state slots ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.long)])
def test_state_slots_bound_who_runs(overlap):
    """A request takes five of them, or three; chat takes those of documents, and what no
    checkpoint keeps of these is computed again."""
    machine = {"state_slots": 20, "overlap": overlap}
    result = execute(make_spec("cosched", machine=machine, duration_s=10.0))
    running = [i.num_online_decodes + i.num_offline_decodes for i in result.iterations]
    assert max(running) == (4 if overlap else 6)
    documents = [r for r in result.records if r.request_class is RequestClass.OFFLINE]
    assert sum(r.num_preemptions for r in documents) > 5
    assert sum(r.num_recomputed_tokens for r in documents) > 0
    assert all(r.ok for r in result.records)
