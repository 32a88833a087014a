"""Shares of tenants in the offline pool."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosched.core.shares import share_path
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.pool.tenants import MOST_TENANTS, TenantPool
from tests.pool.prefixes import prefixed
from tests.pool.test_prefix_pool import random_request

LAG_S = 1.0


def made(**options):
    return TenantPool(make_pool=lambda: PrefixPool(PoolConfig()), **{"lag_s": LAG_S, **options})


def of_tenant(tenant, request, owner=""):
    vars(request).update(tenant=tenant, share_path=share_path(tenant, owner), device_s=0.0)
    return request


def spend(request, seconds):
    vars(request)["device_s"] += seconds


def line(tenant, ids=(1,), **fields):
    return of_tenant(tenant, prefixed(ids, **fields))


class Device:
    """Serves `slots` requests at a time, each an equal share of every second; a request costs what
    `cost_s` says of its tenant."""

    def __init__(self, pool, cost_s, *, slots=4):
        self.pool, self.cost_s, self.slots = pool, cost_s, slots
        self.used_s = dict.fromkeys(cost_s, 0.0)
        self.running, self.admitted = [], []
        self.now_s = 0.0

    def step(self, step_s=0.05):
        pool = self.pool
        pool.advance(self.now_s)
        order = pool.order()
        while len(self.running) < self.slots and (request := next(order, None)) is not None:
            self.running.append(pool.remove(request.rid))
            self.admitted.append(request)
        self.now_s += step_s
        for request in list(self.running):
            share_s = step_s / len(self.running)
            spend(request, share_s)
            self.used_s[request.tenant] += share_s
        for request in list(self.running):
            if request.device_s >= self.cost_s[request.tenant]:
                self.running.remove(request)
                pool.ended(1, 0.0, request.rid)


@pytest.mark.parametrize("hostile_s", [0.001, 6.0])
def test_each_gets_its_share_whatever_its_requests_cost(hostile_s):
    """Half for a weight of two, a quarter each for the others, within the lag and a request."""
    pool = made(weights={"acme": 2.0})
    for _ in range(6000):
        pool.add(line("mallory"))
    for _ in range(400):
        pool.add(line("acme"))
        pool.add(line("bob"))
    device = Device(pool, {"mallory": hostile_s, "acme": 0.4, "bob": 0.4})
    while device.now_s < 50:
        device.step(0.01)
    most_off_s = 2 * (LAG_S + max(hostile_s, 0.4))
    for tenant, part in (("mallory", 0.25), ("acme", 0.5), ("bob", 0.25)):
        assert device.used_s[tenant] == pytest.approx(part * 50, abs=most_off_s), device.used_s


def test_the_hundred_lines_of_one_are_not_delayed_by_the_ten_thousand_of_another():
    pool = made()
    for _ in range(10_000):
        pool.add(line("many"))
    few = [line("few") for _ in range(100)]
    for request in few:
        pool.add(request)
    device = Device(pool, {"many": 0.1, "few": 0.1})
    while any(request.rid in pool for request in few):
        device.step()
    assert device.now_s < 2 * 100 * 0.1 + 3 * LAG_S, "twice what they take alone"


def test_tenants_of_a_key_share_what_the_key_gets():
    pool = made()
    for i in range(3000):
        pool.add(line(f"greedy/{i % 10}"))
        pool.add(line("modest"))
    device = Device(pool, {**{f"greedy/{i}": 0.2 for i in range(10)}, "modest": 0.2})
    while device.now_s < 60:
        device.step()
    assert device.used_s["modest"] == pytest.approx(30, abs=3)
    others = [used_s for tenant, used_s in device.used_s.items() if tenant != "modest"]
    assert max(others) - min(others) < 3


def test_what_a_tenant_did_not_use_is_not_saved():
    pool = made()
    device = Device(pool, {"early": 0.1, "late": 0.1})
    for _ in range(2000):
        pool.add(line("early"))
    while device.now_s < 40:
        device.step()
    for _ in range(2000):
        pool.add(line("late"))
    while device.now_s < 60:
        device.step()
    assert device.used_s["late"] == pytest.approx(10, abs=2)


def test_a_tenant_goes_on_with_its_prefixes_within_the_lag():
    pool = made()
    heads = {"a": (1, 2), "b": (3, 4)}
    for i in range(200):
        for tenant in "ab":
            pool.add(line(tenant, [heads[tenant][i % 2]] * 80 + [i]))
    device = Device(pool, {"a": 0.05, "b": 0.05}, slots=1)
    while device.now_s < 8:
        device.step()
    pairs = itertools.pairwise(device.admitted)
    switches = sum(one.tenant != other.tenant for one, other in pairs)
    assert 2 <= switches <= 9, "about once in a second"


def test_limits_of_a_key_hold_for_all_its_tenants():
    pool = made(most_running={"acme": 2})
    for i in range(10):
        pool.add(line(f"acme/{i % 3}"))
    device = Device(pool, {f"acme/{i}": 0.5 for i in range(3)}, slots=8)
    device.step()
    assert len(device.running) == 2
    pool.add(line("bob"))
    device.used_s["bob"], device.cost_s["bob"] = 0.0, 0.5
    device.step()
    assert len(device.running) == 3


def test_others_are_asked_where_no_request_of_a_tenant_fits_but_not_for_long():
    pool = made()
    for _ in range(300):
        pool.add(line("small"))
    pool.add(line("large"))
    device = Device(pool, {"small": 0.1, "large": 1.0})
    device.running = [pool.remove(next(pool.order()).rid)]

    def next_small():
        """The large one is asked and does not fit."""
        pool.advance(device.now_s)
        order = pool.order()
        while True:
            ((first, *_), *_) = order.candidates(1)
            if first.tenant == "small":
                return first
            if not order.ask_next():
                return None

    used_s = 0.0
    while (small := next_small()) is not None and used_s < 20:
        pool.remove(small.rid)
        spend(small, 0.1)
        used_s += 0.1
        pool.ended(1, 0.0, small.rid)
    assert LAG_S - 0.2 <= used_s <= LAG_S + 0.3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, LAG_S]))
def test_with_one_tenant_nothing_changes(seed, lag_s):
    rng = random.Random(seed)
    config = PoolConfig(utility_ratio=0.7, bucket_boundaries=(3, 6))
    plain, shared = (
        PrefixPool(config),
        TenantPool(make_pool=lambda: PrefixPool(config), lag_s=lag_s),
    )
    waiting, running = [], []
    for step in range(60):
        event = rng.random()
        if event < 0.5 or not waiting:
            request = running.pop() if running and rng.random() < 0.3 else random_request(rng)
            of_tenant("x" if lag_s else str(step), request)
            waiting.append(request)
            plain.add(request), shared.add(request)
        elif event < 0.9:
            assert [r.rid for r in plain.order()] == [r.rid for r in shared.order()]
            rid = next(plain.order()).rid
            running.append(plain.remove(rid))
            assert shared.remove(rid) is running[-1]
            waiting = [r for r in waiting if r.rid != rid]
            spend(running[-1], rng.random())
        else:
            gone = waiting.pop(rng.randrange(len(waiting)))
            plain.abort(gone.rid), shared.abort(gone.rid)
        plain.advance(float(step)), shared.advance(float(step))
        assert len(plain) == len(shared) and plain.stats() == shared.stats()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_is_in_one_pass_once_and_the_counts_return_to_nothing(seed):
    rng = random.Random(seed)
    pool = made(weights={"a": 3.0, "b/x": 2.0})
    waiting, running = {}, []
    names = ["a", "a/x", "b/x", "b/y", "", "/t", *(f"b/{n}" for n in range(80))]
    for step in range(80):
        event = rng.random()
        if event < 0.5:
            request = of_tenant(rng.choice(names), random_request(rng))
            waiting[request.rid] = request
            pool.add(request)
        elif event < 0.75 and waiting:
            request = pool.remove(next(pool.order()).rid)
            running.append(waiting.pop(request.rid))
        elif running:
            request = running.pop(rng.randrange(len(running)))
            spend(request, rng.random())
            if rng.random() < 0.5:
                pool.ended(3, 1.0, request.rid)
            else:
                waiting[request.rid] = request
                pool.add(request)
        pool.advance(float(step))
        assert sorted(r.rid for r in pool.order()) == sorted(waiting)
        assert pool.stats().num_requests == len(pool) == len(waiting)
    for rid in waiting:
        pool.abort(rid)
    for request in running:
        pool.ended(1, 0.0, request.rid)
    assert not any(s.num_active for s in (*pool.tenants.values(), *pool.shares.values()))
    assert not any(tenant.key.num_running for tenant in pool.tenants.values())


def test_weights_are_of_keys_and_of_tenants_within_them():
    """Also with many tenants, and with names that are those of another key or of a weight."""
    pool = made(weights={"bob": 5.0, "gold": 10.0, "acme/nightly": 3.0})
    names = ["acme/gold", "acme/bob", "acme/nightly", *(f"acme/z{n}" for n in range(20)), "bob/x"]
    for name in names:
        for _ in range(1200):
            pool.add(line(name))
    device = Device(pool, dict.fromkeys(names, 0.1))
    while device.now_s < 90:
        device.step()
    assert device.used_s["bob/x"] == pytest.approx(75, abs=3)
    assert device.used_s["acme/nightly"] == pytest.approx(15 * 3 / 25, abs=1.0)
    assert device.used_s["acme/gold"] == pytest.approx(15 / 25, abs=0.6)


def test_owners_without_a_name_share_what_one_key_gets():
    pool = made()
    for i in range(6000):
        pool.add(of_tenant(f"/{i % 10}", prefixed((1,)), "many"))
        pool.add(of_tenant("/one", prefixed((1,)), "few"))
        pool.add(line("bob"))
    device = Device(pool, {**{f"/{i}": 0.2 for i in range(10)}, "/one": 0.2, "bob": 0.2})
    while device.now_s < 60:
        device.step()
    assert device.used_s["bob"] == pytest.approx(30, abs=3)
    assert device.used_s["/one"] == pytest.approx(15, abs=3)


def test_tenants_that_clients_make_up_share_a_pool_until_others_are_idle():
    pool = made()
    made_up = [line(f"acme/{i}") for i in range(3 * MOST_TENANTS)]
    for request in made_up:
        pool.add(request)
    assert len(pool.tenants) <= MOST_TENANTS + 1 and len(list(pool.order())) == 3 * MOST_TENANTS
    for request in made_up:
        pool.abort(request.rid)
    pool.advance(1.0)
    pool.add(line("bob/late"))
    assert ("bob", "late") in pool.tenants, "it has a pool of its own"
    assert len(pool.tenants) <= MOST_TENANTS + 1
    pool.advance(1e6)
    pool.add(line("acme/new"))
    assert pool.tenants.keys() == {("bob", "late"), ("acme", "new")}, "idle ones are forgotten"
    assert len(list(pool.order())) == 2


def test_a_tenant_that_is_forgotten_does_not_get_back_what_its_key_has_used():
    """Changing the name gets nobody more."""
    pool = made()
    for _ in range(2000):
        pool.add(line("modest"))
    device = Device(pool, {"modest": 0.1})
    names = itertools.count()
    while device.now_s < 60:
        if len(pool) - sum(r.tenant == "modest" for r in device.running) < 2400:
            name = f"greedy/{next(names)}"
            device.cost_s[name], device.used_s[name] = 0.1, 0.0
            for _ in range(4):
                pool.add(line(name))
        device.step()
    assert next(names) > 2 * MOST_TENANTS
    assert device.used_s["modest"] == pytest.approx(30, abs=3)
