"""Which stock setting counts as the best one."""

from hypothesis import given
from hypothesis import strategies as st

from cosched.benchmark.tuned import TOLERANCE, choose_tuned, other_order, tuned_candidates
from cosched.simulation.run import RunSpec
from cosched.simulation.scenario import scenario

SHARE = st.floats(0, 1)
SETTINGS = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.tuples(SHARE, SHARE, st.floats(0, 1e5)),
    min_size=1,
)


@given(SETTINGS)
def test_most_throughput_among_those_near_online_only_else_the_nearest(settings):
    best = choose_tuned(settings)
    lacking = {name: max(base - met, 0.0) for name, (met, base, _) in settings.items()}
    near = {name for name in settings if lacking[name] <= TOLERANCE}
    if near:
        assert best in near
        assert settings[best][2] == max(settings[name][2] for name in near)
    else:
        assert lacking[best] == min(lacking.values())


def test_the_sweep_names_its_settings_and_tries_the_other_order_of_the_best():
    candidates = tuned_candidates(RunSpec(scenario=scenario("s1")))
    assert len(candidates) == 10
    assert all(spec.scenario.policy == "priority" for spec in candidates.values())
    spec = candidates["512 mixed fcfs"]
    assert spec.machine.chunk_tokens == 512 and spec.machine.mixed_chunk is True
    [(name, other)] = other_order(spec).items()
    assert name == "512 mixed lof"
    assert other.machine.schedule_policy == "lof" and other.machine.mixed_chunk is True
