"""A grammar that takes long to compile delays only its own request."""

from concurrent.futures import Future

import pytest

from cosched.engine.port import scheduler as port_scheduler
from tests.engine.conftest import assert_drained, prompt


@pytest.fixture
def engine(make_engine):
    return make_engine(policy="hygen", tokenizer=True, real_time=True)


def submit_constrained(engine, rid, regex):
    engine.submit(rid, prompt(3, 30), max_new_tokens=4, ignore_eos=False)
    engine._inbox[-1].sampling_params.regex = regex


def compiles_for_ever(engine):
    backend = engine.scheduler.grammar_manager.grammar_backend
    backend.executor.submit = lambda *args: Future()


def test_a_grammar_constrains_its_request(engine):
    submit_constrained(engine, "a", "[0-9]+")
    engine.run_until_idle(max_iterations=20_000)
    assert engine.replies["a"].finish_reason in ("length", "stop")
    digits = engine.scheduler.tokenizer.decode(engine.replies["a"].output_ids)
    assert digits.isdigit()


def test_a_grammar_that_does_not_compile_in_time_fails_its_request(engine, monkeypatch):
    compiles_for_ever(engine)
    monkeypatch.setattr(port_scheduler, "GRAMMAR_LIMIT_S", 0.5)
    submit_constrained(engine, "slow", "[a-z]+")
    engine.submit("chat", prompt(1, 40), max_new_tokens=8)
    engine.run_until_idle(max_iterations=200_000)
    assert engine.replies["slow"].finish_reason == "abort"
    assert "timed out" in engine.replies["slow"].message
    assert len(engine.replies["chat"].output_ids) == 8
    assert_drained(engine)


def test_iterations_do_not_wait_for_a_grammar(engine, monkeypatch):
    compiles_for_ever(engine)
    waits = []
    monkeypatch.setattr(
        "sglang.srt.constrained.grammar_manager.time.sleep", lambda s: waits.append(s)
    )
    submit_constrained(engine, "slow", "[a-z]+")
    engine.submit("chat", prompt(1, 40), max_new_tokens=20)

    def act(iteration):
        if iteration == 15:
            engine.abort("slow")

    engine.run_until_idle(on_iteration=act, max_iterations=1000)
    assert len(engine.replies["chat"].output_ids) == 20
    assert waits and max(waits) <= 1e-4


def test_compiled_grammars_do_not_fill_the_memory(engine, monkeypatch):
    monkeypatch.setattr(port_scheduler, "_MOST_GRAMMARS", 3)
    cache = engine.scheduler.grammar_manager.grammar_backend.cache
    sizes = []
    for index in range(8):
        submit_constrained(engine, f"r{index}", f"[a-z]{{1,{index + 1}}}")
        engine.run_until_idle(max_iterations=20_000)
        sizes.append(len(cache))
    assert len(engine.replies) == 8
    assert sizes == [1, 2, 3, 3, 3, 3, 3, 3]
