"""The soak itself: short ones of each kind of configuration, and that it finds what is broken."""

import re
from dataclasses import replace

import msgspec
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.errors import ConfigError
from tests.soak.__main__ import build_parser
from tests.soak.run import run
from tests.soak.spec import FEATURES, MATRIX, SoakSpec
from tests.soak.traffic import Ask, Traffic

SHORT = SoakSpec(seed=1, episodes=(0,), compute=False, page_size=1)


def asks_of(client):
    """Everything that a client sends when each reply is empty."""
    answer, asks = None, []
    for _ in range(200):
        try:
            action = client.send(answer)
        except StopIteration:
            break
        sent = list(getattr(action, "asks", ()))
        asks += sent
        answer = {ask.rid: [] for ask in sent} if type(action).__name__ == "Send" else None
    return asks


def all_asks(spec, episode=0) -> dict[str, Ask]:
    traffic = Traffic(spec)
    return {ask.rid: ask for client in traffic.episode(episode) for ask in asks_of(client)}


@pytest.mark.parametrize(
    "changes",
    [
        {"compute": True},
        # Sessions, conversations, jobs, clients that come back, and the cache flushed.
        {"episodes": (47,), "conservativeness": 0.3},
        {"episodes": (47, 51), "conservativeness": 0.3, "page_size": 16, "overlap": False},
        {"policy": "sarathi", "overlap": False, "mixed": False},
        {"policy": "echo-bs+e+s", "conservativeness": 0.3},
        {"policy": "sglang", "page_size": 16},
        {"policy": "sarathi", "page_size": 16, "shared_pages": True},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_a_short_soak_goes_well(changes):
    # Beam search and LoRA beside held requests have tests of their own.
    outcome = run(replace(SHORT, without=("beam",), **changes), num_compared=10)
    assert outcome.failure is None, outcome.trace
    counts = outcome.counts
    assert counts["compared"] == 10
    sent = counts["sent online"] + counts["sent offline"]
    assert sent == sum(count for name, count in counts.items() if name.startswith("ended by"))
    assert sent > 20 and counts["iterations"] > 50
    if "episodes" in changes:
        assert counts.get("preemptions"), counts


def test_equal_specifications_run_alike():
    first, second = (run(SHORT, num_compared=0) for _ in range(2))
    assert first.failure is None
    assert (first.counts, first.virtual_s) == (second.counts, second.virtual_s)


def test_a_leak_is_found_and_a_part_of_it_is_enough(monkeypatch):
    """An adapter that forgets to give back what a preempted request held."""
    import tests.soak.engine as engine_module

    made = engine_module.SoakEngine._take_over

    def leaky(engine):
        made(engine)
        engine.scheduler.token_to_kv_pool_allocator.alloc(engine.spec.page_size)

    monkeypatch.setattr(engine_module.SoakEngine, "_take_over", leaky)
    outcome = run(SHORT, num_compared=0)
    assert outcome.failure is not None and "Leak" in outcome.failure
    assert outcome.episode == 0


def test_a_request_that_gets_nothing_is_found(monkeypatch):
    import tests.soak.engine as engine_module

    made = engine_module.SoakEngine._take_over

    def never_offline(engine):
        made(engine)
        policy = engine.controller.planner.policy

        class OnlineOnly:
            initial = None

            def plan(self, view, state):
                plan, _ = policy.plan(view, None)
                offline = {request.rid for request in view.offline_order()}
                kept = {rid: n for rid, n in plan.prefill.items() if rid not in offline}
                return msgspec.structs.replace(plan, prefill=kept), None

        engine.controller.planner.policy = OnlineOnly()

    monkeypatch.setattr(engine_module.SoakEngine, "_take_over", never_offline)
    outcome = run(replace(SHORT, policy="sarathi"), num_compared=0)
    assert re.search(r"\[(stall|starved)\]", outcome.failure), outcome.trace


def test_a_wrong_output_is_found(monkeypatch):
    import tests.soak.engine as engine_module

    made = engine_module._made_up
    calls = []

    def wrong_once(batch):
        result = made(batch)
        calls.append(batch)
        if len(calls) == 30:
            result.next_token_ids += 1
        return result

    monkeypatch.setattr(engine_module, "_made_up", wrong_once)
    outcome = run(SHORT, num_compared=10_000)
    assert "[output]" in outcome.failure


def test_leaving_out_a_feature_changes_nothing_in_the_others():
    everything = all_asks(SoakSpec(page_size=1))
    for feature in ("abort", "penalties", "lora", "targets"):
        fewer = all_asks(SoakSpec(page_size=1, without=(feature,)))
        assert fewer.keys() == everything.keys()
        same = [rid for rid, ask in fewer.items() if ask == everything[rid]]
        assert len(fewer) // 2 < len(same)
    assert all(ask.abort is None for ask in all_asks(SoakSpec(without=("abort",))).values())
    assert not all_asks(SoakSpec(), 1).keys() & all_asks(SoakSpec(), 2).keys()


def test_a_specification_is_its_command_line():
    for spec in (*MATRIX, replace(SHORT, without=("beam", "lora"))):
        arguments = vars(build_parser().parse_args(spec.arguments()))
        fields = SoakSpec.__dataclass_fields__.keys() & arguments.keys()
        assert SoakSpec(**{name: arguments[name] for name in fields}) == spec


def test_the_matrix_has_every_policy_and_page_size():
    from cosched.policies import POLICIES

    cold = {name for name, of in POLICIES.items() if of.predictor is None}
    assert {spec.policy for spec in MATRIX} == cold
    assert {spec.page_size for spec in MATRIX} == {1, 16, 64}


def test_unknown_features_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'beams'.*beam"):
        SoakSpec(without=("beams",))
    assert "beam" in FEATURES


def test_outputs_that_depend_on_what_is_still_on_its_way_are_not_compared():
    asks = all_asks(replace(SHORT, compute=True)).values()
    plain = [ask for ask in asks if ask.is_repeatable(overlap=True)]
    assert not any("penalty" in name for ask in plain for name in ask.sampling)
    assert any(
        "repetition_penalty" in ask.sampling for ask in asks if ask.is_repeatable(overlap=False)
    )
