"""HiCache over a storage (files): which requests it is asked about, and that its KV is right."""

import time

import pytest

from tests.engine.conftest import OFFLINE, assert_drained, outputs, prompt

FLAGS = {
    "switches": ["--enable-hierarchical-cache"],
    "hicache_storage_backend": "file",
    "hicache_mem_layout": "page_first",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "page_size": 16,
    "max_total_tokens": 640,
}


@pytest.fixture
def asked(monkeypatch):
    """The requests about which the storage was asked, in order -> tokens that it had."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    found = {}
    prefetch = UnifiedRadixCache.prefetch_from_storage
    loaded = UnifiedRadixCache.pop_prefetch_loaded_span

    def asking(cache, handle, *args, **kwargs):
        found.setdefault(handle.rid, 0)
        return prefetch(cache, handle, *args, **kwargs)

    def loading(cache, handle):
        num_tokens, start = loaded(cache, handle)
        if num_tokens:
            found[handle.rid] = num_tokens
        return num_tokens, start

    monkeypatch.setattr(UnifiedRadixCache, "prefetch_from_storage", asking)
    monkeypatch.setattr(UnifiedRadixCache, "pop_prefetch_loaded_span", loading)
    return found


def let_threads_work(iteration):
    """An engine that waits for the storage would take the processor from its threads."""
    time.sleep(0.01)


def submit(engine):
    for number in range(16):
        text = prompt(400 + number, 290 if number < 8 else 60)
        engine.submit(f"off{number}", text, max_new_tokens=4, priority=OFFLINE)
    engine.submit("on", prompt(200, 290), max_new_tokens=4)


def test_offline_requests_are_looked_up_when_they_are_next(
    make_engine, monkeypatch, tmp_path, asked
):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    engine = make_engine(policy="cosched", **FLAGS)
    submit(engine)
    engine.run(lambda: engine.scheduler.cosched.counters.num_plans > 0)
    assert next(iter(asked)) == "on"
    assert len(asked) <= 1 + 8
    engine.run_until_idle(on_iteration=let_threads_work)
    assert len(asked) == 17 and not any(asked.values())
    assert_drained(engine)
    first = outputs(engine)

    asked.clear()
    engine = make_engine(policy="cosched", **FLAGS)  # over the same files
    submit(engine)
    engine.run_until_idle(on_iteration=let_threads_work)
    assert outputs(engine) == first
    assert sum(map(bool, asked.values())) > 4, asked
    assert_drained(engine)
