"""Sessions in virtual time: a turn comes after the answer before it, and finds its KV."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched import simulate
from cosched.core.request import RequestClass
from cosched.lab.metrics.records import RequestRecord, record_line
from cosched.lab.simulation.arrivals import VOCAB_SIZE
from cosched.lab.simulation.clients import SessionClient
from cosched.lab.simulation.machine import Machine
from cosched.lab.simulation.run import CostSpec, RunSpec, WorkloadSpec, execute, execute_requests
from cosched.lab.simulation.setting import setting_of
from tests.traces.samples import request

SMALL = Machine(kv_tokens=20_000, chunk_tokens=512, max_running_requests=32)
SPEC = RunSpec(
    setting=setting_of("s0"),
    machine=SMALL,
    online=WorkloadSpec(name="multi-turn", num_sessions=4),
    cost=CostSpec(name="roofline"),
    duration_s=120.0,
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


class TestSessionClient:
    def test_sends_the_next_turn_when_the_answer_was_thought_about(self):
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

    def test_an_answer_is_what_the_next_prompt_goes_on_with(self):
        client = SessionClient(TURNS)
        (first,) = client.due(1.0)
        client.on_finish(ended("a", 1.0))
        (second,) = client.due(9.0)
        assert second.input_ids[:200] == first.input_ids
        assert second.input_ids[200:230] == first.output_ids
        # The third goes on by 10 tokens of the 20 that the second answers: it left something out.
        assert len(second.output_ids) == 0

    def test_what_a_live_server_answers_takes_the_place_of_the_answer_in_the_trace(self):
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

    def test_all_live_answers_stay_in_the_context(self):
        last = replace(TURNS[2], segments=(TURNS[0].segments[0]._replace(num_tokens=400),))
        client = SessionClient([*TURNS[:2], last])
        list(client.due(1.0))
        client.on_finish(ended("a", 1.0), range(7, 37))
        (second,) = client.due(9.0)
        client.on_finish(ended("b", 9.0), range(50, 70))
        (third,) = client.due(19.0)
        assert third.input_ids[:300] == second.input_ids
        assert list(third.input_ids[300:320]) == list(range(50, 70))
        assert len(third.input_ids) == 400

    def test_of_a_prompt_that_turns_off_nothing_is_known(self):
        off = replace(TURNS[1], segments=(TURNS[0].segments[0]._replace(key=2, num_tokens=300),))
        (first,) = SessionClient([TURNS[0], off]).due(1.0)
        assert len(first.output_ids) == 0

    @given(times=st.lists(st.floats(0, 50), min_size=1, max_size=20).map(sorted))
    def test_requests_that_wait_for_nobody_come_at_their_times(self, times):
        client = SessionClient([request(f"r{i}", t) for i, t in enumerate(times)])
        sent = []
        while (next_s := client.next_s()) is not None:
            sent += client.due(next_s)
        assert [a.rid for a in sent] == [f"r{i}" for i in range(len(times))]
        assert [a.arrival_s for a in sent] == times


def test_a_turn_finds_the_prompt_and_the_answer_before_it_in_the_cache():
    records = by_rid(execute_requests(SPEC, TURNS, []))
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
    result = execute(SPEC)
    turns = [r for r in result.records if r.is_finished]
    assert len(turns) > 4
    steps = sorted([(r.arrival_s, 1) for r in result.records] + [(r.finish_s, -1) for r in turns])
    count = 0
    for _, step in steps:
        count += step
        assert 0 <= count <= 4
    assert result.summary.online.hit_ratio > 0.3


def test_a_slow_server_is_asked_later():
    fast, slow = (
        by_rid(execute_requests(replace(SPEC, machine=replace(SMALL, gpu=gpu)), TURNS, []))
        for gpu in ("H200", "A100-40")
    )
    assert fast["a"].arrival_s == slow["a"].arrival_s
    assert fast["c"].arrival_s < slow["c"].arrival_s


def test_two_runs_give_the_same_bytes():
    spec = replace(
        SPEC,
        setting=setting_of("hygen"),
        offline=WorkloadSpec(name="bros-offline", num_requests=40),
        duration_s=20.0,
    )
    first, second = (
        json.dumps(r.to_dict(), sort_keys=True) + "".join(map(record_line, r.records))
        for r in (execute(spec), execute(spec))
    )
    assert first == second


def test_the_command_takes_a_number_of_sessions_or_a_rate_of_starts(capsys):
    options = ["--cost-model", "roofline", "--kv-tokens", "20000", "--duration", "5", "--quiet"]
    simulate.main(["--online", "multi-turn", "--online-sessions", "3", *options])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["spec"]["online"]["num_sessions"] == 3
    simulate.main(["--online", "multi-turn", "--online-rate", "1", *options])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["spec"]["online"]["rate"] == 1


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (simulate.main, ["--online", "alpaca", "--online-sessions", "3"], "is not in sessions"),
        (
            simulate.main,
            ["--online", "multi-turn", "--online-sessions", "3", "--online-rate", "1"],
            "a rate of starts or a number under way, not both",
        ),
        (
            simulate.main,
            ["--online", "multi-turn", "--peak-window", "9"],
            "turns of sessions cannot be moved or drawn apart",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(main, arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
