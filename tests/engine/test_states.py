"""Models with state slots (linear attention) under a plan: SGLang's scheduler, pools, radix tree
and model code, with random weights that make the next token depend on the state."""

import json
import os

import pytest

from cosched.core.plan import PreemptMode
from cosched.engine import port
from cosched.memory.kv_memory import KvMemory
from tests.engine.conftest import (
    OFFLINE,
    assert_drained,
    outputs,
    prompt,
    random_traffic,
    without_model,
)
from tests.engine.test_forced_stops import StoppingPolicy
from tests.engine.test_request_faults import POISONS, run_poisoned, submit_all
from tests.engine.test_speculative import CHAIN, draft_from, prompts, submit
from tests.engine.tiny_models import HYBRID, SIZES, randomize

NUM_REQUESTS = int(os.environ.get("COSCHED_STATES_REQUESTS", "14"))

OTHERS = {
    "Mamba 2": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
        "mlp_hidden_act": "relu2",
    },
    "KDA beside MLA": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "num_experts": None,
        "num_key_value_heads": 4,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "short convolutions": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "full_attn_idxs": [1],
        "conv_L_cache": 3,
        "block_ff_dim": 64,
    },
}
"""Kinds of states that only a GPU computes."""

NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer"}
EXTRA_BUFFER = {"mamba_radix_cache_strategy": "extra_buffer", "mamba_track_interval": 64}
LAZY = {"mamba_radix_cache_strategy": "extra_buffer_lazy"}
SMALL = {"max_total_tokens": 700, "max_running_requests": 6}
PAGES = {**EXTRA_BUFFER, "page_size": 16}


@pytest.fixture
def make_hybrid(make_engine, forget_experts, monkeypatch, tmp_path):
    """`make_engine` with such a model, or one of `OTHERS`."""
    monkeypatch.setattr("sglang.srt.model_loader.loader.initialize_dummy_weights", randomize)

    def make(*, kind=None, **options):
        forget_experts()
        config = HYBRID if kind is None else SIZES | OTHERS[kind]
        (tmp_path / "config.json").write_text(json.dumps(config))
        slots = 5 * int(options.get("max_running_requests", 8))
        options = {"max_mamba_cache_size": slots, **options}
        return make_engine(model_path=tmp_path, load_format="dummy", **options)

    return make


def held_slots(scheduler):
    """Slots that neither are free nor have an unused checkpoint."""
    free = scheduler.req_to_token_pool.mamba_allocator.available_size()
    return scheduler.req_to_token_pool.mamba_allocator.size - (
        free + scheduler.tree_cache.mamba_evictable_size()
    )


@pytest.fixture
def stock(make_hybrid):
    """`stock(texts)`: the tokens of stock, once for all tests."""

    def tokens(texts):
        if not STOCK:
            STOCK.update(submit(make_hybrid(policy="sglang", mixed=False), texts))
        return STOCK

    return tokens


