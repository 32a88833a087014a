"""EcoServe on hand-made views, and on an engine of a few lines that follows its plans."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.plan import PreemptMode, SkipReason
from cosched.core.request import RequestClass, Slo
from cosched.core.view import Ended, OfflineLimits
from cosched.errors import ConfigError
from cosched.memory.kv_memory import promised_tokens
from cosched.papers.ecoserve.config import EcoConfig
from cosched.papers.ecoserve.generation_plan import EcoOptions, Generations
from cosched.papers.ecoserve.policy import EcoServePolicy
from cosched.schedule.base import PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, decoding, make_caps, offline, online

CAPS = make_caps(max_running_requests=512, partial_decode=True, promises=True)
FREELY = EcoConfig(reserve=0.0, buffer=0.0)
PAPER = EcoConfig()
PLAIN = EcoOptions(synced=False, ordered=False, pipeline=False)
LATER = Slo(deadline_s=600.0)


@dataclass(kw_only=True)
class KnownLengths(FakeView):
    """lengths: rid -> tokens of the whole output. hosts: rid of a guest -> rid of its host."""

    caps: object = CAPS
    lengths: dict[str, int] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)

    def length(self, request):
        left = max(self.lengths[request.rid] - request.num_output_tokens, 1)
        return LengthEstimate(left, left)

    def reserve_of(self, request):
        promise = self.promises.get(request.rid)
        if promise is None or request.num_computed_tokens < request.num_prompt_tokens:
            return 0
        taken = {}
        for guest in self.running:
            if guest.rid in self.hosts:
                host = next((r for r in self.running if r.rid == self.hosts[guest.rid]), None)
                if host is not None:
                    left = self.promises[host.rid] - host.num_output_tokens
                    left -= sum(taken.get(rid, 0) for rid, h in self.hosts.items() if h == host.rid)
                    num_taken = guest.num_output_tokens - self.promises[guest.rid]
                    taken[guest.rid] = max(min(num_taken, left), 0)
        lent = sum(n for rid, n in taken.items() if self.hosts[rid] == request.rid)
        kept = promised_tokens(promise - request.num_output_tokens)
        return kept - lent - taken.get(request.rid, 0)


def gt(rid, length, *, num_prompt_tokens=20, make=offline, num_output_tokens=1, **fields):
    """Past its prefill; `length`: tokens of its whole output."""
    request = make(rid, num_prompt_tokens, max_new_tokens=10_000, **fields)
    return decoding(request, num_output_tokens), length


def view_of(*gts, **fields):
    lengths = {request.rid: length for request, length in gts} | fields.pop("lengths", {})
    promises = {request.rid: request.num_output_tokens for request, _ in gts}
    return KnownLengths(
        running=tuple(request for request, _ in gts),
        lengths=lengths,
        promises=promises | fields.pop("promises", {}),
        **fields,
    )


def planned(view, state=None, *, config=FREELY, options=PLAIN):
    slo = Slo(ttft_s=1.0, tpot_s=0.05)
    policy = EcoServePolicy(PolicySettings(caps=view.caps, slo=slo, own=config), options)
    plan, after = policy.plan(view, state or policy.initial)
    validate(plan, view)
    return plan, after


def active(plan, view):
    stopped = {stop.rid for stop in plan.preempt}
    return {r.rid for r in view.running} - plan.paused - stopped


# Decoupling


def test_an_output_runs_once_kv_for_all_of_it_is_set_aside():
    view = view_of(gt("a", 40), gt("b", 60), total_kv=130)
    plan, _ = planned(view)
    # 40 tokens are held by the prompts; 39 + 1 and 59 + 1 are set aside, of 90.
    assert active(plan, view) == {"a"} and plan.promise == {"a": 40}
    assert plan.skipped["b"] is SkipReason.MEMORY_BUDGET
    bigger = replace(view, total_kv=150)
    plan, _ = planned(bigger)
    assert active(plan, bigger) == {"a", "b"} and plan.promise == {"a": 40, "b": 60}


def test_the_reserve_is_for_prompts():
    config = EcoConfig(reserve=0.5)
    waits = view_of(gt("a", 60), gt("b", 60), total_kv=210)
    plan, _ = planned(waits, config=config)
    assert active(plan, waits) == {"a"}, "105 tokens are not for outputs"
    more = replace(
        waits, online=[online("p", 30, max_new_tokens=900)], lengths=waits.lengths | {"p": 500}
    )
    plan, _ = planned(more, config=config)
    assert plan.prefill == {"p": 30} and plan.promise["p"] == 0


def test_prompts_fill_the_iteration_up_to_the_forward_size():
    queue = [online(f"p{i}", 100, max_new_tokens=9) for i in range(9)]
    caps = replace(CAPS, max_chunk_tokens=4096, max_prefill_tokens=8192)
    view = KnownLengths(caps=caps, online=queue, lengths={r.rid: 5 for r in queue})
    plan, state = planned(view)
    assert state.forward_size == 896, "95 % of the linear model's best rate"
    assert [*plan.prefill.values()] == [100] * 8 + [96], "whole ones, and one in part"


def test_the_operator_s_limit_counts_those_who_are_admitted():
    queue = [
        offline("no-kv", 300, max_new_tokens=9),
        offline("fits", 40, max_new_tokens=9),
        offline("too-many", 40, max_new_tokens=9),
    ]
    view = KnownLengths(
        offline=queue,
        lengths={r.rid: 5 for r in queue},
        offline_limits=OfflineLimits(max_running=1),
        total_kv=200,
    )
    plan, _ = planned(view, options=EcoOptions(synced=True, ordered=True, pipeline=False))
    assert [*plan.prefill] == ["fits"], "a refused one takes no place"
    full = replace(view, offline_limits=OfflineLimits(max_running=0))
    assert not planned(full)[0].prefill


# Groups


def test_outputs_of_one_length_run_as_a_group_and_the_next_when_all_of_it_have_ended():
    synced = replace(PLAIN, synced=True)
    view = view_of(gt("a", 64), gt("long", 300), gt("b", 60), total_kv=330)
    plan, state = planned(view, options=synced)
    assert active(plan, view) == {"a", "b"} and state.groups["a"] == state.groups["b"]
    assert plan.promise == {"a": 64, "b": 64}, "all of a group until the longest ends"
    held = view.running[1]
    one_left = view_of(gt("a", 64, num_output_tokens=50), (held, 300), total_kv=2000)
    one_left = replace(one_left, promises={"a": 64, "long": 1}, ended=(ended("b"),))
    plan, after = planned(one_left, state, options=synced)
    assert active(plan, one_left) == {"a"}, "b has left room, but a goes on"
    by_request = msgspec.structs.replace(FREELY, replan_on="request")
    plan, _ = planned(one_left, state, options=synced, config=by_request)
    assert active(plan, one_left) == {"a", "long"}
    none_left = view_of((held, 300), total_kv=2000, ended=(ended("a"),))
    plan, _ = planned(none_left, after, options=synced)
    assert active(plan, none_left) == {"long"}


def ended(rid):
    return Ended(rid=rid, request_class=RequestClass.OFFLINE, num_tokens=1)


# Order


def test_whose_deadline_is_nearer_by_range_comes_first_then_who_holds_more_then_who_is_longer():
    ordered = replace(PLAIN, ordered=True)

    def with_deadline(deadline_s):
        return {"slo": Slo(deadline_s=deadline_s), "make": online}

    far = gt("far", 1000, num_prompt_tokens=900, **with_deadline(30))
    near = gt("near", 100, **with_deadline(1.0))
    holds = gt("holds", 100, num_prompt_tokens=300, **with_deadline(31))
    long = gt("long", 500, **with_deadline(32))
    short = gt("short", 100, **with_deadline(29))
    gts = [short, long, holds, near, far]
    first = []
    for _ in range(5):
        held = sum(request.num_computed_tokens for request, _ in gts)
        view = view_of(*gts, total_kv=held + 2 * len(gts) + max(n for _, n in gts))
        _, state = planned(view, options=ordered)
        chosen = next(iter(state.groups))
        first.append(chosen)
        gts = [pair for pair in gts if pair[0].rid != chosen]
    assert first == ["near", "far", "holds", "long", "short"]


def test_what_is_left_goes_to_the_longest_that_fits():
    ordered = replace(PLAIN, ordered=True)
    view = view_of(
        gt("a", 1000), gt("b", 900), gt("c", 201), gt("d", 301), total_kv=80 + 1000 + 350 + 4
    )
    plan, _ = planned(view, options=ordered)
    assert active(plan, view) == {"a", "d"}
    plan, _ = planned(view, options=PLAIN)
    assert active(plan, view) == {"a"}, "without the order nobody is passed over"


# Longer than expected


def test_an_output_that_outruns_its_promise_takes_of_the_reserve():
    config = EcoConfig(reserve=0.3)
    a, b = gt("a", 90, num_output_tokens=40), gt("b", 45, num_output_tokens=5)
    _, state = planned(view_of(a, b, total_kv=900), config=config)
    view = view_of(a, b, total_kv=180, promises={"a": 40, "b": 45})
    plan, _ = planned(view, state, config=config)
    assert plan.promise["a"] == 90, "what it is believed to need now"
    plan, _ = planned(replace(view, total_kv=165), state, config=config)
    assert plan.promise["a"] == 40 + 32, "a block, where there is no more"
    waits = EcoConfig(reserve=0.3, overrun="free")
    plan, after = planned(view, state, config=waits)
    assert active(plan, view) == {"b"} and "a" not in after.groups


def test_where_it_is_to_be_offloaded_it_is_stopped():
    config = EcoConfig(reserve=0.3, overrun="offload")
    a, b = gt("a", 90, num_output_tokens=40), gt("b", 45, num_output_tokens=5)
    _, state = planned(view_of(a, b, total_kv=900), config=config)
    view = view_of(a, b, total_kv=180, host_free=0, promises={"a": 40, "b": 45})
    plan, _ = planned(view, state, config=config)
    assert [(stop.rid, stop.mode) for stop in plan.preempt] == [("a", PreemptMode.CHECKPOINT)]


def test_where_nobody_can_be_promised_anything_the_last_stop_until_the_first_runs():
    view = view_of(gt("a", 80, num_prompt_tokens=60), gt("b", 80), gt("c", 80), total_kv=150)
    plan, _ = planned(view)
    assert [stop.rid for stop in plan.preempt] == ["c", "b"]
    assert active(plan, view) == {"a"} and plan.promise["a"] == 80
    alone = view_of(gt("a", 900, num_prompt_tokens=60), total_kv=110)
    plan, _ = planned(alone)
    assert active(plan, alone) == {"a"}, "who is alone runs whatever there is"


def test_an_offline_output_stops_for_an_online_one():
    chat = gt("chat", 90, make=online)
    job = gt("job", 60, num_output_tokens=20)
    _, state = planned(view_of(job, total_kv=900))
    view = view_of(job, chat, total_kv=130, promises={"job": 60, "chat": 1})
    plan, _ = planned(view, state)
    assert [stop.rid for stop in plan.preempt] == ["job"] and active(plan, view) == {"chat"}


def test_an_online_output_sits_out_no_longer_than_its_tpot_target_allows():
    job = gt("job", 900, make=online, slo=Slo(deadline_s=60.0))
    chat = gt("chat", 900, make=online, first_token_s=0.0)
    patient = gt("patient", 900, make=online, first_token_s=0.0, slo=Slo(deadline_s=60.0))

    def active_at(start_s):
        view = view_of(job, chat, patient, total_kv=60 + 900 + 6, start_s=start_s)
        view = replace(view, promises=view.promises | {"job": 900}, mean_iteration_s=0.01)
        state = Generations(groups={"job": 1}, is_due=False)
        return active(planned(view, state)[0], view)

    assert active_at(0.03) == {"job"}
    assert active_at(0.05) == {"job", "chat"}, "50 ms a token"


# Guests


def test_a_short_output_runs_in_the_second_half_of_a_long_one():
    pipeline = replace(PLAIN, pipeline=True)
    view = view_of(gt("host", 201), gt("guest", 91), gt("other", 120), total_kv=60 + 200 + 6)
    plan, state = planned(view, options=pipeline)
    assert active(plan, view) == {"host", "guest"}
    loan = plan.loans["guest"]
    assert (loan.lender, loan.offset) == ("host", 101)
    assert state.guests == {"guest": ("host", 101)}
    plan, _ = planned(view, options=pipeline, config=msgspec.structs.replace(FREELY, buffer=0.2))
    assert active(plan, view) == {"host"}, "90 tokens and the buffer are more than 100"


def test_online_requests_that_wait_for_tokens_are_no_guests():
    pipeline = replace(PLAIN, pipeline=True)
    host = gt("host", 401, make=online)

    def active_with(**slo):
        guest = gt("guest", 20, make=online, slo=Slo(**slo))
        view = view_of(host, guest, total_kv=40 + 400 + 4)
        return active(planned(view, options=pipeline)[0], view)

    assert active_with(deadline_s=60.0) == {"host", "guest"}
    assert active_with(deadline_s=1.0) == {"host"} == active_with()


def test_a_guest_whose_host_is_over_gets_kv_of_its_own():
    pipeline = replace(PLAIN, pipeline=True)
    view = view_of(gt("host", 201), gt("guest", 91), total_kv=244)
    _, state = planned(view, options=pipeline)
    guest = gt("guest", 91, num_output_tokens=30)
    after = view_of(guest, total_kv=243, promises={"guest": 1}, ended=(ended("host"),))
    plan, state = planned(after, state, options=pipeline)
    assert plan.promise["guest"] == 91 and not state.guests and "guest" in state.groups


def test_a_guest_that_is_still_there_when_its_host_needs_the_kv_is_stopped():
    pipeline = replace(PLAIN, pipeline=True)
    view = view_of(gt("host", 201), gt("guest", 91), total_kv=243)
    _, state = planned(view, options=pipeline)
    host, guest = gt("host", 201, num_output_tokens=101), gt("guest", 300, num_output_tokens=101)
    late = replace(
        view_of(host, guest, total_kv=243),
        promises={"host": 201, "guest": 1},
        hosts=carry_hosts(state),
    )
    plan, _ = planned(late, state, options=pipeline)
    assert [stop.rid for stop in plan.preempt] == ["guest"]
    roomy = replace(late, total_kv=900)
    plan, after = planned(roomy, state, options=pipeline)
    assert not plan.preempt and plan.promise["guest"] == 300 and not after.guests


def carry_hosts(state):
    return {guest: host for guest, (host, _) in state.guests.items()}


# All of it, followed step by step


class Follower:
    """An engine of a few lines: it does as planned, one token for each that runs, and checks that
    nobody writes where no memory is."""

    def __init__(self, requests, *, total_kv, told, page_size=1):
        """requests: (rid, prompt tokens, output tokens, make); told: rid -> the length believed."""
        self.caps = replace(CAPS, page_size=page_size)
        self.total_kv = total_kv
        self.lengths = told
        self.true = {rid: num_output for rid, _, num_output, _ in requests}
        self.waiting = [
            make(rid, num_prompt, max_new_tokens=max(self.true[rid], 1))
            for rid, num_prompt, _, make in requests
        ]
        self.running, self.unfinished, self.over = {}, {}, []
        self.promises, self.hosts, self.ended = {}, {}, []
        self.num_stopped = 0

    def view(self):
        return KnownLengths(
            caps=self.caps,
            total_kv=self.total_kv,
            running=tuple(self.running.values()),
            unfinished=tuple(self.unfinished.values()),
            online=[r for r in self.waiting if r.request_class is RequestClass.ONLINE],
            offline=[r for r in self.waiting if r.request_class is RequestClass.OFFLINE],
            lengths=self.lengths,
            promises=self.promises,
            hosts=self.hosts,
            ended=self.ended,
        )

    def follow(self, plan):
        self.promises = self.promises | dict(plan.promise)
        for rid in plan.promise:
            self.hosts.pop(rid, None)
        for rid, loan in plan.loans.items():
            self.hosts[rid] = loan.lender
            self.promises[rid] = self.running[rid].num_output_tokens
        for stop in plan.preempt:
            request = self.running.pop(stop.rid, None) or self.unfinished.pop(stop.rid)
            self.waiting.append(replace(request, num_computed_tokens=0))
            self.num_stopped += 1
        self.ended = []
        if plan.decodes:
            for rid in self.running.keys() - plan.paused:
                self._advance(rid)
        for rid, num_tokens in plan.prefill.items():
            request = self.unfinished.pop(rid, None)
            if request is None:
                request = next(r for r in self.waiting if r.rid == rid)
                self.waiting.remove(request)
            request = replace(request, num_computed_tokens=request.num_computed_tokens + num_tokens)
            total = request.num_prompt_tokens + request.num_output_tokens
            if request.num_computed_tokens < total:
                self.unfinished[rid] = request
            else:
                self.running[rid] = replace(
                    request, num_output_tokens=request.num_output_tokens + 1
                )
                self._end_if_over(rid)
        held = sum(
            r.num_computed_tokens for r in (*self.running.values(), *self.unfinished.values())
        )
        assert held <= self.total_kv, "there is no such memory"

    def _advance(self, rid):
        request = self.running[rid]
        self.running[rid] = replace(
            request,
            num_output_tokens=request.num_output_tokens + 1,
            num_computed_tokens=request.num_computed_tokens + 1,
        )
        self._end_if_over(rid)

    def _end_if_over(self, rid):
        if self.running[rid].num_output_tokens >= self.true[rid]:
            del self.running[rid]
            self.over.append(rid)
            self.ended.append(ended(rid))


def run_all(follower, options, config=PAPER, most=4000):
    slo = Slo(ttft_s=1.0, tpot_s=0.05)
    policy = EcoServePolicy(PolicySettings(caps=CAPS, slo=slo, own=config), options)
    state = policy.initial
    for _ in range(most):
        if not (follower.waiting or follower.running or follower.unfinished):
            return
        view = follower.view()
        plan, state = policy.plan(view, state)
        validate(plan, view)
        follower.follow(plan)
    raise AssertionError(f"not over: {follower.running.keys()} {len(follower.waiting)}")


VARIANTS = [
    EcoOptions(synced=synced, ordered=ordered, pipeline=pipeline)
    for synced, ordered, pipeline in itertools.product((False, True), repeat=3)
]
sets = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 70), st.sampled_from([online, offline])),
    min_size=1,
    max_size=14,
)


@settings(deadline=None)
@given(sets, st.sampled_from(VARIANTS), st.data())
def test_everybody_ends_and_no_memory_is_written_twice(drawn, options, data):
    """Lengths are believed anything between a fifth and five times what they are."""
    requests = [(f"r{i}", prompt, output, make) for i, (prompt, output, make) in enumerate(drawn)]
    factors = data.draw(
        st.lists(st.floats(0.2, 5.0), min_size=len(requests), max_size=len(requests))
    )
    told = {r[0]: max(round(r[2] * f), 1) for r, f in zip(requests, factors, strict=True)}
    least = max(prompt + output for _, prompt, output, _ in requests) + 8
    follower = Follower(requests, total_kv=least + data.draw(st.integers(0, 400)), told=told)
    config = EcoConfig(
        reserve=data.draw(st.sampled_from([0.0, 0.03, 0.3])),
        buffer=data.draw(st.sampled_from([0.0, 0.15])),
        overrun=data.draw(st.sampled_from(["reserve", "free", "offload"])),
        replan_on=data.draw(st.sampled_from(["group", "request"])),
    )
    run_all(follower, options, config)
    assert sorted(follower.over) == sorted(rid for rid, *_ in requests)


@settings(deadline=None)
@given(sets, st.sampled_from(VARIANTS), st.integers(0, 300))
def test_where_lengths_are_known_nobody_is_ever_stopped(drawn, options, more):
    """One class, or an online request may stop an offline one."""
    requests = [(f"r{i}", prompt, output, offline) for i, (prompt, output, _) in enumerate(drawn)]
    least = max(prompt + output for _, prompt, output, _ in requests) + 8
    follower = Follower(requests, total_kv=least + more, told={r[0]: r[2] for r in requests})
    run_all(follower, options)
    assert follower.num_stopped == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reserve": 1.0}, "reserve 1.0 is not from 0"),
        ({"buffer": -0.1}, "buffer -0.1"),
        ({"overrun": "swap"}, "overrun 'swap' is unknown"),
        ({"replan_on": "never"}, "replan_on 'never' is unknown"),
        ({"block": 0}, "block 0 is below 1"),
        ({"slo_scale": 0.0}, "slo_scale 0.0"),
    ],
)
def test_what_is_configured_is_checked(wrong, said):
    with pytest.raises(ConfigError, match=said):
        EcoConfig(**wrong)
