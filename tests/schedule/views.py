"""Views as properties of policies want them: of any kind of request, in any state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from cosched.core.request import Traits
from tests.factories import FakeView, decoding, make_caps, offline, online, prefilled


@st.composite
def views(draw):
    """Requests are called by their state: ``run0``, ``part0``, ``on0``, ``off0``, and so on."""
    caps = make_caps(
        page_size=draw(st.sampled_from([1, 16])),
        max_chunk_tokens=draw(st.sampled_from([None, 64, 512])),
        max_running_requests=16,
        mixed_batches=draw(st.booleans()),
        partial_decode=draw(st.booleans()),
    )
    cut_traits = st.builds(Traits, can_preempt=st.booleans(), can_mix=st.booleans())
    traits = st.builds(
        Traits, can_preempt=st.booleans(), can_mix=st.booleans(), can_cut=st.booleans()
    )

    def requests(name, at_most):
        made = []
        for i in range(draw(st.integers(0, at_most))):
            make = online if name == "on" or (name != "off" and draw(st.booleans())) else offline
            made.append(
                make(
                    f"{name}{i}",
                    draw(st.integers(1, 700)),
                    arrival_s=draw(st.sampled_from([-3.0, -0.99, -0.1, 0.0])),
                    last_token_s=draw(st.sampled_from([None, -0.001, -0.03, -2.0])),
                    max_new_tokens=draw(st.integers(6, 50)),
                    num_preemptions=draw(st.integers(0, 1)),
                    traits=draw(traits if name != "part" else cut_traits),
                )
            )
        return made

    running = tuple(decoding(r, draw(st.integers(1, 5))) for r in requests("run", 8))
    begun = requests("part", 1)
    num_free = draw(st.sampled_from([None, None, 0, 1, 2]))
    if num_free is not None:  # slots bind
        most = max(len(running) + len(begun) + num_free, 1)
        caps = replace(caps, max_running_requests=most)
    return FakeView(
        caps=caps,
        total_kv=draw(st.sampled_from([3_000, 6_000, 20_000])),
        running=running,
        unfinished=tuple(prefilled(r, r.num_prompt_tokens // 2) for r in begun),
        online=tuple(requests("on", 5)),
        offline=tuple(requests("off", 4)),
        barred=draw(st.sets(st.sampled_from(["on0", "off0"]))),
        unholdable=draw(st.sets(st.sampled_from(["run0", "run1"]))),
        mean_iteration_s=draw(st.sampled_from([0.0, 0.02])),
        must_decode=draw(st.booleans()),
    )
