"""Models whose layers with sliding windows have a KV pool of their own: tiny ones with random
weights, served for real. The attention is `cosched.cpu.torch_native`'s, under every policy."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.core.kv_state import Match
from cosched.core.plan import PreemptMode
from cosched.engine import port
from cosched.memory.window_memory import WindowPool
from cosched.schedule.ledger import Ledger
from tests.engine.conftest import (
    assert_drained,
    random_traffic,
    view_now,
    without_model,
)
from tests.engine.test_forced_stops import StoppingPolicy
from tests.engine.test_speculative import CHAIN, draft_from, prompts, submit
from tests.engine.tiny_models import SIZES, WINDOWS
from tests.factories import FakeView, decoding, make_caps, offline

NUM_REQUESTS = int(os.environ.get("COSCHED_WINDOW_REQUESTS", "14"))
TIGHT = {"max_total_tokens": 3200, "swa_full_tokens_ratio": 0.1, "max_running_requests": 6}
"""320 tokens in the pool of windows: less than six requests can hold."""

LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
SINKS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "sliding_window": 32,
    "num_local_experts": 4,
    "rope_scaling": None,
    **LAYERS,
}
GEMMA = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "sliding_window": 32,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    **LAYERS,
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "architectures": ["MiMoV2FlashForCausalLM"],
    "sliding_window": 32,
    "sliding_window_size": 32,
    "hybrid_layer_pattern": [1, 0],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "v_head_dim": 16,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "swa_rope_theta": 10_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 4,
    "moe_layer_freq": [0, 1],
    "attention_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "layernorm_epsilon": 1e-5,
}


@pytest.fixture
def make(make_engine, forget_experts, monkeypatch, tmp_path):
    """make(model, **flags): an engine of a tiny model of which what is generated depends on what
    the KV pools hold."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_loader import loader

    # Some models refuse torch_native by its name.
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "intel_amx", TorchNativeAttnBackend)
    fill = loader.initialize_dummy_weights
    monkeypatch.setattr(
        loader, "initialize_dummy_weights", lambda model: fill(model, low=-0.5, high=0.5)
    )

    def start(model, **options):
        forget_experts()
        (tmp_path / "config.json").write_text(json.dumps(SIZES | model))
        return make_engine(
            model_path=tmp_path, load_format="dummy", attention_backend="intel_amx", **options
        )

    return start


