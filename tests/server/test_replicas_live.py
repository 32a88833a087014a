"""Two servers with one store, one of them killed in the middle of a batch."""

from __future__ import annotations

import pytest

from tests.batch import postgres, replicas


@pytest.mark.skipif(postgres.programs() is None, reason=postgres.MISSING)
def test_a_batch_outlives_a_replica_and_chats_go_on(forks, tmp_path):
    small = {"num_lines": 60, "max_tokens": 30, "num_users": 1, "chats_beside_s": 3.0}
    seen = replicas.run(tmp_path / "batches", forks, **small)
    chats = seen["chats"]
    assert not chats["before_the_kill"]["failed"] and not chats["after_the_kill"]["failed"]
    assert chats["after_the_kill"]["answered"] > 3


@pytest.mark.long  # two servers more, and its claim of a callback ends after 40 s
@pytest.mark.skipif(postgres.programs() is None, reason=postgres.MISSING)
def test_batches_that_end_while_a_replica_is_killed_are_told(forks, tmp_path):
    small = {"num_batches": 6, "num_lines": 120, "max_tokens": 10}
    seen = replicas.run_callbacks(tmp_path / "batches", forks, **small)
    assert sum(seen["events_of_each"]) == 8
