"""What running requests have in common, counted on made-up ones."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.engine.port.prefixes import RunningPrefixes


def running(tokens, *, owned=None, salt=None):
    """A request whose first `owned` tokens lie in the radix tree."""
    return SimpleNamespace(
        origin_input_ids=tokens,
        output_ids=[],
        kv=SimpleNamespace(cache_protected_len=len(tokens) if owned is None else owned),
        extra_key=None,
        cache_salt=salt,
    )


def distinct(reqs):
    """KV tokens that are read where each is read once: prefixes, of each salt its own."""
    seen = {
        (req.cache_salt, tuple(req.origin_input_ids[:n]))
        for req in reqs
        for n in range(1, req.kv.cache_protected_len + 1)
    }
    return len(seen)


few = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(few, st.integers(1, 6), st.booleans()), min_size=1, max_size=8))
def test_what_is_read_adds_up_to_each_token_once(drawn):
    """All of a group counts to one of them, and what each has for itself to that one."""
    reqs = [
        running(tokens, owned=min(owned, len(tokens)), salt=salt) for tokens, owned, salt in drawn
    ]
    prefixes = RunningPrefixes(page_size=1)
    contexts = [len(req.origin_input_ids) + 5 for req in reqs]
    owned = sum(req.kv.cache_protected_len for req in reqs)
    repeated = prefixes.groups(reqs, min_saved=1).saved_tokens
    assert repeated == owned - distinct(reqs)
    reads = prefixes.reads(reqs, contexts, min_saved=1)
    assert sum(reads) == sum(contexts) - repeated
    assert all(5 <= read <= context for read, context in zip(reads, contexts, strict=True))


def test_a_group_that_saves_little_is_none():
    reqs = [running([1] * 300), running([1] * 300)]
    prefixes = RunningPrefixes(page_size=1)
    assert prefixes.num_repeated(reqs) == 0 and prefixes.reads(reqs, [301, 302]) == [301, 302]
    more = [*reqs, running([1] * 300)]
    assert prefixes.num_repeated(more) == 600
    reads = prefixes.reads(more, [301, 302, 303])
    assert sum(reads) == 906 - 600 and sorted(reads)[:2] in ([1, 2], [1, 3], [2, 3])
