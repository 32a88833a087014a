"""DP attention in virtual time: schedulers in processes of their own, which step together."""

import pytest

from cosched.errors import CoschedError
from cosched.lab.simulation.parallel import execute_all
from cosched.lab.simulation.run_spec import WorkloadSpec
from tests.simulated import make_spec, offline, online


def run(name, **machine):
    jobs = {"offline": WorkloadSpec(name="bros-offline", num_requests=20), "duration_s": 4.0}
    machine |= {"dp_ranks": 2, "max_running_requests": 64}
    spec = make_spec(name, machine=machine, **jobs)
    ((_, result),) = execute_all([spec], num_jobs=1)
    return result


def test_two_ranks_share_the_requests_and_the_time():
    result = run("cosched")
    state = result.cosched
    assert state["num_plans"] > 30
    assert state["num_safe_plans"] == state["num_engine_refusals"] == 0
    assert len(offline(result)) == 20 and all(r.is_finished for r in offline(result))
    assert result.summary.online.attainment.joint.ratio > 0.95
    rows = result.iterations
    assert (rows.column("duration_s") > 0).all()
    ends, starts = rows.end_s[:-1], rows.column("start_s")[1:]
    assert (starts >= ends - 1e-9).all()
    # The first rank has half of the requests: the rows are those of both.
    assert state["offline_output_tokens"] < sum(r.num_output_tokens for r in offline(result))
    ends_of = {token_s for r in online(result) for token_s in r.token_times or ()}
    assert ends_of <= {*map(float, rows.end_s)}


def test_what_one_rank_cannot_do_ends_the_run():
    with pytest.raises(CoschedError, match="host memory"):
        run("cosched", host_kv_tokens=1000)
