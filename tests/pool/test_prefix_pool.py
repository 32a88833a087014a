"""The offline pool in prefix order: order, fairness, deadlines, buckets, figures."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from array import array
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.request import Slo
from cosched.errors import ConfigError
from cosched.pool.buckets import SAMPLE_SIZE, quantile_boundaries
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.pool.radix import pack
from tests.pool.integrity import check_pool
from tests.pool.naive_pool import NaivePool
from tests.pool.prefixes import prefixed, shared_len

CONFIGS = {
    "prefix order": PoolConfig(utility_ratio=1.0),
    "arrival": PoolConfig(utility_ratio=0.0),
    "mixed": PoolConfig(utility_ratio=0.7, deadline_margin_s=20.0),
    "cached": PoolConfig(utility_ratio=0.9, least_shared=2),
    "buckets": PoolConfig(utility_ratio=0.9, bucket_boundaries=(3, 6), deadline_margin_s=20.0),
}

seeds = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])


def max_passed_over(config, num_older):
    """After how many admissions of others a request goes at the latest (docs/architecture.md).
    num_older: older requests that waited when it came, and those that came back since."""
    share = 1 - Fraction(config.utility_ratio).limit_denominator(1000)
    return math.ceil((num_older + 1) / share) - 1


def filled(config, requests):
    pool = PrefixPool(config)
    for request in requests:
        pool.add(request)
    return pool


def in_bucket(pool, index):
    return [place.item for place in pool.buckets.trees[index]]


def drain(pool):
    """Admit everything, one at a time, always the first."""
    while len(pool):
        yield pool.remove(next(iter(pool)).rid)


def random_request(rng, **fields):
    ids = [rng.randrange(2) for _ in range(rng.randrange(10))]
    slo = Slo(deadline_s=rng.choice([None, None, 10.0, 25.0, 100.0]))
    return prefixed(ids, prefix_key=rng.choice([None, "salt"]), slo=slo, **fields)


@pytest.mark.parametrize("name", CONFIGS)
@seeds
def test_pool_orders_as_sorting_everything_anew_would(name, seed):
    rng = random.Random(seed)
    cached = []

    def num_cached(request):
        return max((shared_len(request, other) for other in cached), default=0)

    known = num_cached if "cached" in name or "buckets" in name else None
    pool = PrefixPool(CONFIGS[name], num_cached=known)
    model = NaivePool(CONFIGS[name], num_cached=known)
    stopped = []
    for step in range(900):
        model.now_s += rng.random()
        pool.advance(model.now_s)
        busy = step % 150 >= 90
        weights = [1 if busy or len(pool) > 25 else 3, 1, 0.3, 0.5]
        verb = rng.choices(["add", "plan", "abort", "return", "online"], [*weights, 0.5])[0]
        if verb == "add":
            request = random_request(rng, arrival_s=model.now_s)
            pool.add(request)
            model.add(request)
        elif verb == "return" and stopped:
            request = stopped.pop(rng.randrange(len(stopped)))
            grown = replace(request, token_ids=request.token_ids + array("q", [rng.randrange(2)]))
            pool.add(grown)
            model.add(grown)
        elif verb == "online":
            probe = random_request(rng)
            pool.promote(probe)
            model.promote(probe)
            cached = [*cached[-3:], probe]
        elif verb == "abort" and model.waiting:
            request = rng.choice(model.waiting)
            assert pool.abort(request.rid) is request
            model.remove(request, admitted=False)
        elif verb == "plan":
            # Looks at some of the order and takes a part of what it saw.
            seen = list(itertools.islice(pool, rng.randrange(6)))
            for request in rng.sample(seen, rng.randrange(len(seen) + 1)):
                assert pool.remove(request.rid) is request
                model.remove(request, admitted=True)
                stopped.append(request)
        check_pool(pool)
        assert list(pool) == list(model.order())
        assert len(pool) == len(model.waiting)
        assert all(pool.get(r.rid) is r and r.rid in pool for r in model.waiting)


def documents(num_documents, num_questions, rng, *, head=40):
    """Requests of documents with questions, shuffled; the rid begins with the document."""
    heads = [[rng.randrange(1000) for _ in range(head)] for _ in range(num_documents)]
    pairs = list(itertools.product(range(num_documents), range(num_questions)))
    rng.shuffle(pairs)
    return [prefixed([*heads[d], 1000 + q], rid=f"{d}/{q}") for d, q in pairs]


def computed_ratio(requests):
    """Computed tokens over all tokens when each finds only its predecessor's KV."""
    hits = sum(max(0, shared_len(one, two)) for one, two in itertools.pairwise(requests))
    return 1 - hits / sum(len(request.token_ids) for request in requests)


