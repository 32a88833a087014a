"""Speculative decoding under a plan: SGLang's scheduler, slots, KV memory and radix tree, with
drafts of which two tokens of three are right."""

import itertools
import os
import random

import pytest

from cosched.core.plan import PreemptMode
from cosched.cpu import lookup_drafts
from tests.engine.conftest import OFFLINE
from tests.engine.integrity import check_tree
from tests.engine.test_forced_stops import StoppingPolicy

NUM_REQUESTS = int(os.environ.get("COSCHED_DRAFTED_REQUESTS", "14"))
SMALL = {"max_total_tokens": 700, "max_running_requests": 6}
DRAFTS = {"speculative_num_draft_tokens": 4}
CHAIN = {**DRAFTS, "speculative_num_steps": 3, "speculative_eagle_topk": 1}


def prompts(number, seed=1):
    """Some share a head."""
    choose = random.Random(seed)
    head = [choose.randrange(10, 200) for _ in range(40)]
    return [
        (head if choose.random() < 0.5 else [])
        + [choose.randrange(10, 200) for _ in range(choose.randrange(10, 90))]
        for _ in range(number)
    ]


def submit(engine, texts, seed=2):
    """Half of them at once, the others while these run."""
    choose = random.Random(seed)

    def send(i):
        engine.submit(
            f"r{i}",
            texts[i],
            max_new_tokens=choose.randrange(1, 60),
            priority=OFFLINE if i % 3 else 0,
        )

    later = iter(range(len(texts) // 2, len(texts)))
    for i in range(len(texts) // 2):
        send(i)

    def on_iteration(number):
        if number % 4 == 3:
            for i in itertools.islice(later, 1):
                send(i)

    engine.run_until_idle(on_iteration=on_iteration)
    assert len(engine.replies) == len(texts)
    return {rid: reply.output_ids for rid, reply in engine.replies.items()}


@pytest.fixture
def flags(tiny_model):
    def flags_of(algorithm):
        if algorithm == "NGRAM":
            return {"speculative_algorithm": algorithm, **DRAFTS}
        return {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": tiny_model,
            **CHAIN,
        }

    return flags_of


@pytest.fixture
def reference(make_engine):
    """Outputs of stock SGLang without drafts."""

    def run(texts):
        return submit(make_engine(policy="sglang", mixed=False), texts)

    return run


def draft_from(reference, texts, monkeypatch):
    """Drafts are the tokens of the reference, every third one spoilt."""
    known = {tuple(text): reference[f"r{i}"] for i, text in enumerate(texts)}
    prompts_by_length = sorted(known, key=len, reverse=True)

    def draft(tokens, num_drafts):
        tokens = tuple(tokens)
        prompt = next(p for p in prompts_by_length if tokens[: len(p)] == p)
        done = len(tokens) - len(prompt)
        right = [*known[prompt][done : done + num_drafts], *[0] * num_drafts][:num_drafts]
        return [token ^ (place + done) % 3 // 2 for place, token in enumerate(right)]

    monkeypatch.setattr(lookup_drafts, "draft", draft)


@pytest.mark.parametrize(
    ("algorithm", "page_size", "policy"),
    [
        ("EAGLE", 1, "hygen"),
        ("EAGLE", 16, "cosched"),
        ("NGRAM", 1, "cosched"),
        pytest.param("EAGLE", 1, "cosched", marks=pytest.mark.long),
        pytest.param("EAGLE", 16, "hygen", marks=pytest.mark.long),
        pytest.param("NGRAM", 1, "hygen", marks=pytest.mark.long),
    ],
)
def test_the_same_tokens_as_without_drafts(
    make_engine, flags, reference, monkeypatch, algorithm, policy, page_size
):
    texts = prompts(NUM_REQUESTS)
    expected = reference(texts)
    draft_from(expected, texts, monkeypatch)
    engine = make_engine(policy=policy, page_size=page_size, **SMALL, **flags(algorithm))
    controller = engine.scheduler.cosched
    mixes = algorithm == "EAGLE"
    if mixes:
        controller.planner.use_policy(
            StoppingPolicy(controller.planner.policy, PreemptMode.KEEP_KV, seed=3)
        )
    assert submit(engine, texts) == expected
    assert controller.table.tokens_per_decode > 1.3
    num_preemptions = sum(reply.num_retractions for reply in engine.replies.values())
    assert num_preemptions > 0 or not mixes
    assert engine.scheduler.is_mixed_chunk == mixes
    assert engine.scheduler.is_fully_idle()
    assert controller.kv is not None
    check_tree(controller.kv.core, [])


def test_the_ledger_counts_the_kv_that_the_next_decode_takes(make_engine, flags, monkeypatch):
    """SGLang allocates ahead for each request: what the view says is what it then takes."""
    engine = make_engine(policy="hygen", page_size=16, **flags("EAGLE"))
    scheduler, seen = engine.scheduler, []
    step = scheduler.cosched.step

    def watched(build, running_batch, **options):
        batch, running = step(build, running_batch, **options)
        if batch is None and not running.is_empty():
            view = scheduler.cosched.planner.look(running).view
            seen.append((view.kv.next_step, running.new_tokens_required_next_decode()))
        return batch, running

    monkeypatch.setattr(scheduler.cosched, "step", watched)
    submit(engine, prompts(10))
    assert seen and all(ours == theirs for ours, theirs in seen)


def test_a_lookup_drafts_what_followed_the_last_tokens_before():
    assert lookup_drafts.draft([5, 6, 7, 8, 1, 5, 6], 3) == [7, 8, 1]
    assert lookup_drafts.draft([1, 2, 3], 2) == [3, 3]
    assert lookup_drafts.num_accepted([7, 8, 9], [7, 8, 1, 2]) == 3
    assert lookup_drafts.num_accepted([7], [1, 2]) == 1
