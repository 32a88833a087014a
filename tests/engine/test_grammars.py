"""Grammars are compiled in turn: one that takes long delays its own request only."""

import itertools
import logging
import threading
from concurrent.futures import Future

import pytest

from cosched.core.request import RequestClass
from cosched.engine.port import grammar_compilers
from cosched.engine.port.grammar_compilers import CompilerShare, GrammarCompilers
from tests.engine.conftest import assert_drained, prompt

ONLINE, OFFLINE = RequestClass


@pytest.fixture
def engine(make_engine):
    return make_engine(policy="hygen", tokenizer=True, real_time=True)


def submit_constrained(engine, rid, regex):
    engine.submit(rid, prompt(3, 30), max_new_tokens=4, ignore_eos=False)
    engine._inbox[-1].sampling_params.regex = regex


def compiles_for_ever(engine, *, began_s=None):
    """began_s: of the compilation; None: it waits for a compiler."""

    def submit(*args):
        future = Future()
        future.began_s = began_s
        if began_s is not None:
            future.set_running_or_notify_cancel()
        return future

    engine.scheduler.grammar_manager.grammar_backend.executor.submit = submit


def test_a_grammar_constrains_its_request(engine):
    submit_constrained(engine, "a", "[0-9]+")
    engine.run_until_idle(max_iterations=20_000)
    assert engine.replies["a"].finish_reason in ("length", "stop")
    digits = engine.scheduler.tokenizer.decode(engine.replies["a"].output_ids)
    assert digits.isdigit()


def test_a_compilation_over_its_limit_fails_its_request_and_is_no_verdict(engine, caplog):
    pattern = "[a-z]{1,900}" + "x" * 5000
    compilers = engine.scheduler.grammar_manager.grammar_backend.executor
    submit = compilers.submit
    compiles_for_ever(engine, began_s=-grammar_compilers.GRAMMAR_LIMIT_S - 1)
    compilers._clock = lambda: 0.0
    submit_constrained(engine, "slow", pattern)
    engine.submit("chat", prompt(1, 40), max_new_tokens=8)
    engine.run_until_idle(max_iterations=200_000)
    assert engine.replies["slow"].finish_reason == "abort"
    assert "timed out" in engine.replies["slow"].message
    assert len(engine.replies["chat"].output_ids) == 8
    assert_drained(engine)
    assert "timed out" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    compilers.submit = submit
    submit_constrained(engine, "again", pattern)
    engine.run_until_idle(max_iterations=200_000)
    assert engine.replies["again"].finish_reason == "length"


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
    monkeypatch.setattr(grammar_compilers, "_MOST_GRAMMARS", 3)
    backend = engine.scheduler.grammar_manager.grammar_backend
    assert 0 < backend.grammar_compiler.cache_limit_bytes < 1 << 30
    sizes = []
    for index in range(8):
        submit_constrained(engine, f"r{index}", f"[a-z]{{1,{index + 1}}}")
        engine.run_until_idle(max_iterations=20_000)
        sizes.append(len(backend.cache))
    assert len(engine.replies) == 8
    assert sizes == [1, 2, 3, 3, 3, 3, 3, 3]


class Grammars:
    """Grammars that are compiled for as long as a test likes."""

    def __init__(self, share, **options):
        self.compilers = GrammarCompilers(share, **options)
        self.begun = []
        self.gates = {}
        self._has_begun = threading.Semaphore(0)

    def submit(self, request_class, owner, name):
        self.gates[name] = threading.Event()
        self.compilers.owner = (request_class, owner)
        return self.compilers.submit(self._compile, name)

    def _compile(self, name):
        self.begun.append(name)
        self._has_begun.release()
        assert self.gates[name].wait(120)
        return name

    def wait_begun(self):
        """The next grammar that begins."""
        assert self._has_begun.acquire(timeout=120)
        return self.begun[-1]


def test_online_grammars_come_first_and_owners_take_turns():
    grammars = Grammars(CompilerShare(num_compilers=1, num_offline=1, num_threads=1))
    first = grammars.submit(OFFLINE, "a", "first")
    assert grammars.wait_begun() == "first"
    waiting = [(OFFLINE, "a", "f1"), (OFFLINE, "a", "f2"), (OFFLINE, "b", "f3")]
    waiting += [(ONLINE, "a", "n1"), (ONLINE, "a", "n2"), (ONLINE, "a", "n3"), (ONLINE, "b", "n4")]
    futures = [grammars.submit(*one) for one in waiting]
    assert futures[5].cancel()  # n3: its client has left
    order = ["first", "n1", "n4", "n2", "f1", "f3", "f2"]
    for name, following in itertools.pairwise(order):
        grammars.gates[name].set()
        assert grammars.wait_begun() == following
    grammars.gates["f2"].set()
    assert first.result(10) == "first" and futures[1].result(10) == "f2"


def test_offline_grammars_leave_compilers_to_online_ones():
    grammars = Grammars(CompilerShare(num_compilers=2, num_offline=1, num_threads=1))
    futures = [grammars.submit(OFFLINE, "", f"f{index}") for index in range(3)]
    assert grammars.wait_begun() == "f0"
    chat = grammars.submit(ONLINE, "", "chat")
    assert grammars.wait_begun() == "chat"
    grammars.gates["chat"].set()
    assert chat.result(10) == "chat"
    assert [future.running() for future in futures] == [True, False, False]
    for gate in grammars.gates.values():
        gate.set()
    assert [future.result(10) for future in futures] == ["f0", "f1", "f2"]


def test_the_limit_counts_from_the_start_of_a_compilation_which_is_then_replaced():
    now_s = [0.0]
    share = CompilerShare(num_compilers=1, num_offline=1, num_threads=1)
    grammars = Grammars(share, clock=lambda: now_s[0])
    first, second, third = (grammars.submit(ONLINE, "", name) for name in ("1", "2", "3"))
    assert grammars.wait_begun() == "1"
    now_s[0] = 1.5 * grammar_compilers.GRAMMAR_LIMIT_S
    over = [grammars.compilers.is_over(future) for future in (first, second, third)]
    assert over == [True, False, False]
    assert grammars.wait_begun() == "2"
    now_s[0] *= 2  # the first still holds a thread: the second cannot be replaced too
    assert grammars.compilers.is_over(second) and not third.running()
    grammars.gates["1"].set()
    grammars.gates["2"].set()
    assert grammars.wait_begun() == "3"
    grammars.gates["3"].set()
    assert third.result(10) == "3"


@pytest.mark.parametrize("num_cores", [0, 1, 2, 4, 8, 16, 64, 256])
def test_compilations_leave_cores_to_the_scheduler(num_cores):
    share = CompilerShare.of(num_cores)
    assert 1 <= share.num_offline < share.num_compilers and share.num_threads >= 1
    assert share.num_offline * share.num_threads <= max(1, num_cores - 2)
    assert share.num_compilers * share.num_threads <= max(2, num_cores - 2)


def test_log_lines_do_not_hold_whole_grammars(engine, caplog):
    for name in grammar_compilers._LOGGERS:
        logging.getLogger(name).error("Hit invalid %s", "schema" * 1000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(grammar_compilers._LOGGERS)
    assert all(len(line) < 600 and "(6012 characters)" in line for line in lines)