def test_prefix_order_computes_each_head_once():
    rng = random.Random(0)
    requests = documents(10, 20, rng)
    pool = filled(PoolConfig(utility_ratio=1.0), requests)
    stats = pool.stats()
    ideal = computed_ratio(sorted(requests, key=lambda request: list(request.token_ids)))
    assert computed_ratio(list(pool)) == pytest.approx(ideal)
    assert computed_ratio(list(drain(pool))) == pytest.approx(ideal)
    assert stats.sharing_ratio == stats.expected_hit_ratio == pytest.approx(1 - ideal)
    assert computed_ratio(requests) > 5 * ideal


@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.95])
def test_the_expected_hit_ratio_is_met_where_stale_requests_bring_their_siblings(ratio):
    pool = filled(PoolConfig(utility_ratio=ratio), documents(40, 20, random.Random(0)))
    stats = pool.stats()
    assert stats.expected_hit_ratio == pytest.approx(ratio * stats.sharing_ratio)
    assert 1 - computed_ratio(list(drain(pool))) >= stats.expected_hit_ratio


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.75, 0.9, 0.99])
@seeds
def test_nobody_is_passed_over_more_often_than_the_bound(ratio, seed):
    rng = random.Random(seed)
    pool = PrefixPool(PoolConfig(utility_ratio=ratio, least_shared=1))
    passed, older, stopped, most = {}, {}, [], 0
    for _ in range(1500):
        for _ in range(rng.randrange(3)):
            if stopped and rng.random() < 0.3:
                request = stopped.pop(rng.randrange(len(stopped)))
                for rid in older:
                    older[rid] += request.arrival_seq < pool.get(rid).arrival_seq
                older[request.rid] = sum(
                    r.arrival_seq < request.arrival_seq for r in map(pool.get, passed)
                )
            else:
                # Every new request sorts before those that wait: prefix order alone starves them.
                request = prefixed([0, 0, rng.randrange(2)] if rng.random() < 0.8 else [9, 9])
                older[request.rid] = len(pool)
            passed[request.rid] = 0
            pool.add(request)
        if passed and rng.random() < 0.1:
            rid = rng.choice(sorted(passed))
            pool.abort(rid)
            del passed[rid], older[rid]
        # A plan looks further than it takes: first in order, first admitted.
        seen = list(itertools.islice(pool, rng.randrange(1, 6)))
        for request in seen[: rng.randrange(3)]:
            pool.remove(request.rid)
            stopped.append(request)
            del passed[request.rid], older[request.rid]
            for rid in passed:
                passed[rid] += 1
                most = max(most, passed[rid])
                assert passed[rid] <= max_passed_over(pool.config, older[rid])
    assert most >= 1


@pytest.mark.parametrize(("ratio", "bound"), [(0.5, 1), (0.75, 3), (0.9, 9)])
def test_the_bound_is_met_exactly_by_the_worst_case(ratio, bound):
    alone = prefixed([2])
    later = [prefixed([1, 1, n]) for n in range(bound + 2)]
    config = PoolConfig(utility_ratio=ratio, least_shared=2)
    pool = filled(config, [alone, *later])
    pool.promote(prefixed([1, 1]))
    assert max_passed_over(config, 0) == bound
    assert list(drain(pool)).index(alone) == bound


def test_the_cache_is_asked_once_per_shared_head():
    asked = []

    def num_cached(request):
        asked.append(request)
        return 4 if request.token_ids[0] == 3 else 0

    requests = [prefixed([n] * 4 + [q]) for q in range(5) for n in (1, 2, 3)]
    pool = PrefixPool(PoolConfig(utility_ratio=1.0, least_shared=4), num_cached=num_cached)
    for request in [*requests, *(prefixed([n, 0, 0, 0, 0]) for n in range(4, 9))]:
        pool.add(request)
    assert asked == requests[3:6]
    assert [request.token_ids[0] for request in pool][:5] == [3] * 5


