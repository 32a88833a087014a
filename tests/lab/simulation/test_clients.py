"""Who sends requests in virtual time: sessions, waves, a bounded number of lines."""

import itertools
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched import simulate
from cosched.batch.config import BatchesConfig
from cosched.core.request import RequestClass, Slo
from cosched.lab.metrics.records import RequestRecord
from cosched.lab.simulation.arrivals import VOCAB_SIZE
from cosched.lab.simulation.clients import AimdClient, SessionClient, WaveClient
from cosched.lab.simulation.feeder_client import FeederClient, Job, jobs_of
from cosched.lab.simulation.requests import offline_client
from cosched.lab.simulation.run import engine_flags, execute, execute_requests, load_requests
from cosched.lab.simulation.run_spec import WorkloadSpec
from cosched_traces.catalogue import load_workload
from tests.simulated import make_spec, offline, online
from tests.traces.samples import request

SESSIONS = make_spec(
    "s0", online=WorkloadSpec(name="multi-turn", num_sessions=4), offline=None, duration_s=120.0
)
TURNS = [
    request("a", 0.5, ((1, 200),), output=30, session="s"),
    request("b", 0.5, ((1, 300),), output=20, session="s", after="a", think_s=4.0),
    request("c", 0.5, ((1, 310),), output=5, session="s", after="b", think_s=0.25),
]


def ended(rid, at_s):
    return RequestRecord(
        rid=rid,
        request_class=RequestClass.ONLINE,
        arrival_s=0.0,
        num_prompt_tokens=1,
        num_output_tokens=1,
        first_token_s=at_s,
        finish_s=at_s,
    )


def by_rid(result):
    return {record.rid: record for record in result.records}


# -- sessions -----------------------------------------------------------------------------------


def test_the_next_turn_is_sent_when_the_answer_was_thought_about():
    client = SessionClient(TURNS)
    assert (client.next_s(), list(client.due(0.4))) == (0.5, [])
    assert [a.rid for a in client.due(0.5)] == ["a"]
    assert client.next_s() is None, "until the answer has come"
    client.on_finish(ended("other", 1.0))
    assert client.next_s() is None
    client.on_finish(ended("a", 2.0))
    assert client.next_s() == 6.0
    (sent,) = client.due(6.5)
    assert (sent.rid, sent.arrival_s) == ("b", 6.0), "it arrived while an iteration ran"


def test_the_next_prompt_continues_the_answer():
    client = SessionClient(TURNS)
    (first,) = client.due(1.0)
    client.on_finish(ended("a", 1.0))
    (second,) = client.due(9.0)
    assert second.input_ids[:200] == first.input_ids
    assert second.input_ids[200:230] == first.output_ids
    # The third goes on by 10 tokens of the 20 that the second answers: it left something out.
    assert len(second.output_ids) == 0


def test_the_answer_of_a_live_server_replaces_the_answer_of_the_trace():
    client = SessionClient(TURNS)
    (first,) = client.due(1.0)
    client.on_finish(ended("a", 1.0), range(7, 37))
    (second,) = client.due(9.0)
    assert second.input_ids[:200] == first.input_ids
    assert list(second.input_ids[200:230]) == list(range(7, 37))
    assert len(second.input_ids) == 300
    # The third leaves the answer to the second out.
    client.on_finish(ended("b", 9.0), range(20))
    (third,) = client.due(19.0)
    assert third.input_ids[:300] == second.input_ids
    assert third.input_ids[300:] == TURNS[2].prompt(vocab_size=VOCAB_SIZE)[300:]


@given(times=st.lists(st.floats(0, 50), min_size=1, max_size=20).map(sorted))
def test_requests_outside_sessions_come_at_their_times(times):
    client = SessionClient([request(f"r{i}", t) for i, t in enumerate(times)])
    sent = []
    while (next_s := client.next_s()) is not None:
        sent += client.due(next_s)
    assert [a.rid for a in sent] == [f"r{i}" for i in range(len(times))]
    assert [a.arrival_s for a in sent] == times


