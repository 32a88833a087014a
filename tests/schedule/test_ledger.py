"""The ledger of one iteration."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.core.kv_state import Match
from cosched.core.plan import SkipReason
from cosched.core.request import Traits
from cosched.schedule.ledger import Ledger
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled

NOTHING = Match(cached=0, evictable=0)


def test_refusals_name_the_limit():
    request = online("a", 300, max_new_tokens=50)
    assert Ledger(FakeView()).refusal(request, NOTHING) is None
    tight = FakeView(total_kv=351)
    assert Ledger(tight).refusal(request, NOTHING) is SkipReason.MEMORY_BUDGET
    assert Ledger(FakeView(total_kv=352)).refusal(request, NOTHING) is None
    no_slot = FakeView(caps=make_caps(max_running_requests=1), running=(decoding(online("r")),))
    assert Ledger(no_slot).refusal(request, NOTHING) is SkipReason.REQUEST_SLOTS
    budget = Ledger(FakeView())
    budget.charge_admission(online("b", 512), NOTHING, 512)
    assert budget.refusal(request, NOTHING) is SkipReason.TOKEN_BUDGET
    budget = Ledger(FakeView())
    budget.charge_admission(online("b", 1000), NOTHING, 300)
    assert budget.refusal(request, NOTHING) is SkipReason.UNFINISHED_PREFILL


def test_a_cached_prefix_still_costs_the_evictable_tokens_it_pins():
    request = online("a", 1000, max_new_tokens=10)
    view = FakeView(total_kv=1012, evictable_kv=900)
    pinned = Match(cached=900, evictable=900)
    held_by_others = Match(cached=900, evictable=0)
    budget = Ledger(view)
    assert budget.kv.shortfall(request, pinned) == 0
    assert budget.kv.shortfall(request, held_by_others) == -900
    budget.charge_admission(request, pinned, 100)
    assert budget.kv.headroom == 1012 - 900 - 100 - 1 - 10


def test_a_resumed_request_is_charged_what_the_engine_charges_for_it():
    """SGLang asks for room for the output still to come, then takes room for all of it."""
    resumed = online("a", 100, num_output_tokens=40, max_new_tokens=50)
    budget = Ledger(FakeView(total_kv=152))
    assert budget.kv.shortfall(resumed, NOTHING) == 0
    budget.charge_admission(resumed, NOTHING, 140)
    assert budget.kv.headroom == 152 - 140 - 1 - 50


def test_stopping_a_request_gives_back_what_it_held():
    victim = decoding(offline("v", 200, max_new_tokens=50), 10)
    view = FakeView(running=(victim, decoding(online("r"))), total_kv=1000)
    with_victim, without = (
        Ledger(view),
        Ledger(FakeView(running=(decoding(online("r")),), total_kv=1000)),
    )
    with_victim.refund_preemption(victim)
    assert with_victim.kv.headroom == without.kv.headroom
    assert (with_victim.tokens, with_victim.slots) == (without.tokens, without.slots)


@given(
    length=st.integers(1, 3000),
    cached_pages=st.integers(0, 50),
    page=st.sampled_from([1, 16, 64]),
    limit=st.integers(64, 2048),
)
def test_a_chunk_is_the_rest_of_the_prompt_or_ends_on_a_page(length, cached_pages, page, limit):
    cached = min(cached_pages * page, (length - 1) // page * page)
    budget = Ledger(FakeView(caps=make_caps(page_size=page, max_chunk_tokens=limit)))
    request = prefilled(offline("a", length), 0)
    chunk = budget.chunk(request, Match(cached=cached, evictable=0))
    assert 0 <= chunk <= length - cached
    if chunk < length - cached:
        assert (cached + chunk) % page == 0
        assert chunk + page > limit - page, "a larger chunk would have fitted"


def test_without_chunked_prefill_prompts_are_whole_and_stay_below_the_limit_after_the_first():
    """As SGLang's adder counts."""
    caps = make_caps(max_chunk_tokens=None, max_prefill_tokens=512)
    budget = Ledger(FakeView(caps=caps))
    assert budget.chunk(online("first", 5000), NOTHING) == 5000
    budget.charge_admission(online("a", 412), NOTHING, 412)
    assert budget.refusal(online("b", 99), NOTHING) is None
    assert budget.refusal(online("c", 100), NOTHING) is SkipReason.TOKEN_BUDGET
    assert budget.chunk(online("c", 100), NOTHING) == 0


def test_no_more_requests_prefill_than_the_engine_lets():
    caps = make_caps(max_prefills=2)
    unfinished = prefilled(online("r", 100), 50)
    budget = Ledger(FakeView(caps=caps, unfinished=(unfinished,)))
    budget.charge_continuation(unfinished, 50)
    assert budget.refusal(online("a", 10), NOTHING) is None
    budget.charge_admission(online("a", 10), NOTHING, 10)
    assert budget.refusal(online("b", 10), NOTHING) is SkipReason.REQUEST_SLOTS


def test_chunks_leave_room_for_the_pages_that_decodes_open():
    """The engine asks for what may be generated one day; this is about what is taken at once."""
    caps = make_caps(page_size=64, max_chunk_tokens=1024)
    running = tuple(
        decoding(online(f"r{i}", 64, max_new_tokens=1), 1)
        for i in range(3)  # each at the end of a page
    )
    view = FakeView(caps=caps, running=running, total_kv=9 * 64)
    budget = Ledger(view)
    assert budget.kv.available == (9 - 3 - 3) * 64
    # A page is kept for rounding.
    assert budget.chunk(online("a", 1000), NOTHING) == 2 * 64
    budget.charge_continuation(prefilled(online("a", 1000), 0), 128)
    assert budget.chunk(online("b", 10), NOTHING) == 0
    budget.refund_pauses((running[0],))
    assert budget.kv.available == 64


