"""The live driver against a real server."""

import asyncio

import pytest

from cosched.benchmark.live import LiveTarget, ServerError, run_live, with_misses
from cosched.core.request import RequestClass
from cosched.errors import ConfigError
from cosched.metrics.records import RequestRecord
from cosched_traces.workload import Segment, TraceRequest


def request(rid, request_class, arrival_s, num_tokens=6):
    return TraceRequest(
        rid=rid,
        request_class=request_class,
        arrival_s=arrival_s,
        num_output_tokens=num_tokens,
        segments=(Segment(1, 40), Segment(hash(rid) % 1000 + 2, 10)),
    )


def test_both_classes_are_sent_and_recorded(server):
    online = [request(f"on{i}", RequestClass.ONLINE, 0.2 * i) for i in range(5)]
    offline = [request(f"off{i}", RequestClass.OFFLINE, 0.0) for i in range(12)]
    records = asyncio.run(
        run_live(
            LiveTarget(base_url=server.url, vocab_size=1000),
            online=online,
            offline=offline,
            offline_concurrency=4,
            duration_s=60.0,
        )
    )
    assert {r.rid for r in records} == {r.rid for r in (*online, *offline)}
    for record in records:
        assert record.is_finished, record
        assert record.num_output_tokens == 6
        assert record.num_prompt_tokens == 50
        assert record.arrival_s < record.first_token_s <= record.finish_s


def test_the_next_turn_of_a_session_comes_after_the_answer_before_it_and_holds_it(servers):
    server = servers.get("--cosched-policy", "hygen", "--enable-cache-report")

    def turn(rid, num_tokens, after=None):
        return TraceRequest(
            rid=rid,
            request_class=RequestClass.ONLINE,
            arrival_s=0.1,
            num_output_tokens=30,
            segments=(Segment(77, num_tokens),),
            session="s",
            after=after,
            think_s=0.5 if after else 0.0,
        )

    turns = [turn("a", 100), turn("b", 150, after="a"), turn("c", 200, after="b")]
    records = asyncio.run(
        run_live(
            LiveTarget(base_url=server.url, vocab_size=1000),
            online=turns,
            offline=[],
            offline_concurrency=1,
            duration_s=120.0,
        )
    )
    first, second, third = records
    assert [r.num_prompt_tokens for r in records] == [100, 150, 200]
    for before, after in ((first, second), (second, third)):
        assert after.arrival_s == pytest.approx(before.finish_s + 0.5)
        # All but the last token of the answer has KV.
        assert after.num_cached_tokens == before.num_prompt_tokens + 30 - 1


def test_what_is_unanswered_at_the_end_stays_open(server):
    offline = [request("long", RequestClass.OFFLINE, 0.0, num_tokens=4000)]
    [record] = asyncio.run(
        run_live(
            LiveTarget(base_url=server.url, vocab_size=1000),
            online=[],
            offline=offline,
            offline_concurrency=1,
            duration_s=1.5,
        )
    )
    assert record.is_open and 0 < record.num_output_tokens < 4000


def test_a_server_that_is_not_there_is_named():
    target = LiveTarget(base_url="http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"no server at http://127\.0\.0\.1:9"):
        asyncio.run(run_live(target, online=[], offline=[], offline_concurrency=1, duration_s=1.0))
    with pytest.raises(ConfigError, match="must begin with http"):
        LiveTarget(base_url="localhost:3000")


def test_a_reply_without_a_hit_counts_as_a_miss_once_the_server_reports_hits():
    def done(rid, num_cached):
        return RequestRecord(
            rid=rid,
            request_class=RequestClass.ONLINE,
            arrival_s=0.0,
            num_prompt_tokens=8,
            num_output_tokens=2,
            first_token_s=1.0,
            finish_s=2.0,
            num_cached_tokens=num_cached,
        )

    assert [r.num_cached_tokens for r in with_misses([done("a", 4), done("b", None)])] == [4, 0]
    assert [r.num_cached_tokens for r in with_misses([done("a", None)])] == [None]