def with_deadline(ids, deadline_s, **fields):
    return prefixed(ids, slo=Slo(deadline_s=deadline_s), **fields)


def test_a_deadline_raises_urgency_before_it_passes():
    crowd = [prefixed([1, n]) for n in range(5)]
    relaxed = with_deadline([3], 1000.0)
    hurried = with_deadline([2], 100.0)
    pool = filled(PoolConfig(utility_ratio=1.0, deadline_margin_s=30.0), [*crowd, relaxed, hurried])
    pool.advance(69.9)
    assert list(pool) == [*crowd, relaxed, hurried]
    pool.advance(70.0)
    assert list(pool) == [hurried, *crowd, relaxed]
    pool.advance(990.0)
    assert list(pool) == [hurried, relaxed, *crowd]


def test_buckets_part_requests_by_prompt_length_and_keep_a_returned_one_there():
    config = PoolConfig(utility_ratio=1.0, bucket_boundaries=(3, 6))
    requests = [prefixed([1] * n) for n in (1, 2, 3, 5, 6, 9)]
    pool = filled(config, requests)
    assert [[r.num_prompt_tokens for r in in_bucket(pool, i)] for i in range(3)] == [
        [1, 2],
        [3, 5],
        [6, 9],
    ]
    assert [(b.min_prompt_tokens, b.num_requests, b.num_tokens) for b in pool.stats().buckets] == [
        (0, 2, 3),
        (3, 2, 8),
        (6, 2, 15),
    ]
    stopped = pool.remove(requests[3].rid)
    grown = replace(stopped, token_ids=array("q", [1] * 8), num_output_tokens=3)
    pool.add(grown)
    assert in_bucket(pool, 1) == [grown, requests[2]]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 8))
def test_quantile_boundaries_divide_evenly(lengths, num_buckets):
    boundaries = quantile_boundaries(lengths, num_buckets)
    assert list(boundaries) == sorted(set(boundaries)) and len(boundaries) < num_buckets
    edges = [0, *boundaries, math.inf]
    sizes = [sum(low <= n < high for n in lengths) for low, high in itertools.pairwise(edges)]
    assert all(sizes)
    most_common = max(map(lengths.count, lengths))
    assert max(sizes) <= math.ceil(len(lengths) / num_buckets) + most_common


def test_boundaries_are_learned_from_the_first_requests_of_each_job():
    pool = PrefixPool(PoolConfig(utility_ratio=1.0, num_buckets=4))
    assert len(pool.stats().buckets) == 1
    for shortest in (1, 1000):
        first = None
        for n in range(SAMPLE_SIZE):
            boundaries = [bucket.min_prompt_tokens for bucket in pool.stats().buckets]
            assert max(boundaries) < shortest  # those of the last job, or one bucket for all
            pool.add(prefixed([n], num_prompt_tokens=shortest + 99 - n % 100))
            first = first or next(iter(pool))
        check_pool(pool)
        assert next(iter(pool)) is first  # which is one of the longest
        assert len(list(pool)) == SAMPLE_SIZE
        sizes = [bucket.num_requests for bucket in pool.stats().buckets]
        assert len(sizes) == 4 and max(sizes) - min(sizes) <= 16
        for request in list(pool):
            pool.remove(request.rid)


@pytest.mark.parametrize("boundaries", [None, (4, 7)])
def test_future_references_count_all_buckets(boundaries):
    rng = random.Random(0)
    pool = PrefixPool(PoolConfig(bucket_boundaries=boundaries))
    waiting = []
    for _ in range(200):
        waiting.append(random_request(rng))
        pool.add(waiting[-1])
        if rng.random() < 0.4:
            pool.remove(waiting.pop(rng.randrange(len(waiting))).rid)
        probe = random_request(rng)
        entries = pool.future_references(pack(probe.token_ids), probe.prefix_key)
        assert [e.prefix_len for e in entries] == sorted({e.prefix_len for e in entries} - {0})
        for num_tokens in range(1, len(probe.token_ids) + 1):
            sharing = [r for r in waiting if shared_len(probe, r) >= num_tokens]
            entry = next((entry for entry in entries if entry.prefix_len >= num_tokens), None)
            assert (0 if entry is None else entry.num_requests) == len(sharing)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("boundaries", [None, (4, 7)])
