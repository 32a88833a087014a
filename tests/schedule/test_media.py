"""Images in plans: encoded whole, beside chat where that fits, and none waits for ever."""

from dataclasses import dataclass, replace

import pytest

from cosched.core.request import Media, Slo, Traits
from cosched.pool.prefix_pool import PoolConfig, PrefixPool
from cosched.schedule.base import PolicySettings
from cosched.schedule.cosched import CoschedPolicy
from cosched.schedule.media import tokens_with_media
from cosched.schedule.validate import validate
from tests.factories import FakeView, Linear, decoding, make_caps, offline, online

CAPS = make_caps(partial_decode=True, promises=True, max_chunk_tokens=4096, max_prefill_tokens=8192)
HEAD, IMAGE = 40, 400


@dataclass(frozen=True)
class Encoding(Linear):
    """Each token of an image takes `encoded_s`."""

    encoded_s: float = 1e-4

    def predict_s(self, totals):
        return super().predict_s(totals) + self.encoded_s * totals.num_encoded


def line(rid, num_encoded=IMAGE, *, begin=HEAD, **fields):
    """A head, an image of 400 tokens that takes the encoder as long as so many, and a question."""
    media = (Media(begin, num_encoded),)
    return offline(rid, HEAD + IMAGE + 30, traits=Traits(media=media), **fields)


def pool_of(*requests):
    """They share no prefix."""
    pool = PrefixPool(PoolConfig(num_buckets=1))
    for number, request in enumerate(requests):
        tokens = [number] * request.num_prompt_tokens
        pool.add(replace(request, arrival_seq=number, token_ids=tokens))
    pool.advance(10.0)
    return pool


def chatting(view=None, **fields):
    """A view with online decodes that leave 30 to 75 ms."""
    running = tuple(
        replace(decoding(online(f"run{i}", max_new_tokens=200), 2), first_token_s=9.95)
        for i in range(4)
    )
    return FakeView(caps=CAPS, now_s=10.0, start_s=10.0, total_kv=50_000, running=running, **fields)


def planned(view, predictor=None):
    settings = PolicySettings(caps=CAPS, slo=Slo(ttft_s=1.0, tpot_s=0.05))
    policy = CoschedPolicy(settings)
    view = replace(view, predictor=predictor or Encoding())
    plan, _ = policy.plan(view, policy.initial)
    validate(plan, view)
    return plan


def test_a_prompt_is_cut_before_an_image_that_does_not_fit():
    request = offline("a", 1000, traits=Traits(media=(Media(100, 50), Media(300, 50))))
    most = {0: 1000, 50: 500, 100: 250}
    cut = tokens_with_media(request, 0, 1000, lambda limit, encoded: min(limit, most[encoded]))
    assert cut == 300, "with the first image, not with the second"
    begun = tokens_with_media(request, 101, 899, lambda limit, encoded: min(limit, most[encoded]))
    assert begun == 500, "the first image was encoded with its first token"
    plain = tokens_with_media(offline("b", 1000), 0, 1000, lambda limit, encoded: limit - encoded)
    assert plain == 1000


@pytest.mark.parametrize("num_encoded", [10, 2500])
def test_one_image_that_leaves_no_time_makes_the_iteration_longer(num_encoded):
    """2,500 tokens take 250 ms: chat makes up for them before the next."""
    lines = tuple(line(f"off{i}", num_encoded) for i in range(3))
    plan = planned(chatting(offline=lines))
    begun = [rid for rid, num in plan.prefill.items() if num > HEAD]
    assert begun == (["off0"] if num_encoded > 1000 else [*plan.prefill])


def test_an_image_for_which_first_tokens_cannot_wait_leaves_the_time_to_others():
    """It would take 500 ms: a chat that comes meanwhile waits for 300 ms at most."""
    large = [line(f"large{i}", 5000, begin=0) for i in range(3)]
    plan = planned(chatting(offline=pool_of(*large, offline("text", 100))))
    assert [*plan.prefill] == ["text"]
    alone = FakeView(caps=CAPS, now_s=10.0, start_s=10.0, total_kv=50_000, offline=large)
    assert [*planned(alone).prefill] == ["large0"], "on an idle device it runs in any case"


@pytest.mark.parametrize(("deadline_s", "runs"), [(11.0, True), (None, False)])
def test_an_urgent_image_runs_beside_chat_however_long_it_takes(deadline_s, runs):
    large = line("large", 5000, begin=0, slo=Slo(deadline_s=deadline_s))
    assert ("large" in planned(chatting(offline=pool_of(large))).prefill) is runs


def test_an_image_of_a_chat_does_not_wait_for_decodes():
    media = Traits(media=(Media(0, 3000),))
    plan = planned(chatting(online=(online("chat", 300, arrival_s=9.9, traits=media),)))
    assert plan.prefill["chat"] > 0