def test_a_turn_finds_the_prompt_and_the_answer_before_it_in_the_cache():
    records = by_rid(execute_requests(SESSIONS, TURNS, []))
    assert records["a"].num_cached_tokens == 0
    # The last token of an answer was never an input: it has no KV.
    assert records["b"].num_cached_tokens == 200 + 30 - 1
    # The answer to b is not part of c, so only b's prompt is there.
    assert records["c"].num_cached_tokens == 300
    for before, after in (("a", "b"), ("b", "c")):
        think_s = next(t.think_s for t in TURNS if t.rid == after)
        arrival_s = records[before].finish_s + think_s
        assert records[after].arrival_s == pytest.approx(arrival_s)


def test_no_more_sessions_than_asked_for_are_under_way():
    result = execute(SESSIONS)
    turns = [r for r in result.records if r.is_finished]
    assert len(turns) > 4
    steps = sorted([(r.arrival_s, 1) for r in result.records] + [(r.finish_s, -1) for r in turns])
    count = 0
    for _, step in steps:
        count += step
        assert 0 <= count <= 4
    assert result.summary.online.hit_ratio > 0.3


def test_the_command_takes_a_number_of_sessions_or_a_rate_of_starts(capsys):
    options = ["--cost-model", "roofline", "--kv-tokens", "20000", "--duration", "3", "--quiet"]
    options += ["--max-running-requests", "32"]
    for given_as, option in (("num_sessions", "--online-sessions"), ("rate", "--online-rate")):
        simulate.main(["--online", "multi-turn", option, "3", *options])
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert shown["spec"]["online"][given_as] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("alpaca --online-sessions 3", "is not in sessions"),
        ("multi-turn --online-sessions 3 --online-rate 1", "a rate of starts or a number under"),
        ("multi-turn --peak-window 9", "turns of sessions cannot be moved or drawn apart"),
    ],
)
def test_options_that_sessions_do_not_have_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        simulate.main(["--online", *arguments.split()])
    assert said in capsys.readouterr().err


# -- offline clients ----------------------------------------------------------------------------


def test_a_static_cap_is_kept():
    sent = offline(execute(make_spec("cap", cap=3)))
    in_flight = [(r.arrival_s, 1) for r in sent]
    in_flight += [(r.finish_s, -1) for r in sent if r.finish_s is not None]
    count = most = 0
    for _, step in sorted(in_flight):
        count += step
        most = max(most, count)
    assert most == 3


def test_aimd_raises_its_cap_while_targets_are_met_and_halves_it_when_not():
    missed = [False]
    client = AimdClient(
        load_requests(make_spec("s1"))[1],
        is_missed=lambda record: missed[0],
        max_concurrency=8,
    )
    record = online(execute(make_spec("s0", duration_s=1.0)))[0]
    sizes = []
    for second in range(1, 8):
        client.on_finish(record)
        list(client.due(float(second)))
        sizes.append(client.concurrency)
    assert sizes == [2, 3, 4, 5, 6, 7, 8]
    missed[0] = True
    client.on_finish(record)
    list(client.due(8.0))
    assert client.concurrency == 4


def test_the_next_wave_is_sent_when_all_of_the_last_have_ended():
    requests = load_workload("bros-offline", seed=0, num_requests=7).requests
    client = WaveClient(requests, size=3)
    sent = []
    for number in range(3):
        wave = [arrival.rid for arrival in client.due(float(number))]
        for rid in [*wave[:-1], "of another client"]:
            client.on_finish(ended(rid, 1.0))
            assert not list(client.due(number + 0.6))
        client.on_finish(ended(wave[-1], 1.0))
        sent.append(len(wave))
    assert sent == [3, 3, 1] and not list(client.due(9.0))


def questions(count, *, first=0):
    """Questions on six documents in turn, of one file."""
    places = range(first, first + count)
    return [request(f"q{n}", 0.0, ((n % 6, 5_000), (100 + n, 40))) for n in places]


def fed(jobs, **config):
    """The documents that a feeder sends, and how many requests are under way after each. One ends
    in each second, in the order in which they were sent."""
    client = FeederClient(jobs, config=BatchesConfig(**config))
    under_way, sent, counts = [], [], []
    for second in itertools.count():
        for arrival in client.due(float(second)):
            assert arrival.arrival_s == second
            total = sum(len(job.requests) for job in jobs if job.start_s <= second)
            assert arrival.num_behind >= total - len(sent) - config["high_watermark"]
            assert arrival.num_behind < total - len(sent), "how many are still to come"
            under_way.append(arrival.rid)
            sent.append(int(arrival.rid[1:]) % 6)
            counts.append(len(under_way))
        if not under_way and client.next_s() is None:
            return sent, counts
        if under_way:
            client.on_finish(ended(under_way.pop(0), float(second)))