def test_skipping_leaves_out_those_that_share_and_nobody_else(ratio, boundaries):
    rng = random.Random(0)
    config = PoolConfig(utility_ratio=ratio, bucket_boundaries=boundaries, deadline_margin_s=20.0)
    for _ in range(150):
        requests = [random_request(rng) for _ in range(rng.randrange(1, 25))]
        pool = filled(config, requests)
        order, left, skipped = iter(pool), [], []
        for request in order:
            left.append(request)
            assert not any(shared_len(request, other) >= n for other, n in skipped)
            probe = rng.choice([request, random_request(rng)])
            if len(probe.token_ids) and rng.random() < 0.4:
                num_tokens = rng.randrange(1, len(probe.token_ids) + 1)
                order.skip_sharing(probe, num_tokens)
                skipped.append((probe, num_tokens))
        missing = [request for request in requests if request not in left]
        for request in missing:
            assert any(shared_len(request, other) >= n for other, n in skipped)


@pytest.mark.parametrize("boundaries", [(), (4, 7)])
def test_what_one_shares_is_the_most_that_another_of_its_bucket_begins_with_too(boundaries):
    rng = random.Random(1)
    for _ in range(150):
        requests = [random_request(rng) for _ in range(rng.randrange(1, 25))]
        pool = filled(PoolConfig(bucket_boundaries=boundaries), requests)
        order = pool.order()
        for request in requests:
            bucket = bisect_right(boundaries, request.num_prompt_tokens)
            others = [0] + [
                shared_len(request, other)
                for other in requests
                if other is not request
                and bisect_right(boundaries, other.num_prompt_tokens) == bucket
            ]
            assert order.num_shared(request) == max(others)


class Watched:
    """A request that says when it is looked at."""

    def __init__(self, request, seen):
        self._request, self._seen = request, seen

    def __getattr__(self, name):
        request = object.__getattribute__(self, "_request")
        self._seen.add(request.rid)
        return getattr(request, name)


def test_the_head_of_the_order_is_found_without_looking_at_the_others():
    seen = set()
    pool = filled(
        PoolConfig(utility_ratio=0.5, num_buckets=4),
        [Watched(request, seen) for request in documents(100, 20, random.Random(0))],
    )
    for _ in range(20):
        seen.clear()
        list(itertools.islice(pool, 5))
        assert len(seen) <= 10
        seen.clear()
        pool.remove(next(iter(pool)).rid)
        assert len(seen) <= 40  # neighbours in a sorted list, however many wait


def test_skipping_a_document_does_not_look_at_its_questions():
    seen = set()
    requests = documents(5, 400, random.Random(0))
    pool = filled(PoolConfig(utility_ratio=0.99), [Watched(request, seen) for request in requests])
    seen.clear()
    order, found = iter(pool), set()
    for request in order:
        found.add(request.rid.split("/")[0])
        order.skip_sharing(request, 40)
    assert len(found) == 5
    assert len(seen) <= 20


@pytest.mark.parametrize("shape", ["heads", "short, with deadlines", "forked everywhere"])
def test_memory_is_the_distinct_tokens_and_500_bytes_a_request(shape):
    """What a request costs besides its tokens depends on the tree's form."""
    rng = random.Random(0)
    count = 11_000  # just above a size at which the dicts have grown

    def tokens(num, vocabulary=150_000):
        return [rng.randrange(vocabulary) for _ in range(num)]

    heads = [tokens(900) for _ in range(57)]
    prompts = {
        "heads": lambda n: heads[n % 57] + tokens(8),
        "short, with deadlines": lambda n: tokens(8),
        "forked everywhere": lambda n: tokens(24, vocabulary=2),
    }
    slo = Slo(deadline_s=3600.0 if "deadlines" in shape else None)
    requests = [prefixed(prompts[shape](n), slo=slo) for n in range(count)]
    tracemalloc.start()
    try:
        pool = filled(PoolConfig(), requests)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stats = pool.stats()
    num_distinct = stats.num_tokens * (1 - stats.sharing_ratio)
    assert size <= 1.3 * 4 * num_distinct + 500 * count, f"{size / count:.0f} bytes a request"


