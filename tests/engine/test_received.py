"""Requests that reach a scheduler by another way than the checked front: none ends it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import MultimodalInputs

from cosched.core.request import Slo
from cosched.engine.tracked import TrackedRequest
from tests.engine.conftest import assert_drained, prompt

BEYOND = [
    ("top_k", 2**31, "sampling_params.top_k: 2147483648 is above 2048"),
    ("top_k", 0, "sampling_params.top_k"),
    ("logit_bias", {"2048": 1.0}, "sampling_params.logit_bias"),
    ("stop_token_ids", {-1}, "sampling_params.stop_token_ids"),
    ("temperature", float("nan"), "sampling_params.temperature"),
    ("stop_regex_strs", ["(?=a)b"], "sampling_params.stop_regex_strs"),
    ("json_schema", '{"$ref": "#"}', "sampling_params.json_schema"),
    ("top_logprobs_num", 2049, "top_logprobs_num: 2049 is above 2048"),
    ("logprob_start_len", -3, "logprob_start_len: -3 is below -1"),
    ("logprob_start_len", 41, "logprob_start_len: 41 is above 40"),
    ("token_ids_logprob", [2048], "token_ids_logprob: 2048 is above 2047"),
    ("token_indices_to_pool", [40], "token_indices_to_pool: 40 is above 39"),
    ("extra_key", "x" * 1025, "extra_key: 1025 characters are above 1024"),
]


def submit(engine, rid, name, value, **more):
    engine.submit(rid, prompt(1, 40), max_new_tokens=4, **more)
    request = engine._inbox[-1]
    request.return_logprob = True
    setattr(
        request.sampling_params if hasattr(request.sampling_params, name) else request, name, value
    )


@pytest.fixture
def engine(make_engine):
    return make_engine(policy="cosched")


def test_a_value_beyond_its_bound_is_answered_with_400_and_others_run_on(engine):
    for index, (name, value, _) in enumerate(BEYOND):
        submit(engine, f"bad{index}", name, value, priority=-1 if index % 2 else 0)
        engine.submit(f"good{index}", prompt(index, 30), max_new_tokens=3, priority=-(index % 2))
    engine.run_until_idle(max_iterations=2000)
    assert_drained(engine)
    for index, (_, _, message) in enumerate(BEYOND):
        assert len(engine.replies[f"good{index}"].output_ids) == 3
        reply = engine.replies[f"bad{index}"]
        assert reply.finish_reason == "abort" and reply.message.startswith(message), reply


@pytest.mark.parametrize("tokens", [[], [-1], [2048], [5] * 1999])
def test_a_prompt_that_cannot_run_is_answered_at_once(engine, tokens):
    engine.submit("a", tokens, max_new_tokens=4)
    engine.run_until_idle(max_iterations=10)
    assert engine.replies["a"].finish_reason == "abort"
    assert not engine.replies["a"].output_ids


def test_an_offline_prompt_leaves_an_eighth_of_the_memory_to_online_requests(engine):
    engine.submit("too_long", [5] * 1751, max_new_tokens=4, priority=-1)
    engine.submit("online", [6] * 1751, max_new_tokens=4)
    engine.run_until_idle(max_iterations=500)
    told = engine.replies["too_long"].message
    assert "1751 tokens are above 1750, the longest offline prompt" in told
    assert len(engine.replies["online"].output_ids) == 4


def test_the_longest_offline_prompt_runs_while_online_requests_come_without_a_pause(engine):
    engine.submit("long", prompt(7, 1700), max_new_tokens=2, priority=-1)
    sent = []

    def keep_busy(iteration):
        if "long" in engine.replies and engine.replies["long"].finish_reason:
            return
        # One request is always under way, another comes before it ends.
        if iteration % 4 == 0:
            sent.append(f"on{iteration}")
            engine.submit(sent[-1], prompt(iteration, 12), max_new_tokens=6)

    engine.run_until_idle(max_iterations=3000, on_iteration=keep_busy)
    assert_drained(engine)
    assert len(engine.replies["long"].output_ids) == 2
    assert len(sent) > 3


def decode(ids):
    return "".join(chr(97 + token % 26) for token in ids)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_stop_pattern_ends_an_answer_at_its_first_match(engine, is_open):
    """Also one without a longest match, beside a stop string that does not occur."""
    engine.submit("free", prompt(3, 20), max_new_tokens=12)
    engine.run_until_idle(max_iterations=100)
    ids = list(engine.replies["free"].output_ids)
    engine.scheduler.tokenizer = SimpleNamespace(
        decode=decode, eos_token_id=None, additional_stop_token_ids=None
    )
    pattern = f"{decode(ids[4:5])}+{decode(ids[5:6])}"
    expected = next(n for n in range(1, 13) if re.search(pattern, decode(ids[:n])))
    engine.submit("stops", prompt(3, 20), max_new_tokens=12)
    params = engine._inbox[-1].sampling_params
    params.stop_regex_strs = [pattern]
    params.stop_regex_max_len = 2**30 if is_open else 8
    params.stop_strs, params.stop_str_max_len = ["~"], 1
    engine.run_until_idle(max_iterations=100)
    assert list(engine.replies["stops"].output_ids) == ids[:expected]
    assert engine.replies["stops"].finish_reason == "stop"


def test_an_error_after_a_request_was_built_ends_that_request_only(make_engine):
    """SGLang releases the buffers of images then."""

    def release_transport_proxies():
        raise RuntimeError("a buffer is gone")

    engine = make_engine(policy="cosched", config={"strict": False})
    build = engine.scheduler._handle_generate_request

    def build_as_text(recv_req, mm_cleanup, **more):
        recv_req.mm_inputs = None  # the model has no images
        build(recv_req, mm_cleanup, **more)

    engine.scheduler._handle_generate_request = build_as_text
    for rid in ("bad", "good"):
        engine.submit(rid, prompt(1, 30), max_new_tokens=3)
    item = SimpleNamespace(release_transport_proxies=release_transport_proxies)
    engine._inbox[0].mm_inputs = MultimodalInputs(mm_items=[item])
    engine.run_until_idle(max_iterations=200)
    assert_drained(engine)
    assert "a buffer is gone" in engine.replies["bad"].message
    assert len(engine.replies["good"].output_ids) == 3


def granted(engine, **targets):
    """The targets of a request with these ones, as the policy sees them."""
    params = {"cosched": targets} if targets else None
    rid = f"r{len(engine.replies)}"
    engine.submit(rid, prompt(1, 20), max_new_tokens=2, custom_params=params)
    seen = set()

    def look(_):
        waiting = engine.scheduler.waiting_queue
        running = engine.scheduler.running_batch.reqs
        for req in [*waiting, *running]:
            seen.add(TrackedRequest.of(req).slo)

    engine.run_until_idle(on_iteration=look, max_iterations=50)
    assert len(seen) == 1
    return seen.pop()


def test_targets_are_held_within_the_default_floors(make_engine):
    engine = make_engine()
    absurd = granted(engine, ttft_slo_ms=0.001, tpot_slo_ms=0.001, deadline_s=1e-9)
    assert absurd == Slo(ttft_s=0.25, tpot_s=0.0125, deadline_s=0.25)
    assert granted(engine, ttft_slo_ms=1e12, tpot_slo_ms=20) == Slo(ttft_s=1e9, tpot_s=0.02)
    assert granted(engine) == Slo()


def test_targets_are_held_within_configured_bounds(make_engine):
    claims = {"floor_ratio": 0, "floors": {"tpot_ms": 30}, "ceilings": {"ttft_ms": 2000}}
    engine = make_engine(config={"claims": claims})
    found = granted(engine, ttft_slo_ms=9000, tpot_slo_ms=1, deadline_s=0.5)
    assert found == Slo(ttft_s=2.0, tpot_s=0.03, deadline_s=0.5)
    assert granted(engine, ttft_slo_ms=0.001).ttft_s == 1e-6
