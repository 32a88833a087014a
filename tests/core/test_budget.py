"""The ledger of one iteration."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.budget import IterationBudget
from cosched.core.plan import SkipReason
from cosched.core.view import Match
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

NOTHING = Match(cached=0, evictable=0)


def test_running_requests_take_their_share_of_tokens_and_memory_in_mixed_batches():
    running = tuple(decoding(online(f"r{i}", 100, max_new_tokens=11), 1) for i in range(3))
    budget = IterationBudget(FakeView(running=running, total_kv=1000))
    assert budget.tokens == 512 - 3
    assert budget.headroom == 1000 - 300 - 3 * 10 - 3
    apart = IterationBudget(
        FakeView(running=running, total_kv=1000, caps=make_caps(mixed_batches=False))
    )
    assert apart.tokens == 512
    assert apart.headroom == 1000 - 300 - 3 * 10


def test_refusals_name_the_limit():
    request = online("a", 300, max_new_tokens=50)
    assert IterationBudget(FakeView()).refusal(request, NOTHING) is None
    tight = FakeView(total_kv=351)
    assert IterationBudget(tight).refusal(request, NOTHING) is SkipReason.MEMORY_BUDGET
    assert IterationBudget(FakeView(total_kv=352)).refusal(request, NOTHING) is None
    no_slot = FakeView(caps=make_caps(max_running_requests=1), running=(decoding(online("r")),))
    assert IterationBudget(no_slot).refusal(request, NOTHING) is SkipReason.REQUEST_SLOTS
    budget = IterationBudget(FakeView())
    budget.charge_admission(online("b", 512), NOTHING, 512)
    assert budget.refusal(request, NOTHING) is SkipReason.TOKEN_BUDGET
    budget = IterationBudget(FakeView())
    budget.charge_admission(online("b", 1000), NOTHING, 300)
    assert budget.refusal(request, NOTHING) is SkipReason.UNFINISHED_PREFILL


def test_a_cached_prefix_still_costs_the_evictable_tokens_it_pins():
    request = online("a", 1000, max_new_tokens=10)
    view = FakeView(total_kv=1012, evictable_kv=900)
    pinned = Match(cached=900, evictable=900)
    held_by_others = Match(cached=900, evictable=0)
    budget = IterationBudget(view)
    assert budget.shortfall(request, pinned) == 0
    assert budget.shortfall(request, held_by_others) == -900
    budget.charge_admission(request, pinned, 100)
    assert budget.headroom == 1012 - 900 - 100 - 1 - 10


def test_a_fork_does_not_touch_the_original():
    budget = IterationBudget(FakeView())
    trial = budget.fork()
    trial.charge_admission(online("a", 600), NOTHING, 512)
    assert (budget.tokens, budget.unfinished) == (512, 1)
    assert (trial.tokens, trial.unfinished) == (0, 0)


def test_stopping_a_request_gives_back_what_it_held():
    victim = decoding(offline("v", 200, max_new_tokens=50), 10)
    view = FakeView(running=(victim, decoding(online("r"))), total_kv=1000)
    with_victim, without = (
        IterationBudget(view),
        IterationBudget(FakeView(running=(decoding(online("r")),), total_kv=1000)),
    )
    with_victim.refund_preemption(victim)
    for name in ("tokens", "headroom", "slots"):
        assert getattr(with_victim, name) == getattr(without, name), name


@given(
    length=st.integers(1, 3000),
    cached_pages=st.integers(0, 50),
    page=st.sampled_from([1, 16, 64]),
    limit=st.integers(64, 2048),
)
def test_a_chunk_is_the_rest_of_the_prompt_or_ends_on_a_page(length, cached_pages, page, limit):
    cached = min(cached_pages * page, (length - 1) // page * page)
    budget = IterationBudget(FakeView(caps=make_caps(page_size=page, max_chunk_tokens=limit)))
    request = prefilled(offline("a", length), 0)
    chunk = budget.chunk(request, cached)
    assert 0 <= chunk <= length - cached
    if chunk < length - cached:
        assert (cached + chunk) % page == 0
        assert chunk + page > limit - page, "a larger chunk would have fitted"


def test_prompts_are_never_split_without_chunked_prefill():
    caps = make_caps(max_chunk_tokens=None, max_prefill_tokens=1000)
    budget = IterationBudget(FakeView(caps=caps, total_kv=100_000))
    assert budget.chunk(online("a", 900), 0) == 900
    assert budget.chunk(online("b", 5000), 0) == 5000, "the first prompt runs whole"
    budget.charge_admission(online("a", 900), NOTHING, 900)
    assert budget.chunk(online("b", 200), 0) == 0
