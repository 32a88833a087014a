"""What running requests have in common, counted on made-up ones."""

from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.features.shared_reads import SharedReads
from cosched.engine.port.prefixes import RunningPrefixes
from cosched.engine.port.read_once import launching

HEAD = [7] * 64
"""With these before them, requests differ behind."""


def running(tokens, *, owned=None, salt=None):
    """A request whose first `owned` tokens lie in the radix tree."""
    return SimpleNamespace(
        origin_input_ids=tokens,
        output_ids=[],
        kv=SimpleNamespace(cache_protected_len=len(tokens) if owned is None else owned),
        extra_key=None,
        cache_salt=salt,
    )


def prefixes_of(req):
    """Every head of a request that is in the tree."""
    owned = req.origin_input_ids[: req.kv.cache_protected_len]
    return [(req.cache_salt, tuple(owned[:n])) for n in range(1, len(owned) + 1)]


def saved(reqs, min_saved, page_size, read=0):
    """KV tokens that groups save, by the definition: of those who agree from `read` on, the longest
    that all have in common is a group where it saves enough; the rest is up to those who agree
    further."""
    if len(reqs) < 2:
        return 0
    heads = set.intersection(*(set(prefixes_of(req)) for req in reqs))
    common = max((len(tokens) for _, tokens in heads), default=0)
    common -= common % page_size
    gain = (len(reqs) - 1) * (common - read)
    if common <= read or gain < min_saved:
        gain, common_read = 0, read
    else:
        common_read = common
    further = {}
    for req in reqs:
        owned = req.origin_input_ids[: req.kv.cache_protected_len]
        if len(owned) > common:
            page = tuple(owned[common : common + page_size])
            further.setdefault((req.cache_salt, page), []).append(req)
    parts = [part for part in further.values() if 1 < len(part) < len(reqs) or common]
    return gain + sum(saved(part, min_saved, page_size, common_read) for part in parts)


class Batches(RuleBasedStateMachine):
    """Requests come, go, are stopped and go on; batches of some of them are asked about."""

    @initialize(page_size=st.sampled_from([1, 2]))
    def begin(self, page_size):
        self.page_size = page_size
        self.prefixes = RunningPrefixes(page_size=page_size)
        self.running = []

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=8),
        is_long=st.booleans(),
        salt=st.sampled_from([None, "salt"]),
    )
    def come(self, tokens, is_long, salt):
        tokens = HEAD * is_long + tokens
        owned = len(tokens) - len(tokens) % self.page_size
        self.running.append(running(tokens, owned=owned, salt=salt))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_noticed=st.booleans())
    def end(self, data, is_noticed):
        req = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        req.kv = SimpleNamespace(cache_protected_len=0)
        if is_noticed:
            self.prefixes.forget(req)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on_with_less(self, data):
        """It was stopped, and of its KV something has gone."""
        req = data.draw(st.sampled_from(self.running))
        pages = data.draw(st.integers(0, req.kv.cache_protected_len // self.page_size))
        req.kv.cache_protected_len = pages * self.page_size

    @rule(data=st.data(), min_saved=st.sampled_from([1, 5, 100]))
    def ask(self, data, min_saved):
        reqs = data.draw(st.permutations(self.running))
        reqs = reqs[: data.draw(st.integers(0, len(reqs)))]
        groups = self.prefixes.groups(reqs, min_saved=min_saved)
        assert groups.saved_tokens == saved(reqs, min_saved, self.page_size)
        contexts = [len(req.origin_input_ids) + 5 for req in reqs]
        reads = self.prefixes.reads(reqs, contexts, min_saved=min_saved)
        shared = [context - read for context, read in zip(contexts, reads, strict=True)]
        assert sum(shared) == groups.saved_tokens
        assert all(
            0 <= n <= req.kv.cache_protected_len for n, req in zip(shared, reqs, strict=True)
        )
        if min_saved == 1 and self.page_size == 1:
            owned = [prefixes_of(req) for req in reqs]
            assert sum(shared) == sum(map(len, owned)) - len(set().union(*owned))

    @invariant()
    def little_is_kept(self):
        assert len(self.prefixes) <= max(2 * len(self.running), 32) + 64
        assert len(self.prefixes) == len(self.prefixes._forest)


TestBatches = Batches.TestCase


def test_who_has_ended_is_forgotten():
    prefixes = RunningPrefixes(page_size=1)
    stays = running([1] * 300)
    reqs = [running([1] * length) for length in (300, 5, 400)]
    prefixes.groups([stays, *reqs])
    assert len(prefixes) == 4
    for req in reqs:
        prefixes.forget(req)
    assert len(prefixes) == 1
    # Nobody says so, and they are found in time all the same.
    for index in range(200):
        req = running([index] * 300)
        prefixes.groups([stays, req])
        req.kv = SimpleNamespace(cache_protected_len=0)
    assert len(prefixes) < 100


def test_the_groups_of_a_launched_batch_are_found_once():
    """Its time prediction asks about the decodes of a mixed batch, then its attention about all."""
    tokens = [[1] * 300 + [index] for index in range(4)]
    prefill, *decodes = reqs = [running(own) for own in tokens]
    prefixes = RunningPrefixes(page_size=1)
    assert prefixes.groups(decodes).saved_tokens == 600
    prefill.kv.cache_protected_len = 200
    with launching(SimpleNamespace(reqs=reqs)):
        assert prefixes.groups(decodes).saved_tokens == 600
        groups = prefixes.groups(reqs)
        assert groups.saved_tokens == 600
        kvs = [req.kv for req in reqs]
        for req in reqs:
            del req.kv
        assert prefixes.groups(reqs) is groups
        for req, kv in zip(reqs, kvs, strict=True):
            req.kv = kv
        assert prefixes.groups(reqs, min_saved=100).saved_tokens == 800
    prefill.kv.cache_protected_len = 301
    with launching(SimpleNamespace(reqs=reqs)):
        found = prefixes.groups(reqs)
    assert found.saved_tokens == 900


@pytest.mark.parametrize("page_size", [1, 16])
def test_all_that_ask_in_a_process_share_one(make_engine, page_size):
    engine = make_engine(attention_backend="cosched_shared_prefix", page_size=page_size)
    scheduler = engine.scheduler
    found = RunningPrefixes.of(scheduler)
    assert scheduler.cosched.features[SharedReads].prefixes is found
    assert scheduler.cosched_observer._prefixes is found
    assert scheduler.tp_worker.model_runner.attn_backend.cosched_shared._prefixes is found
    for index in range(3):
        engine.submit(f"r{index}", [1 + index] * 40, max_new_tokens=2)
    engine.run_until_idle()
    assert len(found) == 0
