"""The live driver against a real server."""

import asyncio
import time

import pytest

from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.lab.benchmark import live
from cosched.lab.benchmark.live import LiveTarget, ServerError, measure_live, run_live, with_misses
from cosched.lab.simulation.clients import online_client
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.setting import OfflineClient, Setting
from cosched_traces.workload import Segment, TraceRequest
from tests.lab.metrics.samples import request as ended


def request(rid, request_class, arrival_s, num_tokens=6, **fields):
    return TraceRequest(
        rid=rid,
        request_class=request_class,
        arrival_s=arrival_s,
        num_output_tokens=num_tokens,
        segments=(Segment(1, 40), Segment(hash(rid) % 1000 + 2, 10)),
        **fields,
    )


def run(server, online=(), offline=(), *, client=OfflineClient.CAP, cap=1, duration_s=60.0, **rest):
    """The records of a run against the server."""
    spec = RunSpec(
        setting=Setting(name="live", summary="", policy="sglang", client=client),
        duration_s=duration_s,
        cap=cap,
    )
    target = LiveTarget(base_url=server.url, vocab_size=1000)
    return asyncio.run(measure_live(target, spec, online, offline, **rest)).records


def test_both_classes_are_sent_and_recorded(server):
    online = [request(f"on{i}", RequestClass.ONLINE, 0.2 * i) for i in range(5)]
    offline = [request(f"off{i}", RequestClass.OFFLINE, 0.0) for i in range(12)]
    records = run(server, online, offline, cap=4)
    assert {r.rid for r in records} == {r.rid for r in (*online, *offline)}
    for record in records:
        assert record.is_finished, record
        assert record.num_output_tokens == 6
        assert record.num_prompt_tokens == 50
        assert record.arrival_s <= record.sent_s < record.first_token_s <= record.finish_s


@pytest.mark.parametrize("client", [OfflineClient.ALL, OfflineClient.AIMD])
def test_offline_requests_come_as_the_client_sends_them(server, client):
    online = [request(f"{client.value}-on{i}", RequestClass.ONLINE, 0.2 * i) for i in range(3)]
    offline = [request(f"{client.value}{i}", RequestClass.OFFLINE, 0.0) for i in range(8)]
    records = run(server, online, offline, client=client)
    assert len(records) == 11 and all(record.is_finished for record in records)
    if client is OfflineClient.ALL:
        assert {r.arrival_s for r in records if r.request_class is RequestClass.OFFLINE} == {0.0}


def test_offline_work_comes_before_the_window_and_online_requests_are_followed_beyond_it(server):
    online = [
        request("in", RequestClass.ONLINE, 0.5, num_tokens=400),
        request("after", RequestClass.ONLINE, 1.5),
    ]
    offline = [request(f"beside{i}", RequestClass.OFFLINE, 0.0, num_tokens=40) for i in range(99)]
    records = run(server, online, offline, duration_s=1.0, lead_s=1.0, grace_s=60.0)
    beside = [r for r in records if r.request_class is RequestClass.OFFLINE]
    [followed] = [r for r in records if r.request_class is RequestClass.ONLINE]
    assert -1.0 <= beside[0].arrival_s < -0.5
    assert followed.rid == "in" and followed.is_finished and followed.finish_s > 1.0
    assert beside[-1].arrival_s > 1.0, "the job goes on beside it"


def test_a_reply_is_as_long_as_its_trace_says_though_the_server_is_told_a_limit(server):
    online = [
        request(f"limit{i}", RequestClass.ONLINE, 0.1 * i, max_new_tokens=1000) for i in range(4)
    ]
    records = run(server, online, [request("exact", RequestClass.OFFLINE, 0.0)])
    assert {r.rid: r.num_output_tokens for r in records} == {
        **{r.rid: 6 for r in online},
        "exact": 6,
    }
    assert all(r.is_finished for r in records)
    reasons = {r.rid: r.finish_reason for r in records}
    assert reasons.pop("exact") == "length" and set(reasons.values()) == {"stop"}


@pytest.mark.parametrize("max_new_tokens", [None, 500])
def test_the_next_turn_of_a_session_comes_after_the_answer_before_it_and_holds_it(
    server, max_new_tokens
):
    def turn(name, num_tokens, after=None):
        return TraceRequest(
            rid=f"{name}{max_new_tokens}",
            request_class=RequestClass.ONLINE,
            arrival_s=0.1,
            num_output_tokens=30,
            max_new_tokens=max_new_tokens,
            segments=(Segment(77 + (max_new_tokens or 0), num_tokens),),
            session="s",
            after=after and f"{after}{max_new_tokens}",
            think_s=0.5 if after else 0.0,
        )

    turns = [turn("a", 100), turn("b", 150, after="a"), turn("c", 200, after="b")]
    records = run(server, turns, duration_s=120.0)
    first, second, third = records
    assert [r.num_prompt_tokens for r in records] == [100, 150, 200]
    for before, after in ((first, second), (second, third)):
        assert after.arrival_s == pytest.approx(before.finish_s + 0.5)
        # All but the last token of the answer has KV; it too where the server went on.
        num_known = before.num_prompt_tokens + 30
        assert after.num_cached_tokens in (num_known - 1, num_known)


def test_what_is_unanswered_at_the_end_stays_open(server):
    offline = [request("long", RequestClass.OFFLINE, 0.0, num_tokens=15_000)]
    [record] = run(server, offline=offline, duration_s=4.0)
    assert record.is_open and 0 < record.num_output_tokens < 15_000


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_what_came_in_time_counts_also_where_the_client_was_late(monkeypatch, grace_s):
    async def check(live_run):
        pass

    async def stream(live_run, arrival):
        await asyncio.sleep(0.01)
        usage = {"completion_tokens": 1}
        yield {"usage": usage, "choices": [{"text": "x", "finish_reason": "length"}]}

    monkeypatch.setattr(live._LiveRun, "check", check)
    monkeypatch.setattr(live._LiveRun, "_stream", stream)
    online = [
        request(name, RequestClass.ONLINE, arrival_s, num_tokens=1)
        for name, arrival_s in (("first", 0.0), ("second", 0.2), ("too late", 0.6))
    ]
    stall = iter([0.7])
    records = asyncio.run(
        run_live(
            LiveTarget(base_url="http://127.0.0.1:9"),
            [online_client(online)],
            duration_s=0.5,
            grace_s=grace_s,
            on_progress=lambda progress: time.sleep(next(stall, 0.0)),
        )
    )
    in_time = {record.rid: record for record in records}  # either may be answered before the other
    assert sorted(in_time) == ["first", "second"]
    assert in_time["second"].is_finished == bool(grace_s)
    assert in_time["second"].sent_s > 0.5


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ServerError, match=r"no server at http://127\.0\.0\.1:9"):
        asyncio.run(run_live(LiveTarget(base_url="http://127.0.0.1:9"), [], duration_s=1.0))
    with pytest.raises(ConfigError, match="must begin with http"):
        LiveTarget(base_url="localhost:3000")


def test_a_reply_without_a_hit_counts_as_a_miss_once_the_server_reports_hits():
    hit, unknown = ended(0.0, (1.0,), num_cached_tokens=4), ended(0.0, (1.0,))
    assert [r.num_cached_tokens for r in with_misses([hit, unknown])] == [4, 0]
    assert [r.num_cached_tokens for r in with_misses([unknown])] == [None]