@pytest.mark.parametrize(
    ("model", "policy", "page_size"),
    [
        pytest.param(WINDOWS, "cosched", 1, id="mellum"),
        pytest.param(WINDOWS, "hygen", 16, id="mellum, hygen, pages", marks=pytest.mark.long),
        pytest.param(SINKS, "cosched", 16, id="gpt-oss, pages", marks=pytest.mark.long),
        pytest.param(MIMO, "cosched", 1, id="mimo", marks=pytest.mark.long),
        pytest.param(GEMMA, "cosched", 16, id="gemma 4, pages"),
    ],
)
def test_the_same_tokens_as_stock(make, model, policy, page_size):
    texts = prompts(NUM_REQUESTS)
    expected = submit(make(model, policy="sglang", mixed=False), texts)
    engine = make(model, policy=policy, page_size=page_size, **TIGHT)
    controller = engine.scheduler.cosched
    controller.planner.use_policy(
        StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
    )
    assert submit(engine, texts) == expected
    counters = controller.counters
    assert counters.num_preemptions > NUM_REQUESTS
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert_drained(engine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_traffic_in_a_tight_pool(make, seed):
    """Whatever comes, nothing is leaked, the engine preempts nothing by itself, and what a view
    says of a request is what SGLang then finds."""
    engine = make(
        WINDOWS,
        policy=("cosched", "hygen")[seed],
        page_size=(1, 16)[seed],
        overlap=seed == 1,
        **TIGHT,
    )
    scheduler = engine.scheduler
    stops = []
    engine.watch_stops(stops.append)

    tree, found_any = scheduler.tree_cache, []

    def compare():
        view = view_now(scheduler)
        for req in [*scheduler.cosched.waiting][:2]:
            match, found = view.match(req.cosched), port.find(tree, req)
            assert match.cached == found.num_device
            held = port.evictable_at(tree, found.node)
            assert match.evictable == held.kv and match.others.get("windows", 0) >= held.in_window
            found_any.append(match.cached > 0)

    random_traffic(engine, seed, most_tokens=80, also=compare)
    assert len(stops) == scheduler.cosched.counters.num_preemptions
    assert any(found_any)


class SglangsPool:
    """What SGLang's rule reads of its allocator and its tree."""

    def __init__(self, pool, window, page_size):
        self.page_size, self.sliding_window_size = page_size, window
        self.size_swa, self._pool = pool.free + pool.evictable, pool
        self.locked = 0

    def full_available_size(self):
        return 10**9

    def full_evictable_size(self):
        return 0

    def swa_available_size(self):
        return self._pool.free

    def swa_evictable_size(self):
        return self._pool.evictable - self.locked


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_the_ledger_admits_sglang_admits(data):
    """With the number of tokens that the plan says, in the order of the plan, whatever the pool
    holds; and the memory of the iteration is there."""
    from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget

    draw = data.draw
    page, window = draw(st.sampled_from([1, 16])), draw(st.integers(1, 100))
    pages = st.integers(0, 40).map(lambda number: number * page)
    free, evictable = draw(pages), draw(pages)
    kv = WindowPool(window, page + 8, free, evictable, reserved=draw(pages))
    caps = make_caps(page_size=page)
    running = tuple(decoding(offline(f"d{i}", 40)) for i in range(draw(st.integers(0, 3))))
    requests = [
        offline(f"w{i}", draw(st.integers(1, 400)), max_new_tokens=draw(st.integers(1, 200)))
        for i in range(4)
    ]
    matches = {}
    for request in requests:
        cached = draw(st.integers(0, (request.num_prompt_tokens - 1) // page)) * page
        matches[request.rid] = Match(
            cached=cached,
            evictable=0,
            others={"windows": draw(st.integers(0, min(cached, evictable)))},
        )
    view = FakeView(
        caps=caps, total_kv=10**6, running=running, offline=requests, cached=matches, windows=kv
    )
    pool = SglangsPool(kv, window, page)
    rule, ledger = SWAPrefillBudget(pool, pool), Ledger(view)
    num_taken = view.kv.next_step
    for request in requests:
        match = view.match(request)
        at_most = draw(st.integers(1, 500))
        if ledger.refusal(request, match, at_most=at_most) is not None:
            continue
        num_tokens = ledger.chunk(request, match, at_most=at_most)
        ledger.charge_admission(request, match, num_tokens)
        pool.locked += match.others["windows"]
        num_new = request.num_prompt_tokens - match.cached
        limit = caps.ceil_to_page(num_tokens)
        fits, allowed = rule.check_prefill(
            extend_input_len=num_new,
            total_tokens=num_new,
            max_new_tokens=request.max_new_tokens,
            input_tokens=num_new,
            swa_host_hit_length=0,
            chunk_limit=limit,
        )
        assert fits and allowed == limit
        whole = num_tokens == num_new
        rule.reserve(limit, request.max_new_tokens if whole else 0, chunk_limit=limit)
        num_taken += limit + page
        assert num_taken + pool.locked <= free + evictable


def test_a_preemption_makes_room_in_the_pool_of_windows():
    runs = decoding(offline("runs", 60))
    waits = offline("waits", 60)
    pool = WindowPool(32, 8, free=20, evictable=0, reserved=9)
    view = FakeView(running=(runs,), offline=(waits,), windows=pool)
    ledger = Ledger(view)
    match = view.match(waits)
    assert ledger.kv.fits(waits, match)  # by the other pool
    assert ledger.refusal(waits, match) is not None
    assert ledger.decodes_fit()
    ledger.refund_preemption(runs)
    assert ledger.refusal(waits, match) is None
    assert ledger.chunk(waits, match) == 32 + 20 - 2


def test_decodes_may_lack_window_memory_alone():
    runs = [decoding(offline(f"r{i}", 60)) for i in range(3)]
    pool = WindowPool(32, 8, free=2, evictable=0, reserved=0)
    ledger = Ledger(FakeView(running=tuple(runs), windows=pool))
    assert ledger.kv.available >= 0 and not ledger.decodes_fit()
    ledger.refund_pauses(runs[:1])
    assert ledger.decodes_fit() and not ledger.can_decode(runs[0])


@pytest.mark.parametrize(
    ("model", "algorithm", "page_size"),
    [
        pytest.param(WINDOWS, "EAGLE", 1, id="eagle"),
        pytest.param(GEMMA, "FROZEN_KV_MTP", 16, id="frozen", marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_with_drafts(make, monkeypatch, tmp_path, model, algorithm, page_size):
    texts = prompts(NUM_REQUESTS)
    expected = submit(make(model, policy="sglang", mixed=False), texts)
    draft_from(expected, texts, monkeypatch)
    flags = {"speculative_algorithm": algorithm, "speculative_draft_model_path": tmp_path}
    engine = make(model, policy="cosched", page_size=page_size, **TIGHT, **flags, **CHAIN)
    controller = engine.scheduler.cosched
    mixes = engine.scheduler.is_mixed_chunk
    assert mixes == (algorithm == "EAGLE")
    if mixes:
        controller.planner.use_policy(
            StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
        )
    assert submit(engine, texts) == expected
    assert controller.table.tokens_per_decode > 1.3
    counters = controller.counters
    assert counters.num_preemptions > 0 or not mixes
    assert counters.num_engine_refusals == counters.num_safe_plans == 0
    assert_drained(engine)


def test_host_memory_holds_windows_too(make):
    texts = prompts(NUM_REQUESTS)
    expected = submit(make(WINDOWS, policy="sglang", mixed=False), texts)
    small = {"max_total_tokens": 700, "swa_full_tokens_ratio": 0.4, "hicache_ratio": 4}
    host = ("--enable-hierarchical-cache",)
    engine = make(WINDOWS, policy="cosched", page_size=16, switches=host, **small)
    controller = engine.scheduler.cosched
    controller.planner.use_policy(
        StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
    )
    assert submit(engine, texts) == expected
    assert controller.counters.num_engine_refusals == controller.counters.num_safe_plans == 0


@pytest.mark.parametrize(
    ("seed", "page_size"), [(0, 1), pytest.param(1, 16, marks=pytest.mark.long)]
)
def test_kv_is_evicted_by_value(make, seed, page_size):
    """The mirror of the tree follows nodes that SGLang splits where windows begin, and leaves that
    go with their windows."""
    small = {"max_total_tokens": 1000, "swa_full_tokens_ratio": 0.4, "max_running_requests": 6}
    engine = without_model(make(WINDOWS, policy="cosched", page_size=page_size, **small))
    controller = engine.scheduler.cosched
    policy = StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=seed)
    controller.planner.use_policy(policy)
    random_traffic(engine, seed, most_tokens=150)
    assert policy.stopped and controller.kv.core.evicted["all"] > 2000
