"""Views as properties of policies want them: of any kind of request, in any state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cosched.core.estimates import LengthEstimate
from cosched.core.kv_state import Match
from cosched.core.request import Traits
from cosched.memory.window_memory import WindowPool
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled


@st.composite
def views(draw):
    """Requests are called by their state: ``run0``, ``part0``, ``on0``, ``off0``, and so on. Those
    that are under way have a promise each, as after a plan of a policy that makes them."""
    caps = make_caps(
        page_size=draw(st.sampled_from([1, 16])),
        max_chunk_tokens=draw(st.sampled_from([None, 64, 512])),
        max_running_requests=16,
        mixed_batches=draw(st.booleans()),
        partial_decode=draw(st.booleans()),
        promises=True,
    )
    whole = st.builds(
        Traits,
        can_preempt=st.booleans(),
        can_mix=st.booleans(),
        can_cut=st.booleans(),
        num_rows=st.sampled_from([1, 1, 2]),
    )
    begun = whole.map(lambda traits: replace(traits, can_cut=True))
    lengths, promises, cached = {}, {}, {}

    def whole_pages(num_tokens):
        return num_tokens // caps.page_size * caps.page_size

    def request(rid):
        name = rid.rstrip("0123456789")
        make = online if name == "on" or (name != "off" and draw(st.booleans())) else offline
        made = make(
            rid,
            draw(st.integers(1, 700)),
            arrival_s=draw(st.sampled_from([-3.0, -0.99, -0.1, 0.0])),
            last_token_s=draw(st.sampled_from([None, -0.001, -0.03, -2.0])),
            max_new_tokens=draw(st.integers(6, 300)),
            num_preemptions=draw(st.integers(0, 1)),
            traits=draw(begun if name == "part" else whole),
        )
        expected = draw(st.integers(1, made.max_new_tokens))
        lengths[rid] = LengthEstimate(expected, expected)
        if name in ("run", "part"):
            promises[rid] = draw(st.integers(0, made.max_new_tokens))
        elif draw(st.booleans()):
            cached[rid] = Match(cached=whole_pages((made.num_prompt_tokens - 1) // 2), evictable=0)
        return made

    def requests(name, at_most):
        return [request(f"{name}{i}") for i in range(draw(st.integers(0, at_most)))]

    running = tuple(decoding(r, draw(st.integers(1, 5))) for r in requests("run", 5))
    unfinished = tuple(
        prefilled(r, whole_pages(r.num_prompt_tokens // 2)) for r in requests("part", 1)
    )
    num_free = draw(st.sampled_from([None, None, 0, 1, 2]))
    if num_free is not None:  # slots bind
        most = max(sum(r.traits.num_rows for r in (*running, *unfinished)) + num_free, 2)
        caps = replace(caps, max_running_requests=most)
    states, checkpoints = None, {}
    if draw(st.booleans()):
        states = draw(st.sampled_from([6, 20]))
        under_way = (*running, *unfinished)
        checkpoints = {r.rid: r.num_computed_tokens // 2 for r in under_way if draw(st.booleans())}
    windows = None
    if draw(st.booleans()):
        free, evictable = draw(st.sampled_from([0, 160, 800])), draw(st.sampled_from([0, 400]))
        if not (running or unfinished):
            evictable = 2000 - free  # no request holds any
        reserved = draw(st.sampled_from([0, 100]))
        windows = WindowPool(48, 16, free, evictable, reserved)
    return FakeView(
        windows=windows,
        host_free=draw(st.sampled_from([None, 0])),
        states=states,
        checkpoints=checkpoints,
        caps=caps,
        total_kv=draw(st.sampled_from([3_008, 6_016, 20_000])),
        running=running,
        unfinished=unfinished,
        online=tuple(requests("on", 4)),
        offline=tuple(requests("off", 3)),
        barred=draw(st.sets(st.sampled_from(["on0", "off0"]))),
        unholdable=draw(st.sets(st.sampled_from(["run0", "run1"]))),
        mean_iteration_s=draw(st.sampled_from([0.0, 0.02])),
        must_decode=draw(st.booleans()),
        lengths=lengths,
        promises=promises,
        cached=cached,
    )