def test_chunks_come_in_the_units_that_the_engine_aligns_them_to():
    caps = make_caps(page_size=16, chunk_align=24, max_chunk_tokens=512)
    assert caps.chunk_unit == 48
    budget = Ledger(FakeView(caps=caps))
    assert budget.chunk(online("a", 1000), NOTHING) == 480
    assert budget.chunk(online("a", 1000), Match(cached=32, evictable=0), at_most=100) == 96
    assert budget.chunk(online("a", 1000), NOTHING, at_most=47) == 0
    assert budget.chunk(online("a", 100), NOTHING) == 100


def test_a_prompt_that_cannot_be_cut_is_computed_whole_or_waits():
    whole = Traits(can_cut=False)
    budget = Ledger(FakeView(running=(decoding(online("r")),)))
    # First in its batch it may take what the decodes beside it are counted for.
    assert budget.chunk(online("a", 512, traits=whole), NOTHING) == 512
    assert budget.chunk(online("a", 513, traits=whole), NOTHING) == 0
    budget.charge_admission(online("b", 100), NOTHING, 100)
    assert budget.chunk(online("a", 411, traits=whole), NOTHING) == 411
    assert budget.chunk(online("a", 412, traits=whole), NOTHING) == 0


def test_adapters_are_counted_with_those_that_run():
    def with_adapter(rid, adapter):
        return online(rid, 10, traits=Traits(adapter=adapter))

    running = (decoding(with_adapter("r", "A")), decoding(online("s", 10)))
    view = FakeView(caps=make_caps(max_adapters=2), running=running)
    budget = Ledger(view)
    assert budget.refusal(with_adapter("a", "A"), NOTHING) is None
    assert budget.refusal(online("b", 10), NOTHING) is None
    assert budget.refusal(with_adapter("c", "C"), NOTHING) is SkipReason.ADAPTERS
    trial = budget.fork()
    trial.refund_preemption(running[0])
    assert trial.refusal(with_adapter("c", "C"), NOTHING) is None
    assert budget.refusal(with_adapter("c", "C"), NOTHING) is SkipReason.ADAPTERS


def test_beams_take_a_slot_each_as_the_engine_counts_them():
    """SGLang admits three beams as one of the first two requests of a batch."""
    beams = online("b", 10, traits=Traits(num_rows=3))
    budget = Ledger(FakeView(caps=make_caps(max_running_requests=8)))
    budget.charge_admission(online("a", 10), NOTHING, 10)
    assert budget.slots == 7 and budget.refusal(beams, NOTHING) is None
    budget.charge_admission(beams, NOTHING, 10)
    assert budget.slots == 4
    assert budget.refusal(beams, NOTHING) is SkipReason.REQUEST_SLOTS
    assert budget.refusal(online("c", 10), NOTHING) is None


def test_what_is_loaded_from_the_host_takes_memory_but_no_computing():
    request = online("a", 300, max_new_tokens=10)
    view = FakeView(total_kv=312)
    assert Ledger(view).refusal(request, Match(cached=200, evictable=0, to_load=200)) is None
    tight = FakeView(total_kv=311)
    match = Match(cached=200, evictable=0, to_load=200)
    assert Ledger(tight).refusal(request, match) is SkipReason.MEMORY_BUDGET
    budget = Ledger(view)
    assert budget.chunk(request, match) == 100
    budget.charge_admission(request, match, 100)
    assert budget.kv.available == 312 - 200 - 100 - 1


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100)), max_size=6),
    st.integers(0, 100),
    st.sampled_from([1, 16]),
    st.booleans(),
)
def test_a_promise_counts_in_the_plan_that_makes_it_as_in_those_after(
    running, waiting, page_size, is_mixed
):
    requests = tuple(
        decoding(offline(f"r{i}", 30, max_new_tokens=100), min(num_output, 99))
        for i, (num_output, _) in enumerate(running)
    )
    new = offline("new", 60, max_new_tokens=100)
    promises = {f"r{i}": promised for i, (_, promised) in enumerate(running)} | {"new": waiting}
    caps = make_caps(page_size=page_size, mixed_batches=is_mixed, promises=True)
    common = {"caps": caps, "running": requests, "offline": [new]}
    now, later = Ledger(FakeView(**common)), Ledger(FakeView(**common, promises=promises))
    for request in (*requests, new):
        now.kv.promise(request, promises[request.rid])
    assert now.kv.promises == promises
    for stopped in (*requests[:1], None):
        assert now.kv.headroom == later.kv.headroom
        assert now.kv.shortfall(new, NOTHING) == later.kv.shortfall(new, NOTHING)
        if stopped is not None:
            now.refund_preemption(stopped)
            later.refund_preemption(stopped)
    now.charge_admission(new, NOTHING, 60)
    later.charge_admission(new, NOTHING, 60)
    assert now.kv.headroom == later.kv.headroom


def test_what_is_promised_is_what_is_kept():
    request = offline("a", 100, max_new_tokens=1000)
    ledger = Ledger(FakeView(caps=make_caps(promises=True), total_kv=500))
    assert ledger.refusal(request, NOTHING) is SkipReason.MEMORY_BUDGET
    ledger.kv.promise(request, 50)
    assert ledger.refusal(request, NOTHING) is None
    ledger.charge_admission(request, NOTHING, 100)
    assert ledger.kv.headroom == 500 - 100 - 1 - 50