STOCK = {}


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        pytest.param("hygen", NO_BUFFER, id="no_buffer"),
        pytest.param("cosched", EXTRA_BUFFER, id="extra_buffer", marks=pytest.mark.long),
        pytest.param(
            "hygen",
            {**EXTRA_BUFFER, "overlap": True},
            id="overlap",
            marks=pytest.mark.long,
        ),
        pytest.param("cosched", {**EXTRA_BUFFER, **LAZY, "overlap": True}, id="lazy"),
        pytest.param("cosched", PAGES, id="pages", marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_as_stock(make_hybrid, stock, policy, strategy):
    texts = prompts(NUM_REQUESTS)
    expected = stock(texts)
    assert len({tuple(ids) for ids in expected.values()}) > NUM_REQUESTS / 2
    engine = make_hybrid(policy=policy, **SMALL, **strategy)
    scheduler, controller = engine.scheduler, engine.scheduler.cosched
    stopping = StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
    controller.planner.use_policy(stopping)
    step = controller.step

    def checked(*args, **options):
        scheduler.invariant_checker.self_check_during_busy()
        return step(*args, **options)

    controller.step = checked
    assert submit(engine, texts) == expected
    assert len(stopping.stopped) > NUM_REQUESTS / 4
    assert controller.counters.num_engine_refusals == controller.counters.num_safe_plans == 0
    assert_drained(engine)
    assert held_slots(scheduler) == 0
    assert controller.kv.core.evicted["all"] > 0


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(None, NO_BUFFER, marks=pytest.mark.long),
        (None, PAGES),
        *(pytest.param(kind, PAGES, marks=pytest.mark.long) for kind in OTHERS),
    ],
)
def test_arrivals_and_aborts_leak_no_slot(make_hybrid, strategy, kind):
    if kind == "short convolutions" and strategy is PAGES:
        pytest.skip("SGLang has no extra_buffer for them")
    flags = {"kind": kind, "max_total_tokens": 1200, **strategy}
    engine = without_model(make_hybrid(policy="cosched", **flags))
    policy = StoppingPolicy(engine.scheduler.cosched.planner.policy, PreemptMode.KEEP_KV, seed=1)
    engine.scheduler.cosched.planner.use_policy(policy)
    random_traffic(engine, 1, most_tokens=150)
    assert policy.stopped and held_slots(engine.scheduler) == 0


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_replies_have_checkpoints_beside_prefills(make_hybrid, overlap):
    """SGLang makes none in a mixed batch, and a mixed policy would mix nearly always."""
    engine = make_hybrid(
        policy="sarathi",
        **{**EXTRA_BUFFER, "max_total_tokens": 8000},
        mixed=True,
        overlap=overlap,
        chunked_prefill_size=64,
    )
    scheduler, tracked = engine.scheduler, {}
    process = scheduler.process_batch_result

    def watch(batch, result):
        process(batch, result)
        for req in batch.reqs:
            if req.rid == "reply":
                tracked[len(req.output_ids)] = req.kv.mamba_last_track_seqlen

    scheduler.process_batch_result = watch
    engine.submit("reply", [7] * 20, max_new_tokens=150, ignore_eos=True)
    for i in range(6):
        engine.submit(f"r{i}", [20 + i] * 1000, max_new_tokens=1)
    engine.run_until_idle()
    assert max(seen or 0 for seen in tracked.values()) == 128
    assert {64, 128} <= set(tracked.values())


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(NO_BUFFER, marks=pytest.mark.long), PAGES],
    ids=["no_buffer", "pages"],
)
def test_what_is_kept_is_found_again(make_hybrid, monkeypatch, strategy):
    """A plan knows what a preempted request keeps, and what SGLang will find of a waiting one.

    There are slots for all checkpoints: what is evicted is computed again.
    """
    sizes = {"max_total_tokens": 8000, "max_mamba_cache_size": 400}
    engine = make_hybrid(policy="hygen", **sizes, **strategy)
    scheduler, controller = engine.scheduler, engine.scheduler.cosched
    tree, shares, matched = scheduler.tree_cache, [], {}

    def put_back(req, mode):
        kept, num_computed = port.num_kept(req), req.kv.kv_committed_len
        original_put_back(req, mode)
        found = port.peek(tree, req)
        assert found.num_tokens >= kept
        assert port.find(tree, req).num_device == found.num_tokens
        shares.append(kept / num_computed)

    def admitted(tracked):
        assert tracked.num_prefix_tokens >= matched[tracked.rid]
        original_admitted(tracked)

    class Watched(StoppingPolicy):
        def plan(self, view, state):
            for request in (*view.online, *view.offline_order()):
                matched[request.rid] = view.match(request).cached
            return super().plan(view, state)

    original_put_back, original_admitted = controller._put_back, controller.admitted
    monkeypatch.setattr(controller, "_put_back", put_back)
    monkeypatch.setattr(controller, "admitted", admitted)
    controller.planner.use_policy(Watched(controller.planner.policy, PreemptMode.KEEP_KV, seed=3))
    submit(engine, prompts(16))
    assert len(shares) > 5 and any(matched.values())
    if strategy is NO_BUFFER:
        assert set(shares) == {1.0} and not controller.counters.recomputed_tokens
    else:
        assert 0 < sum(shares) < len(shares)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(NO_BUFFER, marks=pytest.mark.long), {**PAGES, "overlap": True}],
    ids=["no", "extra"],
)
def test_a_failed_iteration_is_taken_back(make_hybrid, monkeypatch, strategy):
    engine = make_hybrid(policy="sglang")
    submit_all(engine)
    engine.run_until_idle()
    expected = outputs(engine)
    for poison in ("sampling", "forward", "end at the fifth token", "admission"):
        with monkeypatch.context() as patch:
            engine = make_hybrid(policy="hygen", **strategy)
            replies = run_poisoned(engine, POISONS[poison], patch)
        assert replies.pop("poison").finish_reason == "abort", poison
        assert {rid: r.output_ids for rid, r in replies.items()} == expected, poison
        assert held_slots(engine.scheduler) == 0, poison


def test_a_refused_request_gives_its_slot_back(make_hybrid, monkeypatch):
    """SGLang looks a request up before it refuses it: its copy of a checkpoint must not be taken
    for its state later."""
    engine = make_hybrid(policy="hygen", config={"strict": False}, **NO_BUFFER)
    scheduler = engine.scheduler
    engine.submit("first", prompt(1, 50), max_new_tokens=4)
    engine.run_until_idle()
    monkeypatch.setattr(KvMemory, "fits", lambda *args, **options: True)
    engine.submit("again", prompt(1, 50) + prompt(2, 20), max_new_tokens=1900)
    engine.submit("too long", prompt(1, 50) + prompt(3, 20), max_new_tokens=1900, priority=OFFLINE)
    refused = []

    def on_iteration(number):
        scheduler.invariant_checker.self_check_during_busy()
        waits = [req for req in scheduler.waiting_queue if req.kv.holds_mamba]
        assert not waits
        refused.append(scheduler.cosched.counters.num_engine_refusals)
        if number == 20:
            engine.abort("again")
        if number == 60:  # it runs by now
            engine.abort("too long")

    engine.run_until_idle(on_iteration=on_iteration)
    assert refused[15] > 0
    assert held_slots(scheduler) == 0


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(NO_BUFFER, marks=pytest.mark.long), EXTRA_BUFFER],
    ids=["no_buffer", "extra_buffer"],
)
def test_the_same_tokens_with_drafts(make_hybrid, stock, monkeypatch, strategy):
    texts = prompts(NUM_REQUESTS)
    expected = stock(texts)
    draft_from(expected, texts, monkeypatch)
    drafts = {"speculative_algorithm": "NEXTN", **CHAIN}
    engine = make_hybrid(policy="cosched", **SMALL, **strategy, **drafts)
    controller = engine.scheduler.cosched
    controller.planner.use_policy(
        StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
    )
    assert submit(engine, texts) == expected
    assert controller.table.tokens_per_decode > 1.3
    assert controller.counters.num_preemptions > 5
    assert_drained(engine)
    assert held_slots(engine.scheduler) == 0
