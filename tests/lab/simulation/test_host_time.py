"""Host time in virtual time."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cosched.errors import ConfigError
from cosched.lab.simulation import run as run_module
from cosched.lab.simulation.host_time import Model, Terms, read_host_time
from cosched.lab.simulation.run import execute
from tests.simulated import lengths, make_spec, requests_file


@pytest.fixture
def costs(monkeypatch):
    """Have each iteration of a run cost the host this."""

    def use(launch_s, result_s):
        host = Model(launch=Terms(each=launch_s), result=Terms(each=result_s))
        monkeypatch.setattr(run_module, "host_time", lambda *_: host)

    return use


class Constant:
    """A device on which all iterations take the same time."""

    graph_sizes = None

    def __init__(self, seconds):
        self.seconds = seconds

    def iteration_s(self, batch):
        return self.seconds

    def describe(self):
        return {}


def gaps_of(result):
    """Idle time of the device between decodes, and the time of the decode before [s]."""
    rows = result.iterations
    start_s, seconds = (np.array(rows.column(name)) for name in ("start_s", "duration_s"))
    return (start_s[1:] - start_s[:-1] - seconds[:-1])[10:-10], seconds[10:-11]


@pytest.mark.parametrize("name", ["s1", "sarathi"])
def test_the_device_is_idle_for_what_it_does_not_hide_of_the_host_time(costs, name, tmp_path):
    """One job with one running request: decodes one after the other."""
    one = requests_file(tmp_path / "one.csv", [(0, 400, 200)])
    spec = make_spec(name, online=None, offline=one)
    costs(0.001, 0.001)
    gaps_s, decode_s = gaps_of(execute(spec))
    assert len(gaps_s) > 100 and decode_s.min() > 0.002
    assert gaps_s == pytest.approx(0.0, abs=1e-9)
    costs(0.030, 0.012)
    gaps_s, decode_s = gaps_of(execute(spec))
    assert gaps_s == pytest.approx(0.042 - decode_s, abs=1e-9)
    if name == "s1":  # without overlap nothing is hidden
        costs(0.002, 0.003)
        gaps_s, _ = gaps_of(execute(replace(spec, machine=replace(spec.machine, overlap=False))))
        assert len(gaps_s) > 100 and gaps_s == pytest.approx(0.005, abs=1e-9)


@pytest.mark.parametrize("name", [pytest.param("s1", marks=pytest.mark.long), "hygen"])
def test_a_slower_host_never_ends_a_job_earlier(name, tmp_path):
    job = requests_file(tmp_path / "job.csv", [(i, 400, 60) for i in range(12)])
    spec = make_spec(name, online=None, offline=job, duration_s=60.0)
    ends_s = [execute(replace(spec, host_time=text)).end_s for text in ("0.01", "8", "100")]
    assert ends_s == sorted(ends_s) and ends_s[-1] > 1.5 * ends_s[0]


def test_measured_host_time_is_that_of_plans_and_not_of_the_simulation(monkeypatch, tmp_path):
    from cosched.engine.controller import Controller
    from cosched.lab.simulation.virtual import VirtualEngine

    one = requests_file(tmp_path / "one.csv", [(0, 400, 100)])
    spec = make_spec("sarathi", online=None, offline=one)
    spec = replace(spec, duration_s=1000.0, host_time="measured")
    num_slept = Counter()

    def sleeps(owner, method):
        original = getattr(owner, method)

        def sleep_and_call(*args, **kwargs):
            num_slept[method] += 1
            if num_slept[method] <= 10:
                time.sleep(0.1)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, sleep_and_call)

    began_s = time.perf_counter()
    sleeps(VirtualEngine, "_record")
    sleeps(VirtualEngine, "_modelled")
    ends_s = [execute(spec).end_s]
    wall_s = time.perf_counter() - began_s
    sleeps(Controller, "plan")
    ends_s.append(execute(spec).end_s)
    assert wall_s > 20 * 0.1 and num_slept["plan"] > 10
    # Of each sleep of 0.1 s some milliseconds are hidden.
    assert ends_s[0] < execute(replace(spec, host_time="none")).end_s + wall_s - 19 * 0.1
    assert ends_s[1] > 9 * 0.08 + execute(replace(spec, host_time="0.01")).end_s


def test_the_lead_of_a_wait_for_the_last_moment_follows_the_host_time(costs, monkeypatch, tmp_path):
    """Its length is learned from launches for which the device had to wait."""
    monkeypatch.setattr("cosched.engine.features.plan_timing._FIRST_LEAD_S", 0.004)
    leads_s = []
    for seconds in (0.001, 0.006):
        costs(seconds, 0.0005)
        job = requests_file(tmp_path / "job.csv", [(i, 400, 500) for i in range(6)])
        spec = make_spec("hygen", online=None, offline=job)
        state = execute(replace(spec, duration_s=20.0)).cosched
        assert state["num_waits"] > 400 and state["num_dry"] < 0.05 * state["num_waits"]
        leads_s.append(state["lead_s"])
    assert leads_s[0] < 0.004 < 0.0055 < leads_s[1] < 0.010


@pytest.mark.parametrize("text", ["", "slow", "0", "-1", "nan", "inf", "1000"])
def test_a_host_time_that_is_no_setting_is_refused(text):
    with pytest.raises(ConfigError, match="none nor measured nor a factor"):
        read_host_time(text)


def test_equal_settings_of_host_time_are_written_alike():
    told = [read_host_time(text) for text in ("none", "measured", "1", "1.0", "0.50")]
    assert told == ["none", "measured", "1", "1", "0.5"]


def test_a_launch_before_the_first_kernel_is_hidden_after_a_wait_for_the_last_moment(
    monkeypatch, tmp_path
):
    """The device must not run dry between the launch and its first kernel."""
    monkeypatch.setattr("cosched.engine.features.plan_timing._FIRST_LEAD_S", 0.004)
    monkeypatch.setattr("cosched.lab.simulation.run.cost_model_of", lambda _: Constant(0.008))
    host = Model(launch=Terms(each=0.0015), result=Terms())
    monkeypatch.setattr(run_module, "host_time", lambda *_: host)
    spec = make_spec(
        "hygen", online=None, offline=lengths(tmp_path / "one.csv", []), duration_s=20.0
    )
    spec = replace(spec, cost=replace(spec.cost, launch_ms=1.5))
    result = execute(spec)
    assert result.cosched["num_waits"] > 400
    gaps_s, _ = gaps_of(result)
    assert gaps_s[-300:].mean() < 0.0001
