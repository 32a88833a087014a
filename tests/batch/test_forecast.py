"""When batches will be finished: shares of the rate, slack, the chance to miss, the meter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.batch.batch_records import Status
from cosched.batch.forecast import (
    BatchLoad,
    _finish_times,
    forecasts,
)
from cosched.batch.rate import (
    EndedLine,
    Rate,
    RateMeter,
    Replies,
    RunningLine,
    WorkProgress,
    octave,
    past_rate,
)
from cosched.core.shares import share_of, share_path
from tests.batch.stand_in import Clock
from tests.batch.test_store import batch_of

RATE = Rate(tokens_per_s=100.0, spread=0.3, tokens_per_byte=0.25)


NAMES = ["a/x", "a/y", "b/x", "/x", "/y"]
ALONE = share_of(share_path(""), {})


@st.composite
def loads(draw):
    return [
        BatchLoad(
            batch_id=str(n),
            share=share_of(share_path(draw(st.sampled_from(NAMES))), {}),
            due_s=draw(st.floats(1.0, 1e6)),
            num_tokens=draw(st.floats(0.0, 1e7)),
        )
        for n in range(draw(st.integers(1, 8)))
    ]


@given(found=loads(), margin_s=st.sampled_from([0.0, 600.0]))
def test_all_work_is_done_when_the_rate_has_done_it_and_no_batch_before(found, margin_s):
    told = forecasts(found, rate=RATE, margin_s=margin_s)
    assert told.keys() == {load.batch_id for load in found}
    all_s = sum(load.num_tokens for load in found) / RATE.tokens_per_s
    assert max(one.finish_s for one in told.values()) == pytest.approx(all_s, abs=1e-3)
    for load in found:
        one = told[load.batch_id]
        assert one.finish_s >= load.num_tokens / RATE.tokens_per_s * (1 - 1e-9)
        assert 0 <= one.miss_chance <= 1
        assert one.is_late == (one.slack_s < margin_s)


@given(found=loads(), share=st.floats(0.0, 1.0))
def test_nothing_is_finished_before_what_is_at_the_scheduler(found, share):
    least_s = share * sum(load.num_tokens for load in found) / RATE.tokens_per_s
    plain = forecasts(found, rate=RATE, margin_s=600.0)
    told = forecasts(found, rate=RATE, margin_s=600.0, least_s=least_s)
    for load in found:
        before, after = plain[load.batch_id], told[load.batch_id]
        assert after.finish_s == (max(before.finish_s, least_s) if load.num_tokens else 0.0)
        assert after.slack_s == before.slack_s and after.miss_chance >= before.miss_chance


def paces(loads, tokens_per_s, level=0):
    """Tokens per second of each batch, by the weights at each level of the share paths."""
    if loads and level == len(loads[0].share.path):
        late = sorted((load for load in loads if load.is_late), key=lambda load: load.due_s)
        served = late[:1] or loads
        return {load.batch_id: tokens_per_s / len(served) for load in served}
    groups = {}
    for load in loads:
        groups.setdefault(load.share.path[level], []).append(load)
    weights = {name: group[0].share.weights[level] for name, group in groups.items()}
    found = {}
    for name, group in groups.items():
        part = tokens_per_s * weights[name] / sum(weights.values())
        found |= paces(group, part, level + 1)
    return found


def step_by_step(loads, tokens_per_s):
    """The same from one end of a batch to the next."""
    left = {load.batch_id: load.num_tokens for load in loads}
    finish, now_s = {}, 0.0
    while left:
        for name in [name for name, tokens in left.items() if tokens <= 0]:
            finish[name] = now_s
            del left[name]
        pace = paces([load for load in loads if load.batch_id in left], tokens_per_s)
        if not pace:
            break
        first = min(pace, key=lambda name: left[name] / pace[name])
        step_s = left[first] / pace[first]
        now_s += step_s
        for name in pace:
            left[name] -= pace[name] * step_s
        left[first] = 0.0  # whatever rounding left of it
    return finish


@given(found=loads(), data=st.data())
def test_times_are_those_of_sharing_step_by_step(found, data):
    late = data.draw(st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    weights = {name: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for name in ("a", "a/x", "x")}
    found = [
        replace(load, is_late=is_late, share=share_of(load.share.path, weights))
        for load, is_late in zip(found, late, strict=True)
    ]
    expected = step_by_step(found, 100.0)
    assert _finish_times(found, 100.0) == pytest.approx(expected, rel=1e-6, abs=1e-3)


@given(found=loads(), more=st.floats(1.0, 1e6))
def test_more_work_is_finished_later_and_missed_more(found, more):
    first, *others = found
    longer = BatchLoad(
        batch_id=first.batch_id,
        share=first.share,
        due_s=first.due_s,
        num_tokens=first.num_tokens + more,
    )
    before = forecasts(found, rate=RATE, margin_s=0.0)[first.batch_id]
    after = forecasts([longer, *others], rate=RATE, margin_s=0.0)[first.batch_id]
    assert after.slack_s <= before.slack_s + 1e-6
    if before.is_late == after.is_late:
        assert after.miss_chance >= before.miss_chance - 1e-9


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_a_batch_with_a_hundred_times_the_time_it_needs_is_not_at_risk(spread):
    rate = Rate(tokens_per_s=100.0, spread=spread, tokens_per_byte=1.0)
    load = BatchLoad(batch_id="b", share=ALONE, due_s=3600.0, num_tokens=3400.0)
    told = forecasts([load], rate=rate, margin_s=600.0)["b"]
    assert told.finish_s == 34.0
    assert told.miss_chance < (0.001 if spread < 1 else 0.02)


def test_the_chance_to_miss_is_how_often_they_are_missed():
    rng = random.Random(1)
    spread, num_hours, runs = 0.4, 8, 2000
    for needed in (0.8, 0.9, 1.0):
        work = needed * num_hours * 3600 * 100
        load = BatchLoad(batch_id="b", share=ALONE, due_s=num_hours * 3600.0, num_tokens=work)
        rate = Rate(tokens_per_s=100.0, spread=spread, tokens_per_byte=1.0)
        told = forecasts([load], rate=rate, margin_s=0.0)["b"].miss_chance
        missed = sum(
            sum(rng.gauss(100, spread * 100) * 3600 for _ in range(num_hours)) < work
            for _ in range(runs)
        )
        # A little more than that: what is left of a batch is not known exactly either.
        assert missed / runs - 0.03 < told < missed / runs + 0.1


def measured(meter, clock, *, seconds, tokens_per_s, in_flight):
    for _ in range(seconds):
        clock.now_s += 1.0
        meter.look(in_flight)
        meter.finished(EndedLine(tokens_per_s, 0), num_bytes=4 * tokens_per_s)


def test_the_meter_measures_while_there_is_work():
    clock = Clock()
    meter = RateMeter(clock)
    assert meter.rate() is None
    measured(meter, clock, seconds=4, tokens_per_s=100, in_flight=200)
    assert meter.rate() is None, "too short a time"
    measured(meter, clock, seconds=600, tokens_per_s=100, in_flight=200)
    rate = meter.rate()
    assert rate.tokens_per_s == pytest.approx(100, rel=0.02)
    assert rate.spread < 0.05 and rate.tokens_per_byte == 0.25
    # The tail, then nothing at all, says nothing of how fast the engine is.
    measured(meter, clock, seconds=300, tokens_per_s=1, in_flight=20)
    clock.now_s += 3600
    meter.look(0)
    assert meter.rate().tokens_per_s == pytest.approx(100, rel=0.03)
    # It follows what is new, within an hour of work.
    measured(meter, clock, seconds=3700, tokens_per_s=20, in_flight=200)
    assert meter.rate().tokens_per_s == pytest.approx(20, rel=0.1)


def ended(**times):
    """A batch of 1,000 bytes and 300 tokens, three quarters of whose lines were answered."""
    return batch_of(
        num_bytes=1000,
        status=Status.CANCELLED,
        times=times,
        completed=15,
        failed=5,
        input_tokens=200,
        output_tokens=100,
        output_file_id="file-1",
    )


def test_earlier_batches_tell_a_rate_before_one_is_measured():
    assert past_rate([]) is None
    # At the same time for a while, then one alone after a pause: 10 to 29, and 100 to 109.
    some = [
        ended(in_progress=100, finalizing=109, completed=400),
        ended(in_progress=10, finalizing=24),
        ended(in_progress=20, cancelling=29, cancelled=35),
    ]
    rate = past_rate(some)
    # An output token is the work of three of the prompt.
    assert rate.tokens_per_s == 1500 / 30 and rate.tokens_per_byte == 1500 / (3 * 750)
    assert past_rate(some[:1]).tokens_per_s == 50


def test_the_rate_is_that_of_the_latest_half_and_counts_what_runs():
    clock = Clock()
    meter = RateMeter(clock)
    num_output = 0
    for second in range(200):
        clock.now_s += 1
        num_output += 10 if second < 100 else 30
        running = [RunningLine(1000, num_output, 100_000), RunningLine(1000, 5, 100_000)]
        meter.progressed(WorkProgress(running=running, num_iterations=20 * second, decode_s=0.02))
        meter.look(3)
        if second == 50:
            meter.finished(EndedLine(10, 0), num_bytes=40)
    rate = meter.rate()
    assert rate.tokens_per_s == pytest.approx(3 * 30, rel=0.1), "an output token is worth three"
    assert rate.iteration_s == pytest.approx(1 / 20, rel=0.05)
    assert rate.tail_iteration_s == pytest.approx(0.02, rel=0.05)
    # No line waits: what is measured now says nothing of a full engine.
    meter.finished(EndedLine(1000, 5), num_bytes=4000)
    for _ in range(100):
        clock.now_s += 1
        meter.progressed(WorkProgress(running=running[:1], num_iterations=4001, decode_s=0.02))
        meter.look(1)
    assert meter.rate().tokens_per_s == pytest.approx(3 * 30, rel=0.15)


def test_replies_that_run_make_the_expected_length_longer():
    ended = [EndedLine(1000, 100)] * 20
    beside = Replies(ended, [RunningLine(1000, 400, 500)] * 20)
    kind = octave(1000)
    assert Replies(ended, []).length(kind) == pytest.approx(100, rel=0.1)
    assert 250 <= beside.length(kind) <= 500
    assert 0 < beside.left() <= 20 * 100
    assert 0 < beside.tail(num_waiting={kind: 5}, num_steps=10, share=0.5) <= 500


def test_the_tail_is_the_longest_reply_and_shorter_the_longer_it_has_run():
    rng = random.Random(1)
    lengths = [rng.randint(1, 1000) for _ in range(400)]
    replies = Replies([EndedLine(1000, length) for length in lengths], [])
    kind = octave(1000)

    def tail(num_waiting, num_steps):
        return replies.tail(num_waiting={kind: num_waiting}, num_steps=num_steps, share=1.0)

    def seen(num_waiting, num_steps):
        found = [
            max(rng.choice(lengths) - num_steps * (1 - n / num_waiting) for n in range(num_waiting))
            for _ in range(500)
        ]
        return sum(max(one, 0.0) for one in found) / len(found)

    for num_waiting, num_steps in ((100, 0), (100, 1000), (10, 1000), (400, 5000)):
        expected = seen(num_waiting, num_steps)
        assert tail(num_waiting, num_steps) == pytest.approx(expected, rel=0.15)


def test_a_batch_is_late_when_its_last_replies_take_longer_than_its_window_leaves():
    load = BatchLoad(batch_id="b", share=ALONE, due_s=1000.0, num_tokens=3e4)
    assert not forecasts([load], rate=RATE, margin_s=0.0)["b"].is_late
    told = forecasts(
        [replace(load, end_s=lambda finish_s: finish_s + 800)], rate=RATE, margin_s=0.0
    )["b"]
    assert told.finish_s == 1100 and told.slack_s == -100 and told.is_late


def test_a_batch_ends_with_probability_nine_tenths_by_the_time_that_is_told():
    for spread in (0.05, 0.5, 3.0):
        rate = Rate(tokens_per_s=10.0, spread=spread, tokens_per_byte=1.0)
        load = BatchLoad(batch_id="a", share=ALONE, due_s=1e6, num_tokens=1000.0)
        found = forecasts([load], rate=rate, margin_s=0.0)["a"]
        assert found.finish_s == 100 < found.most_s
        due = forecasts([replace(load, due_s=found.most_s)], rate=rate, margin_s=0.0)["a"]
        assert due.miss_chance == pytest.approx(0.1, abs=0.01)
