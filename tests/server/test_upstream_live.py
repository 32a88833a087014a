"""SGLang's own tests of a server, on cosched. ``python -m tests.upstream`` compares with stock."""

import pytest

from tests.serving import start_server
from tests.upstream import BY_DESIGN, FLAGS, NEEDS_A_MODEL, QUICK, outcomes

pytestmark = pytest.mark.server


def test_sglangs_own_tests_pass(tiny_model, forks):
    with start_server(tiny_model, *FLAGS, forks=forks) as server:
        found = outcomes(server, QUICK, without=NEEDS_A_MODEL)
    failed = {name: why for name, why in found.items() if why != "passed"}
    assert not failed.keys() - BY_DESIGN.keys(), failed
    assert len(found) - len(failed) > 14
