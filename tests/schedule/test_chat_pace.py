"""How long an iteration with offline work is beside chat."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.request import RequestClass
from cosched.schedule.builder import PlanBuilder
from cosched.schedule.chat_pace import Course, paced_s
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online

TARGET_S = 0.05


@dataclass(frozen=True)
class Gpu(Linear):
    """Reads weights and KV while it computes tokens. largest: most tokens of an iteration that was
    seen."""

    weights_s: float = 0.006
    token_s: float = 23e-6
    kv_s: float = 50e-9
    fixed_s: float = 0.001
    largest: int = 10_000

    def predict_s(self, totals):
        tokens = totals.num_new + totals.num_decodes
        if not tokens:
            return 0.0
        reading_s = self.weights_s + self.kv_s * totals.decode_context
        return self.fixed_s + max(reading_s, self.token_s * tokens)

    def knows(self, totals):
        return totals.num_new <= self.largest


def builder_of(
    gpu, *, num_chats=30, num_batch=30, context=1000, num_waiting=1, mixed=True, **fields
):
    chats = [decoding(online(f"c{i}", context)) for i in range(num_chats)]
    lines = [decoding(offline(f"o{i}", context)) for i in range(num_batch)]
    view = FakeView(
        predictor=gpu,
        running=(*chats, *lines),
        offline=[offline(f"w{i}", 100_000) for i in range(num_waiting)],
        caps=make_caps(partial_decode=True, max_running_requests=512, mixed_batches=mixed),
        total_kv=10_000_000,
        mean_iteration_s=0.03,
        **fields,
    )
    builder = PlanBuilder(view)
    builder.ledger.add_decodes(view.running_of(RequestClass.ONLINE).contexts)
    return builder


def seconds(builder, cost=0.02, course=Course(num_plans=1)):  # noqa: B008  # immutable
    return paced_s(builder, course, TARGET_S, cost=cost)


def test_where_long_iterations_gain_nothing_chat_is_far_below_its_target():
    assert seconds(builder_of(Gpu(fixed_s=0.0))) < 0.5 * TARGET_S


def test_where_batches_do_not_mix_decodes_between_prefills_are_a_cost_of_each():
    """Reading weights and KV hides no prompt tokens there: short prefills waste it."""
    gpu = Gpu(fixed_s=0.0)
    apart = builder_of(gpu, mixed=False)
    assert seconds(apart) > 1.3 * seconds(builder_of(gpu))


def test_where_each_iteration_costs_much_the_target_is_used():
    assert seconds(builder_of(Gpu(fixed_s=0.02))) == TARGET_S


def test_without_chat_or_prompts_nothing_is_given():
    assert seconds(builder_of(Gpu(), num_chats=0)) == TARGET_S
    assert seconds(builder_of(Gpu(), num_waiting=0)) == TARGET_S


def test_sizes_up_to_the_target_are_learnt_first():
    assert seconds(builder_of(Gpu(fixed_s=0.0, largest=500))) == TARGET_S


@given(
    st.floats(0, 0.02),
    st.floats(0, 0.02),
    st.floats(1e-6, 1e-4),
    st.floats(0, 1e-7),
    st.integers(1, 100),
    st.integers(0, 100),
    st.integers(1, 3000),
)
def test_more_pace_is_never_slower_and_no_pace_above_the_target(
    fixed_s, weights_s, token_s, kv_s, num_chats, num_batch, context
):
    gpu = Gpu(fixed_s=fixed_s, weights_s=weights_s, token_s=token_s, kv_s=kv_s)
    builder = builder_of(gpu, num_chats=num_chats, num_batch=num_batch, context=context)
    found = [seconds(builder, cost) for cost in (0.0, 0.02, 0.2)]
    assert found == sorted(found, reverse=True)
    assert found[0] <= TARGET_S


def test_now_and_then_another_size_is_tried():
    builder = builder_of(Gpu(fixed_s=0.0))
    sizes = {seconds(builder, course=Course(num_plans=n)) for n in range(1, 640)}
    assert len(sizes) > 5


@pytest.mark.parametrize(
    ("num_behind", "most_tokens", "is_pressed"),
    [(0, 4000, True), (100, 4000, False), (0, 10, False)],
)
def test_a_long_reply_presses_where_it_outlasts_the_prompts(num_behind, most_tokens, is_pressed):
    builder = builder_of(Gpu(), num_waiting=20, num_behind=num_behind)
    for request in builder.view.running:
        request.__dict__["max_new_tokens"] = most_tokens
    course = Course(per_plan=0.03, weight=100, num_admitted=30)
    assert course.after(builder).is_pressed == is_pressed


def test_once_many_replies_were_seen_what_is_expected_of_them_counts():
    builder = builder_of(Gpu(), num_waiting=20)
    for request in builder.view.running:
        request.__dict__["max_new_tokens"] = 4000
    builder.view.lengths = {r.rid: LengthEstimate(50, 100) for r in builder.view.running}
    course = Course(per_plan=0.03, weight=100, num_admitted=10_000)
    assert not course.after(builder).is_pressed


def test_a_pressed_job_gives_more_for_shorter_iterations():
    builder = builder_of(Gpu(fixed_s=0.006, weights_s=0.002))
    pressed = Course(num_plans=1, is_pressed=True)
    assert seconds(builder, course=pressed) < seconds(builder)
