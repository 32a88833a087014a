"""An online and an offline request share a page in SGLang's scheduler. The slots themselves:
`test_page_allocator`."""

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.errors import ConfigError
from tests.engine.conftest import random_traffic
from tests.engine.test_partial_decode import hold_at_random

SHARED = {"kv": {"bidirectional_pages": True}}


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "overlap", "mixed", "holds"),
    [
        (8, 960, False, True, True),
        (16, 640, True, True, False),
        pytest.param(64, 1280, True, False, True, marks=pytest.mark.long),
    ],
)
def test_sharing_pages_changes_no_token(
    make_engine, monkeypatch, page_size, num_tokens, overlap, mixed, holds
):
    """holds: decodes are paused too."""
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    flags = {"overlap": overlap, "mixed": mixed, "page_size": page_size}
    engine = make_engine(config=SHARED, **flags, max_total_tokens=num_tokens)
    allocator = engine.scheduler.token_to_kv_pool_allocator
    if holds:
        hold_at_random(engine, seed=1)
    num_shared = []

    def look():
        allocator.table.check_integrity()
        num_shared.append(allocator.table.num_shared)

    prompts = random_traffic(
        engine, page_size, most_tokens=80, heads=(0, 0, 64), longest_tail=80, also=look
    )
    replies = dict(engine.replies)
    assert sum(num_shared) > 20
    assert allocator.num_parted or page_size == 64  # such tails seldom meet
    assert any(reply.num_retractions for reply in replies.values())

    plain = make_engine(**flags, max_total_tokens=8000)
    for rid, tokens in prompts.items():
        plain.submit(rid, tokens, max_new_tokens=max(len(replies[rid].output_ids), 1))
    plain.run_until_idle(max_iterations=20_000)
    for rid, reply in replies.items():
        assert reply.output_ids == plain.replies[rid].output_ids[: len(reply.output_ids)]
    assert sum(reply.finish_reason == "length" for reply in replies.values()) > 10


@pytest.mark.parametrize(
    ("flags", "switches", "reason"),
    [
        ({"page_size": 1}, (), "one slot, and nothing to share"),
        ({"page_size": 16}, ("--enable-hierarchical-cache",), "copies pages in ascending order"),
        ({"page_size": 16, "attention_backend": "fa3"}, (), "fa3 reads whole pages"),
    ],
)
def test_if_pages_cannot_be_shared_the_server_does_not_start(make_engine, flags, switches, reason):
    with pytest.raises(ConfigError, match=reason):
        make_engine(config=SHARED, switches=switches, **flags)


def test_by_default_the_allocator_is_sglangs(make_engine):
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    engine = make_engine(page_size=16)
    assert type(engine.scheduler.token_to_kv_pool_allocator) is PagedTokenToKVPoolAllocator
