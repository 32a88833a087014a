"""Real SGLang schedulers in the test process."""

import json
import random

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import ENV_VAR
from cosched.engine import port
from cosched.engine.features.class_counters import ClassCounters
from cosched.engine.features.recomputation import Recomputation
from tests.engine.integrity import check_tree

OFFLINE = -1  # the priority

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

HOST_RESERVE = "sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES"
"""Free memory that SGLang demands beside its pool in host memory: 10 GB; these pools are small."""


@pytest.fixture
def make_engine(tiny_model, monkeypatch):
    """`make_engine(policy=..., overlap=..., config={...}, **{flag: value})` -> LocalEngine.

    real_time: else its time passes only while iterations run, the same on every machine.
    """
    from cosched.lab.local_engine import LocalEngine

    engines = []

    def make(
        *,
        policy="sarathi",
        overlap=False,
        mixed=True,
        switches=(),
        config=None,
        tokenizer=False,
        real_time=False,
        **flags,
    ):
        for engine in engines:
            engine.close()
        engines.clear()
        monkeypatch.setattr(HOST_RESERVE, 0)
        monkeypatch.setenv(
            ENV_VAR, json.dumps({"policy": policy, "strict": True, **(config or {})})
        )
        chosen = FLAGS | {"--" + k.replace("_", "-"): str(v) for k, v in flags.items()}
        arguments = ["--model-path", str(tiny_model), *switches]
        arguments += [text for pair in chosen.items() for text in pair]
        arguments += ["--enable-mixed-chunk"] if mixed else []
        arguments += [] if overlap else ["--disable-overlap-schedule"]
        engines.append(engine := LocalEngine(arguments, tokenizer=tokenizer))
        if not real_time and hasattr(engine.scheduler, "cosched_observer"):
            use_stepping_clock(engine.scheduler)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def forget_experts():
    """SGLang sets where experts are once in a process; call it between two engines."""
    from sglang.srt.runtime_context import get_resources

    def forget():
        get_resources().expert_location_metadata = None

    yield forget
    forget()


def without_model(engine):
    """Its engine, which computes nothing: where only lengths, memory and who runs matter."""
    from cosched.lab.local_engine import made_up

    engine.replace_forward(lambda batch, **options: made_up([10] * len(batch.reqs)))
    return engine


class SteppingClock:
    """Seconds that pass only while iterations run."""

    def __init__(self):
        self.time_s = 0.0

    def now_s(self):
        return self.time_s

    def wait_until(self, time_s, is_over):
        return is_over()


def use_stepping_clock(scheduler, *, s_per_iteration=0.005, s_per_token=1e-4):
    """Iterations compute as before and take a time that depends on their tokens alone: what is
    decided is the same on every machine."""
    clock, observer = SteppingClock(), scheduler.cosched_observer
    observer.use_virtual_clock(clock)
    launch = observer.launch

    def launch_and_step(run, batch):
        def run_and_step():
            is_decode = batch.forward_mode.is_decode()
            num_tokens = len(batch.reqs) if is_decode else sum(batch.extend_lens or ())
            clock.time_s += s_per_iteration + s_per_token * num_tokens
            return run()

        return launch(run_and_step, batch)

    observer.launch = launch_and_step


def random_traffic(
    engine,
    seed,
    *,
    most_tokens,
    heads=(0, 64, 200),
    longest_tail=250,
    wishes=lambda rng, num_tokens: None,
    also=lambda: None,
):
    """Arrivals and aborts at random moments, with SGLang's strict memory check and `also` in each
    iteration. All are answered, with up to `most_tokens`, and nothing is leaked. wishes: what a
    request of so many tokens asks of cosched. The prompts."""
    rng = random.Random(seed)
    scheduler = engine.scheduler
    sent, prompts, aborted = {}, {}, set()

    def act(iteration):
        scheduler.invariant_checker.self_check_during_busy()
        also()
        held, total = kv_tokens(scheduler)
        assert held <= total
        if iteration < 80 and (len(engine.replies) == len(sent) or rng.random() < 0.35):
            rid = f"r{len(sent)}"
            sent[rid] = rng.randint(1, most_tokens)
            shared = prompt(rng.randint(0, 3), rng.choice(heads))
            prompts[rid] = shared + prompt(100 + len(sent), rng.randint(1, longest_tail))
            priority = rng.choice([None, 0, -1, -1, -100])
            wish = wishes(rng, sent[rid])
            params = {"cosched": wish} if wish else None
            engine.submit(
                rid,
                prompts[rid],
                max_new_tokens=sent[rid],
                priority=priority,
                custom_params=params,
            )
        if sent and rng.random() < 0.06:
            aborted.add(rid := rng.choice(list(sent)))
            engine.abort(rid)

    engine.run_until_idle(on_iteration=act, max_iterations=20_000)
    assert len(sent) > 20
    assert set(engine.replies) == set(sent)
    for rid, reply in engine.replies.items():
        if reply.finish_reason == "length":
            assert len(reply.output_ids) == sent[rid]
        else:
            assert reply.finish_reason == "abort" and any(rid.startswith(a) for a in aborted)
    counters = scheduler.cosched.counters
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert_drained(engine)
    return prompts


def outputs(engine) -> dict[str, list[int]]:
    """The output tokens of each request."""
    return {rid: reply.output_ids for rid, reply in engine.replies.items()}


def prompt(seed: int, length: int) -> list[int]:
    """A prompt that shares no prefix with one of another seed."""
    return [(seed * 31 + position * (seed % 7 + 1)) % 500 + 2 for position in range(length)]


def kv_tokens(scheduler) -> tuple[int, int]:
    """(available + evictable, total)."""
    free = port.kv_free(scheduler)
    return free + scheduler.tree_cache.evictable_size(), scheduler.max_total_num_tokens


def assert_drained(engine) -> None:
    """Nothing waits, runs or is leaked."""
    scheduler = engine.scheduler
    assert len(scheduler.waiting_queue) == 0
    assert scheduler.is_fully_idle()
    held, total = kv_tokens(scheduler)
    assert held == total
    if port.window_tokens(scheduler) is not None:
        pool = port.window_pool(scheduler, reserved=0)
        assert pool.free + pool.evictable == scheduler.token_to_kv_pool_allocator.size_swa
    rows = scheduler.req_to_token_pool
    assert rows.available_size() == rows.size
    controller = getattr(scheduler, "cosched", None)
    if controller is not None:
        assert controller.waiting.num_tokens == 0
        for kind, record in ((ClassCounters, "_replies"), (Recomputation, "_lost")):
            assert not getattr(controller.features[kind], record), kind
        if controller.kv is not None:
            check_tree(controller.kv.core, waiting=[])
            assert not any(node.awaiting for node in controller.kv.core.nodes.values())
            if controller.kv.copies is not None:
                pool = scheduler.tree_cache.cache_controller.mem_pool_host
                on_host = [n for n in controller.kv.core.nodes.values() if n.on_host]
                assert sum(n.num_tokens for n in on_host) == pool.size - pool.available_size()


def watch_plans(engine, *, before=lambda: None, after=lambda plan: None) -> None:
    """Call `before` before each plan is made, and `after` with it."""
    planner = engine.scheduler.cosched.planner
    original = planner.plan

    def plan(*args, **kwargs):
        before()
        made = original(*args, **kwargs)
        after(made)
        return made

    planner.plan = plan


def view_now(scheduler):
    """What a policy would see of a scheduler, at no particular time."""
    from cosched.engine.iteration import Moment

    return scheduler.cosched.view(scheduler.running_batch, Moment(0.0, 0.0))