def changes(values):
    return sum(a != b for a, b in pairwise(values))


def test_the_feeder_sends_a_page_at_a_time_in_prefix_order():
    sent, counts = fed(jobs_of(questions(60), num_batches=1), high_watermark=8, low_watermark=4)
    assert changes(sent) == 5 and len(sent) == 60
    assert max(counts) == 8 and counts[8:16] == [5, 6, 7, 8] * 2


def test_batches_that_share_documents_are_sent_as_one():
    jobs = jobs_of(questions(120), num_batches=4)
    sent, _ = fed(jobs, high_watermark=16, low_watermark=15)
    begun = sum(document not in sent[max(n - 16, 0) : n] for n, document in enumerate(sent))
    assert begun == 6 and len(sent) == 120, "each document is computed once"


def test_a_batch_that_comes_later_joins_those_that_are_under_way():
    first = Job(requests=questions(60))
    second = Job(requests=questions(60, first=60), start_s=25.0)
    sent, _ = fed([first, second], high_watermark=8, low_watermark=7)
    begun = sum(document not in sent[max(n - 12, 0) : n] for n, document in enumerate(sent))
    assert begun == 6 + 2, "again only the two documents that were done when it came"


@pytest.mark.parametrize(
    ("setting", "asked", "client"),
    [
        ("cosched", None, "feeder"),
        ("hygen", None, "feeder"),
        ("cosched", "all", "all"),
        ("hygen", "lines", "lines"),
        ("priority", None, "all"),
        ("cap", "all", "cap"),
    ],
)
def test_a_run_names_its_offline_client(setting, asked, client):
    spec = make_spec(setting)
    spec = replace(spec, offline=replace(spec.offline, client=asked))
    assert spec.describe()["offline"]["client"] == client


def test_line_by_line_clients_send_in_prefix_order():
    spec = make_spec("cosched", offline=WorkloadSpec(name="job", client="lines"))
    sent = [arrival.rid for arrival in offline_client(spec, questions(36)).due(0.0)]
    assert len(sent) == 36 and changes(int(rid[1:]) % 6 for rid in sent) == 5


def wave_spec(name):
    return make_spec(
        name,
        online=WorkloadSpec(name="sharegpt-bros", rate=4.0),
        offline=WorkloadSpec(name="bros-offline", num_requests=60, wave=20),
        slo=Slo(ttft_s=0.4, tpot_s=0.2),
        duration_s=8.0,
    )


@pytest.mark.parametrize("name", ["bros", "bros-rr", "vllm-like"])
def test_waves_do_not_overlap_and_both_classes_make_progress(name):
    result = execute(wave_spec(name))
    waves = sorted({r.arrival_s for r in offline(result)})
    assert len(waves) >= 2
    for earlier, later in pairwise(waves):
        last_s = [r.finish_s for r in offline(result) if r.arrival_s == earlier]
        assert None not in last_s and max(last_s) <= later
    assert result.summary.online.num_finished > 5
    # Most replies of seconds are longer than one gap.
    assert result.summary.online.attainment.tbt.num_met > 100


def test_stock_is_run_as_bros_ran_vllm():
    flags = " ".join(engine_flags(wave_spec("vllm-like")))
    for flag in ("--page-size 16", "--chunked-prefill-size -1", "--disable-radix-cache"):
        assert flag in flags
    assert "--enable-mixed-chunk" not in flags


@pytest.mark.parametrize(
    ("changes", "mixes"),
    [
        ({}, True),
        ({"cost": {"device_overheads": "fa3"}}, True),
        ({"cost": {"device_overheads": "triton"}}, False),
        ({"cost": {"device_overheads": "triton"}, "machine": {"mixed_chunk": True}}, True),
        ({"machine": {"mixed_chunk": False}}, False),
    ],
)
def test_a_simulated_server_mixes_where_a_real_one_does(changes, mixes):
    spec = wave_spec("cosched")
    spec = replace(
        spec, **{part: replace(getattr(spec, part), **given) for part, given in changes.items()}
    )
    assert ("--enable-mixed-chunk" in engine_flags(spec)) is mixes
