"""Echo's choice of offline requests on hand-made views, over the real pool."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Slo
from cosched.papers.echo.policy import EchoPolicy, RegularEchoPolicy
from cosched.papers.hygen.policy import HygenPolicy
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.schedule.base import Budgets, PolicySettings
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online, prefilled
from tests.schedule.limits import decoding_in, has_offline_work, offline_limit_s, seconds_of

TTFT_S, TPOT_S = 1.0, 0.05


CAPS = make_caps(partial_decode=True, max_chunk_tokens=8192, max_prefill_tokens=8192)


SLO = Slo(ttft_s=TTFT_S, tpot_s=TPOT_S)
BUDGETS = Budgets(aim=1.0, burst=2.0, idle_share=0.3)


def plan_of(view, *, predictor=None, policy=EchoPolicy):
    settings = PolicySettings(caps=view.caps, slo=SLO, budgets=BUDGETS)
    view = replace(view, predictor=predictor or Linear())
    plan, _ = policy(settings).plan(view, None)
    validate(plan, view)
    return plan


def pool_of(*requests, boundaries=()):
    pool = PrefixPool(PoolConfig(bucket_boundaries=boundaries))
    for request in requests:
        pool.add(request)
    return pool


def waiting(rid, *parts, **fields):
    """An offline request of (letter, length) parts: equal parts in front are a shared prefix."""
    token_ids = array("q", (ord(letter) for letter, n in parts for _ in range(n)))
    return offline(rid, len(token_ids), token_ids=token_ids, **fields)


def cached(tokens, *, evictable=None):
    return Match(cached=tokens, evictable=tokens if evictable is None else evictable)


def running_online(rid="on", *, num_tokens=2):
    running = decoding(online(rid, 100, max_new_tokens=200), num_tokens)
    return replace(running, first_token_s=0.0)


def test_what_is_cached_comes_before_what_is_not():
    pool = pool_of(
        waiting("new", ("a", 300)), waiting("hit", ("b", 900), ("x", 50)), boundaries=(500,)
    )
    view = FakeView(caps=CAPS, offline=pool, cached={"hit": cached(900)})
    assert list(plan_of(view).prefill) == ["hit", "new"]


@pytest.mark.parametrize("policy", [EchoPolicy, HygenPolicy])
def test_heads_are_computed_once_and_in_every_bucket_the_others_follow(policy):
    pool = pool_of(
        waiting("a1", ("a", 400), ("x", 20)),
        waiting("a2", ("a", 400), ("y", 20)),
        waiting("a3", ("a", 400), ("z", 220)),
        waiting("b1", ("b", 500)),
        boundaries=(450,),
    )
    view = FakeView(caps=CAPS, offline=pool)
    first = plan_of(view, policy=policy).prefill
    assert "b1" in first and len([rid for rid in first if rid[0] == "a"]) == 1
    later = replace(view, cached={rid: cached(400) for rid in ("a1", "a2", "a3")})
    assert set(plan_of(later, policy=policy).prefill) == {"a1", "a2", "a3", "b1"}


@pytest.mark.parametrize("policy", [EchoPolicy, HygenPolicy])
def test_those_whose_head_is_still_on_its_way_wait_for_it(policy):
    pool = pool_of(waiting("a2", ("a", 400), ("y", 20)), waiting("b1", ("b", 500)))
    on_its_way = prefilled(waiting("a1", ("a", 400), ("x", 20)), 420)
    view = FakeView(caps=CAPS, running=(on_its_way,), offline=pool)
    assert list(plan_of(view, policy=policy).prefill) == ["b1"]


def test_a_long_context_waits_where_the_longest_makes_the_iteration_long():
    pool = pool_of(waiting("long", ("a", 2100)), waiting("short", ("b", 900)), boundaries=(1000,))
    view = FakeView(
        caps=replace(CAPS, max_running_requests=999),
        running=tuple(decoding(offline(f"o{i}", 60)) for i in range(400)),
        offline=pool,
        cached={"long": cached(1000)},
        total_kv=99_999,
    )

    def first(longest_s):
        predictor = Linear(fixed_s=0.01, token_s=1e-5, longest_s=longest_s)
        return next(iter(plan_of(view, predictor=predictor).prefill))

    assert first(longest_s=0.0) == "long"
    assert first(longest_s=1e-4) == "short"


@pytest.mark.parametrize(("context", "regular"), [(300, "short"), (2500, "long")])
def test_candidates_are_of_about_the_lengths_of_the_batch(context, regular):
    pool = pool_of(waiting("short", ("b", 200)), waiting("long", ("a", 2100)), boundaries=(1000,))
    running = tuple(decoding(offline(f"o{i}", context)) for i in range(4))
    view = FakeView(caps=CAPS, running=running, offline=pool, total_kv=99_999)

    def first(policy, **fields):
        return next(iter(plan_of(replace(view, **fields), policy=policy).prefill))

    assert first(EchoPolicy) == "long", "it has the best score"
    assert first(RegularEchoPolicy) == regular
    assert first(RegularEchoPolicy, cached={"long": cached(2000)}) == "long", "it is cached"


def test_evicting_what_another_would_reuse_counts_against_a_candidate():
    pool = pool_of(
        waiting("hit", ("b", 3000), ("x", 300)), waiting("big", ("a", 3500)), boundaries=(3400,)
    )
    roomy = FakeView(
        caps=CAPS, offline=pool, cached={"hit": cached(3000)}, evictable_kv=3000, total_kv=99_999
    )
    predictor = Linear(fixed_s=0.2, token_s=1e-6)
    assert next(iter(plan_of(roomy, predictor=predictor).prefill)) == "big"
    tight = replace(roomy, total_kv=4000)
    assert next(iter(plan_of(tight, predictor=predictor).prefill)) == "hit"


def test_a_candidate_that_finds_no_room_does_not_stop_the_others():
    pool = pool_of(
        waiting("big", ("a", 900), max_new_tokens=4000),
        waiting("small", ("b", 100)),
        boundaries=(500,),
    )
    plan = plan_of(FakeView(caps=CAPS, offline=pool, total_kv=2000))
    assert list(plan.prefill) == ["small"]
    assert plan.skipped == {"big": SkipReason.MEMORY_BUDGET}


def test_the_shortest_contexts_decode_when_not_all_can():
    old_and_long = decoding(offline("long", 5000), 3)
    others = [decoding(offline(f"o{i}", 50 + i), 3) for i in range(400)]
    view = FakeView(
        caps=replace(CAPS, max_running_requests=999),
        running=(running_online(num_tokens=1), old_and_long, *others),
        total_kv=999_999,
    )
    plan = plan_of(view, predictor=Linear(token_s=0.0002))
    assert 1 < len(plan.paused) < 400
    assert plan.paused == {"long", *(f"o{i}" for i in range(401 - len(plan.paused), 400))}


def test_who_loses_least_is_stopped_for_an_online_request():
    running = (
        decoding(offline("a", 90), 2),
        decoding(offline("b", 30), 2),
        decoding(offline("c", 60), 2),
    )
    view = FakeView(
        caps=replace(CAPS, max_running_requests=3),
        running=running,
        online=[online("new", 50)],
        offline=pool_of(),
    )
    plan = plan_of(view)
    assert [p.rid for p in plan.preempt] == ["b"]
    assert plan.prefill.keys() == {"new"}


@st.composite
def views(draw):
    """Views with a pool of some buckets, shared prefixes, some of them cached, and other work."""
    heads = draw(st.lists(st.integers(1, 900), min_size=1, max_size=4))
    requests, matches = [], {}
    for i, tail in enumerate(draw(st.lists(st.integers(1, 900), max_size=9))):
        head = i % len(heads)
        request = waiting(f"q{i}", (chr(97 + head), heads[head]), (chr(65 + i), tail))
        requests.append(request)
        if draw(st.booleans()):
            matches[request.rid] = cached(heads[head])
    num_online = draw(st.integers(0, 3))
    num_offline = draw(st.integers(0, 5))
    chunked = draw(st.booleans())
    return FakeView(
        caps=replace(CAPS, max_running_requests=draw(st.integers(9, 16))),
        running=(
            *(running_online(f"r{i}", num_tokens=2 + i) for i in range(num_online)),
            *(decoding(offline(f"d{i}", 40 * i + 1), 2) for i in range(num_offline)),
        ),
        unfinished=(prefilled(waiting("u", ("u", 900)), 300),) if chunked else (),
        online=[online("w", 50)] if draw(st.booleans()) else [],
        offline=pool_of(
            *requests, boundaries=tuple(draw(st.sampled_from([(), (300,), (200, 700)])))
        ),
        cached=matches,
        evictable_kv=sum(heads),
        total_kv=draw(st.integers(4000, 20_000)),
        now_s=(now_s := draw(st.floats(0, 0.2))),
        start_s=now_s,
    )


@given(view=views(), token_s=st.floats(1e-6, 1e-3), longest_s=st.sampled_from([0.0, 1e-5]))
def test_offline_work_keeps_the_limits_and_running_requests_come_before_waiting_ones(
    view, token_s, longest_s
):
    view = replace(view, predictor=Linear(token_s=token_s, longest_s=longest_s))
    plan = plan_of(view, predictor=view.predictor)
    if any(rid.startswith("q") for rid in plan.prefill):
        assert not plan.paused
    if has_offline_work(plan, view) and len(decoding_in(plan, view)) + len(plan.prefill) > 1:
        # What is alone runs however long it takes.
        assert seconds_of(plan, view) <= offline_limit_s(view, SLO, BUDGETS) + 1e-9


@given(view=views(), token_s=st.floats(1e-6, 1e-4), longest_s=st.sampled_from([0.0, 1e-5]))
def test_the_first_admission_has_the_best_score_of_all_that_could_be_made(view, token_s, longest_s):
    predictor = Linear(token_s=token_s, longest_s=longest_s)
    view = replace(view, running=(), unfinished=(), online=(), predictor=predictor)
    admitted = list(plan_of(view, predictor=predictor).prefill)
    candidates = {}
    for bucket, requests in enumerate(iter(view.offline).candidates(2)):
        for request in requests:
            alone = plan_of(replace(view, offline=pool_of(request)), predictor=predictor)
            if alone.prefill:
                candidates[request.rid] = (bucket, request, alone)
    assert bool(admitted) == bool(candidates)
    reusable = {}
    for bucket, request, _ in candidates.values():
        reusable[bucket] = max(reusable.get(bucket, 0), view.match(request).evictable)

    def score(rid):
        bucket, request, alone = candidates[rid]
        match = view.match(request)
        of_others = sum(n for other, n in reusable.items() if other != bucket)
        uncached = request.num_prompt_tokens - match.cached
        need = uncached + request.max_new_tokens + view.caps.page_size + match.evictable + 1
        lost = min(max(of_others - (view.kv.headroom - need), 0), of_others)
        return (alone.prefill[rid] + match.cached - lost) / seconds_of(alone, view)

    if admitted:
        assert score(admitted[0]) == pytest.approx(max(map(score, candidates)), rel=1e-9)