def test_figures_of_the_pool():
    requests = [prefixed([1, 2, n], arrival_s=10.0 + n) for n in range(4)]
    pool = filled(PoolConfig(utility_ratio=0.5), requests)
    pool.advance(20.0)
    stats = pool.stats()
    assert (stats.num_requests, stats.num_tokens, stats.oldest_age_s) == (4, 12, 10.0)
    assert stats.sharing_ratio == pytest.approx(1 - 6 / 12)
    assert stats.expected_hit_ratio == pytest.approx(0.25)
    empty = PrefixPool(PoolConfig()).stats()
    assert (empty.num_requests, empty.oldest_age_s, empty.sharing_ratio) == (0, None, 0.0)


def test_a_request_is_in_the_pool_at_most_once():
    pool = PrefixPool(PoolConfig())
    request = prefixed([1])
    pool.add(request)
    with pytest.raises(AssertionError):
        pool.add(request)
    for take in (pool.remove, pool.abort):
        with pytest.raises(KeyError):
            take("absent")
    assert pool.get("absent") is None and "absent" not in pool
    assert list(pool) == [request]


@pytest.mark.parametrize(
    "values",
    [
        {"utility_ratio": -0.1},
        {"utility_ratio": 1.1},
        {"num_buckets": 0},
        {"deadline_margin_s": -1.0},
        {"bucket_boundaries": (0, 5)},
        {"bucket_boundaries": (5, 5)},
    ],
)
def test_wrong_values_are_named(values):
    (name,) = values
    with pytest.raises(ConfigError, match=name):
        PoolConfig(**values)


def test_one_that_is_urgent_or_due_is_the_only_candidate():
    old = prefixed([9, 9])
    crowd = [prefixed([1, n]) for n in range(20)]
    hurried = with_deadline([5], 10.0)
    config = PoolConfig(
        utility_ratio=0.75,
        least_shared=1,
        deadline_margin_s=4.0,
        bucket_boundaries=(2,),
    )
    pool = filled(config, [old, *crowd, hurried])
    pool.promote(prefixed([1]))
    assert len(iter(pool).candidates(2)) == 2
    pool.advance(7.0)
    order = iter(pool)
    assert order.candidates(2) == [[hurried]]
    order.take(hurried)
    assert old not in [r for bucket in order.candidates(2) for r in bucket]
    for request in crowd[:3]:
        order.take(request)
    assert order.candidates(2) == [[old]]
    order.take(old)
    assert [len(bucket) for bucket in order.candidates(2)] == [0, 2]


@given(
    tokens=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=20),
    steps=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 19), st.integers(0, 9))),
)
def test_candidates_are_the_first_of_each_bucket_that_are_neither_taken_nor_left_out(tokens, steps):
    pool = filled(PoolConfig(bucket_boundaries=(4, 7)), [prefixed(ids) for ids in tokens])
    order = iter(pool)
    buckets = [in_bucket(pool, index) for index in range(3)]
    start = pool.buckets.turn
    buckets = buckets[start:] + buckets[:start]
    gone = set()
    for per_bucket, pick, num_shared in steps:
        expected = [[r for r in bucket if r.rid not in gone] for bucket in buckets]
        candidates = order.candidates(per_bucket)
        assert candidates == [bucket[:per_bucket] for bucket in expected]
        shown = [request for bucket in candidates for request in bucket]
        if not shown:
            break
        taken = shown[pick % len(shown)]
        order.take(taken)
        gone.add(taken.rid)
        if 0 < num_shared <= len(taken.token_ids):
            order.skip_sharing(taken, num_shared)
            head = taken.token_ids[:num_shared]
            gone |= {
                r.rid for bucket in buckets for r in bucket if r.token_ids[:num_shared] == head
            }
    assert {request.rid for request in order}.isdisjoint(gone)
