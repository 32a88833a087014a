"""Real SGLang schedulers in the test process."""

import json

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR

FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--dtype": "float32",
    "--max-total-tokens": "2000",
    "--max-running-requests": "8",
    "--chunked-prefill-size": "64",
    "--page-size": "1",
    "--log-level": "error",
}


@pytest.fixture
def make_engine(tiny_model, monkeypatch):
    """`make_engine(policy=..., overlap=..., config={...}, **{flag: value})` -> LocalEngine."""
    from cosched.engine.port.local import LocalEngine

    engines = []

    def make(*, policy="sarathi", overlap=False, mixed=True, switches=(), config=None, **flags):
        for engine in engines:
            engine.close()
        engines.clear()
        monkeypatch.setenv(
            ENV_VAR, json.dumps({"policy": policy, "strict": True, **(config or {})})
        )
        chosen = FLAGS | {"--" + k.replace("_", "-"): str(v) for k, v in flags.items()}
        arguments = ["--model-path", str(tiny_model), *switches]
        arguments += [text for pair in chosen.items() for text in pair]
        arguments += ["--enable-mixed-chunk"] if mixed else []
        arguments += [] if overlap else ["--disable-overlap-schedule"]
        engines.append(LocalEngine(arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(seed: int, length: int) -> list[int]:
    """A prompt that shares no prefix with one of another seed."""
    return [(seed * 31 + position * (seed % 7 + 1)) % 500 + 2 for position in range(length)]


def kv_tokens(scheduler) -> tuple[int, int]:
    """(available + evictable, total)."""
    free = scheduler.token_to_kv_pool_allocator.available_size()
    return free + scheduler.tree_cache.evictable_size(), scheduler.max_total_num_tokens


def assert_drained(engine) -> None:
    """Nothing waits, runs or is leaked."""
    scheduler = engine.scheduler
    assert len(scheduler.waiting_queue) == 0
    assert scheduler.is_fully_idle()
    held, total = kv_tokens(scheduler)
    assert held == total
    rows = scheduler.req_to_token_pool
    assert rows.available_size() == rows.size
    controller = getattr(scheduler, "cosched", None)
    if controller is not None:
        assert controller.waiting.num_tokens == 0
        if controller.kv is not None:
            assert not controller.kv.core.is_off
            controller.kv.kv_tree.check_integrity([])
            assert controller.kv.kv_tree.num_evictable == scheduler.tree_cache.evictable_size()
            if controller.kv.copies is not None:
                pool = scheduler.tree_cache.cache_controller.mem_pool_host
                assert controller.kv.kv_tree.num_on_host == pool.size - pool.available_size()


def view_now(scheduler):
    """What a policy would see of a scheduler, at no particular time."""
    from cosched.engine.timekeeper import Moment

    return scheduler.cosched.view(scheduler.running_batch, Moment(0.0, 0.0))
