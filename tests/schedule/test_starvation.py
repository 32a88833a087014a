"""No forecast of reply lengths, however wrong, keeps what the engine can hold waiting for ever."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.request import RequestClass, Slo
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.schedule.base import PolicySettings
from cosched.schedule.cosched import CoschedPolicy
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

CAPS = make_caps(promises=True, partial_decode=True, max_chunk_tokens=64)
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
TOTAL_KV = 600


def policy():
    return CoschedPolicy(PolicySettings(caps=CAPS, slo=SLO, offline_rate=None))


def pool_of(requests, **config):
    """They share no prefix."""
    pool = PrefixPool(PoolConfig(**config))
    pool.advance(0.0)
    for request in requests:
        pool.add(with_tokens(request))
    return pool


def with_tokens(request):
    first = request.arrival_seq * 1000
    return replace(request, token_ids=range(first, first + 1000))


class ToyEngine:
    """Runs plans on numbers: no cache, a token per decode. lengths: of each reply, true ones;
    forecast: of a request and its true length, the ends that the policy is told."""

    def __init__(self, requests, lengths, forecast):
        self.policy, self.lengths, self.forecast = policy(), lengths, forecast
        self.state = self.policy.initial
        self.waiting = {r.rid: with_tokens(r) for r in requests}
        self.running, self.unfinished = {}, {}
        self.pool = pool_of([r for r in requests if r.request_class is RequestClass.OFFLINE])
        self.now_s = 0.0

    def under_way(self):
        return [*self.running.values(), *self.unfinished.values()]

    def view(self):
        under_way = self.under_way()
        return FakeView(
            caps=CAPS,
            total_kv=TOTAL_KV,
            now_s=self.now_s,
            start_s=self.now_s,
            running=tuple(self.running.values()),
            unfinished=tuple(self.unfinished.values()),
            online=[r for r in self.waiting.values() if r.request_class is RequestClass.ONLINE],
            offline=self.pool,
            lengths={
                r.rid: self.forecast(r, self.lengths[r.rid])
                for r in (*self.waiting.values(), *under_way)
            },
            promises={r.rid: r.num_output_tokens for r in under_way},
        )

    def step(self):
        view = self.view()
        plan, self.state = self.policy.plan(view, self.state)
        validate(plan, view)
        assert plan.prefill or self.running or not self.waiting, "an engine is left idle"
        for stop in plan.preempt:
            request = (self.running if stop.rid in self.running else self.unfinished).pop(stop.rid)
            self.wait(replace(request, num_computed_tokens=0))
        decoding_now = [] if not plan.decodes else [*self.running]
        for rid, num_tokens in plan.prefill.items():
            self.prefill(rid, num_tokens)
        for rid in decoding_now:
            if rid not in plan.paused:
                self.generate(self.running[rid])
        while sum(r.num_computed_tokens for r in self.under_way()) > TOTAL_KV:
            # As SGLang does where online requests alone need more than there is.
            assert all(r.request_class is RequestClass.ONLINE for r in self.under_way())
            rid, request = self.running.popitem()
            self.wait(replace(request, num_computed_tokens=0))
        self.now_s += view.predictor.fixed_s

    def wait(self, request):
        self.waiting[request.rid] = request
        if request.request_class is RequestClass.OFFLINE:
            self.pool.add(with_tokens(request))

    def prefill(self, rid, num_tokens):
        request = self.unfinished.pop(rid, None) or self.waiting.pop(rid)
        if rid in self.pool:
            self.pool.remove(rid)
        request = replace(request, num_computed_tokens=request.num_computed_tokens + num_tokens)
        if request.num_computed_tokens == request.num_prompt_tokens + request.num_output_tokens:
            self.generate(request)
        else:
            self.unfinished[rid] = request

    def generate(self, request):
        num_output_tokens = request.num_output_tokens + 1
        self.running[request.rid] = replace(
            request,
            num_output_tokens=num_output_tokens,
            num_computed_tokens=request.num_prompt_tokens + num_output_tokens - 1,
            first_token_s=request.first_token_s or self.now_s,
            last_token_s=self.now_s,
        )
        if num_output_tokens == self.lengths[request.rid]:
            del self.running[request.rid]


factors = st.floats(-7.0, 7.0).map(math.exp)
sizes = st.tuples(st.booleans(), st.integers(1, 500), st.integers(1, 90), factors)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(sizes, min_size=1, max_size=8),
    spread=st.sampled_from([1.0, 5.0]),
)
def test_all_requests_end_whatever_factor_their_forecast_is_wrong_by(sizes, spread):
    """Each request has a factor of its own, a thousandth to a thousand."""

    def forecast(request, length):
        left = max(round(length * factor[request.rid]) - request.num_output_tokens, 1)
        ends = (left, round(left * spread))
        total = tuple(request.num_output_tokens + end for end in ends)
        return LengthEstimate(left, ends[-1], total)

    requests = [
        (offline if is_offline else online)(f"r{i}", num_prompt_tokens, max_new_tokens=90)
        for i, (is_offline, num_prompt_tokens, *_) in enumerate(sizes)
    ]
    lengths = {f"r{i}": length for i, (_, _, length, _) in enumerate(sizes)}
    factor = {f"r{i}": each for i, (*_, each) in enumerate(sizes)}
    engine = ToyEngine(requests, lengths, forecast)
    # One after the other with chunks of 64, or the least chunk of 16 beside others, ten times over.
    num_steps = 10 * sum(num // 16 + 2 + length for _, num, length, _ in sizes)
    for _ in range(num_steps):
        if not (engine.waiting or engine.running or engine.unfinished):
            return
        engine.step()
    raise AssertionError(f"after {num_steps} iterations: {engine.waiting} {engine.running}")


ENDLESS = LengthEstimate(50_000, 100_000, (100_000,))


def plan_beside_endless(waiting, *, total_kv, lengths=None, num=4, **config):
    """What is admitted beside replies of 100 tokens that are expected to get very long, and who is
    preempted for it."""
    running = [decoding(offline(f"long{i}", 50, max_new_tokens=10**6), 51) for i in range(num)]
    view = FakeView(
        caps=CAPS,
        total_kv=total_kv,
        running=tuple(running),
        offline=pool_of(waiting, **config),
        lengths=dict.fromkeys((r.rid for r in running), ENDLESS) | (lengths or {}),
        promises={r.rid: r.num_output_tokens for r in running},
    )
    plan, _ = policy().plan(view, policy().initial)
    validate(plan, view)
    return [*plan.prefill], [stop.rid for stop in plan.preempt]


SHORT = LengthEstimate(4, 4, (4,))


@pytest.mark.parametrize("config", [{}, {"utility_ratio": 0.0}])
def test_a_short_reply_passes_requests_that_lack_memory(config):
    """With `utility_ratio` 0 the oldest comes first: it is passed by what fits beside it."""
    ahead = [offline(f"ahead{i}", 50, max_new_tokens=10**6) for i in range(3)]
    waiting = [*ahead, offline("short", 20)]
    lengths = dict.fromkeys((r.rid for r in ahead), ENDLESS) | {"short": SHORT}
    admitted, preempted = plan_beside_endless(waiting, total_kv=700, lengths=lengths, **config)
    assert admitted == ["short"] and not preempted


@pytest.mark.parametrize(("total_kv", "passes"), [(400, False), (440, True)])
def test_what_passes_the_oldest_fits_beside_it(total_kv, passes):
    """Until it has ended, 10 iterations from now, all three would hold 432 tokens; the first
    itself needs 461."""
    waiting = [offline("first", 280, max_new_tokens=40), offline("short", 20, max_new_tokens=10)]
    admitted, _ = plan_beside_endless(waiting, total_kv=total_kv, num=1, utility_ratio=0.0)
    assert admitted == ["short"] * passes


def test_an_urgent_line_takes_the_place_of_others():
    line = offline("line", 60, slo=Slo(deadline_s=120.0), max_new_tokens=10)
    admitted, preempted = plan_beside_endless([line], total_kv=420)
    assert admitted == ["line"] and preempted == ["long3"]
    same = replace(line, slo=Slo())
    assert plan_beside_endless([same], total_kv=420) == ([], [])


def test_memory_for_decodes_is_taken_from_requests_that_are_not_urgent():
    urgent = decoding(offline("urgent", 50, slo=Slo(deadline_s=120.0)), 3)
    other = decoding(offline("other", 50), 3)
    running = (replace(other, arrival_seq=1), replace(urgent, arrival_seq=2))
    view = FakeView(caps=CAPS, total_kv=105, running=running, offline=pool_of([]))
    plan, _ = policy().plan(view, policy().initial)
    assert [stop.rid for stop in plan.preempt] == ["other"]


def test_an_unfinished_prompt_counts_as_other_work():
    """What lacks memory is set aside only while something runs that will end."""
    begun = with_tokens(prefilled(offline("begun", 200), 100))
    view = FakeView(
        caps=CAPS, total_kv=300, unfinished=(begun,), offline=pool_of([offline("off", 400)])
    )
    plan, _ = policy().plan(view, policy().initial)
    validate(plan, view)
    assert [*plan.prefill] == ["begun"]


def test_an_urgent_line_does_not_preempt_a_prefill_that_the_plan_continues():
    begun = with_tokens(prefilled(offline("begun", 120), 100))
    line = offline("line", 60, slo=Slo(deadline_s=120.0), max_new_tokens=10)
    running = (replace(decoding(offline("long", 60), 3), arrival_seq=5),)
    view = FakeView(
        caps=CAPS, total_kv=240, running=running, unfinished=(begun,), offline=pool_of([line])
    )
    plan, _ = policy().plan(view, policy().initial)
    validate(plan, view)
    assert "begun" in plan.prefill and [stop.rid for stop in plan.preempt] == ["long"]
