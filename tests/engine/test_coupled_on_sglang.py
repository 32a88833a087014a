"""The coupled schedulers on a real in-process SGLang scheduler: what is answered under stops."""

import pytest

from tests.engine.conftest import assert_drained
from tests.engine.test_policies_on_sglang import ask_all


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["eco-srtf", "eco-vllm", "eco-multires", "eco-syncfastgen"])
def test_what_is_answered_does_not_depend_on_the_policy(make_engine, overlap, name):
    flags = {"overlap": overlap, "page_size": 16}
    answers = ask_all(make_engine(policy="sarathi", **flags), seed=3)
    engine = make_engine(policy=name, max_total_tokens=992, **flags)
    assert ask_all(engine, seed=3) == answers
    assert engine.scheduler.cosched.counters.num_engine_refusals == 0
    assert_drained(engine)
