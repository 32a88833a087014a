"""The trial: what it measures, keeps, says and refuses. One of the tests asks a real server."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import httpx
import pytest

from cosched.cli import main
from cosched.core.request import Slo
from cosched.lab.benchmark import own_server, trial_phases
from cosched.lab.benchmark.live import LiveResult
from cosched.lab.benchmark.trial_phases import stock_flags
from cosched.lab.simulation.run import summarize_run
from cosched.lab.simulation.run_spec import RunSpec
from cosched.lab.simulation.setting import Setting
from cosched.lab.trial_page import PhaseFacts, PhaseResult, TrialPage
from tests.lab.metrics.samples import OFFLINE, request
from tests.serving import GUARDED_ADMIN_KEY, GUARDED_FLAGS

SLO = Slo(ttft_s=0.3, tpot_s=0.15)
TITLES = {
    "stock-alone": "stock SGLang, chat alone",
    "stock-batch": "stock SGLang",
    "cosched-alone": "cosched, chat alone",
    "cosched-batch": "cosched",
}


def records_of(online, *, delay_s, job=0):
    """Chats of which each token takes `delay_s`, and answered requests of the batch."""
    chats = [
        request(
            one.arrival_s,
            tuple(one.arrival_s + delay_s * (i + 1) for i in range(3)),
            sent_s=one.arrival_s,
        )
        for one in online
    ]
    batch = [request(-1.0, (i + 1.0,), request_class=OFFLINE) for i in range(job)]
    return chats + batch


def phase(name, *, delay_s=0.1, job=4, records=None, **facts):
    """Ten chats in 20 s, and a batch of eight requests of 101 tokens."""
    has_batch = name.endswith("batch")
    spec = RunSpec(
        setting=Setting(name=TITLES[name], summary="", policy="cosched", has_offline=has_batch),
        slo=SLO,
        duration_s=20.0,
    )
    if records is None:
        chats = [request(float(second)) for second in range(10)]
        records = records_of(chats, delay_s=delay_s, job=job if has_batch else 0)
    summary = summarize_run(spec, records, None, end_s=spec.end_s)
    result = LiveResult(spec=spec, summary=summary, records=records)
    known = {"job_requests": 8, "job_tokens": 8 * 101} if has_batch else {}
    return PhaseResult(title=TITLES[name], result=result, facts=PhaseFacts(**known | facts))


def page(command="cosched serve", **phases):
    """A trial of these phases; options of those that are not as they are by default."""
    results = {name: phase(name, **phases.get(name.replace("-", "_"), {})) for name in TITLES}
    return TrialPage(results=results, about="A model.", command=command, made_by="`this`")


def test_a_good_trial_ends_with_the_command_and_what_it_costs():
    good = page(cosched_batch={"delay_s": 0.12, "prediction_error": 0.034, "idle_share": 0.005})
    assert good.objections() == []
    text = good.text("images/trial.png")
    assert "```bash\ncosched serve\n```" in text and "](images/trial.png)" in text
    assert "TTFT goes from 100 to 120 ms and its TPOT from 100 to 120 ms" in text
    cells = dict(good.rows())["cosched"]
    assert cells["TTFT p50, p99 ms"] == "120, 120" and cells["TPOT x alone"] == "1.2, 1.2"
    assert (cells["prediction error %"], cells["idle %"]) == ("3.4", "0.5")
    assert cells["batch tokens/s"] == "20" and cells["job s"] == "~40"
    assert dict(good.rows())["stock SGLang, chat alone"]["TPOT x alone"] == ""
    assert json.loads(json.dumps(good.to_dict()))["phases"]["stock-batch"]["job_requests"] == 8


def test_a_job_that_was_done_has_its_own_time():
    done = page(cosched_batch={"job": 8})
    assert done.beside.is_job_done and dict(done.rows())["cosched"]["job s"] == "9"


@pytest.mark.parametrize(
    ("phases", "why"),
    [
        ({"cosched_batch": {"delay_s": 0.2}}, "beside the batch: 0.0 % of the requests meet them"),
        ({"stock_alone": {"delay_s": 0.2}}, "without any batch: 0.0 % of the requests meet"),
        ({"cosched_batch": {"job": 0}}, "nothing of the batch was done"),
        ({"cosched_batch": {"job": 2}}, "2.00 times as long as under stock SGLang, which keeps"),
        ({"cosched_alone": {"delay_s": 0.12}}, "chat takes 1.20 times as long per token"),
        (
            {"cosched_batch": {"records": [request(sent_s=0.0, ok=False, finish_reason="500")]}},
            "cosched: requests of chat failed",
        ),
        (
            {"cosched_alone": {"records": [request(1.0, (7.0, 7.1), sent_s=6.0)]}},
            "chat alone: the client itself was late",
        ),
    ],
)
def test_a_trial_says_why_not_to_deploy(phases, why):
    assert any(why in objection for objection in page(**phases).objections())
    verdict = page(**phases).verdict()
    assert "**Do not deploy**" in verdict and "```" not in verdict


def test_a_faster_job_of_stock_is_no_reason_where_stock_misses_targets_of_chat():
    assert page(stock_batch={"delay_s": 0.5, "job": 8}).objections() == []


def test_a_server_that_runs_is_kept_or_spared_the_batch():
    assert page(command=None).verdict().startswith("**Keep it**")
    late = page(command=None, cosched_batch={"delay_s": 0.2})
    assert late.verdict().startswith("**Do not run this batch beside this chat**")


def test_what_went_wrong_is_noted_and_an_unanswered_phase_is_drawn(tmp_path):
    nothing = page(
        stock_batch={"records": [request(sent_s=0.0)]}, cosched_batch={"load_average": 9.0}
    )
    text = nothing.text("trial.png")
    assert "1 of 1 online requests have no whole answer" in text
    assert "others used the machine too (load average 9.0 per core" in text
    drawn = nothing.draw(tmp_path / "trial.png", has_bursts=True)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_stock_servers_get_no_flags_of_cosched():
    flags = ["--dtype", "float32", "--cosched-tolerance", "ttft=5%", "--tp=2"]
    assert stock_flags(flags) == ["--dtype", "float32", "--tp=2"]


@pytest.fixture
def started(monkeypatch):
    """Policies of the servers that were started. A chat takes 40 ms a token there; `on_phase` gets
    the run of each phase before it is measured."""
    started = SimpleNamespace(policies=[], on_phase=lambda spec: None)

    @contextlib.asynccontextmanager
    async def serving(*, model_path, flags, log_path):
        started.policies.append(flags[flags.index("--cosched-policy") + 1])
        assert "--enable-metrics" in flags and model_path == "m"
        yield "http://127.0.0.1:1"

    async def warm_up(target, spec):
        pass

    async def measure_live(target, spec, online, offline, **options):
        started.on_phase(spec)
        records = records_of(online, delay_s=0.04, job=min(len(offline), 3))
        summary = summarize_run(spec, records, None, end_s=spec.end_s)
        return LiveResult(spec=spec, summary=summary, records=records)

    async def run_live(target, sources, *, duration_s):
        return [request(0.0, (1.0, 2.0), num_output_tokens=400) for _ in range(15)]

    async def post(target, path, body=None):
        assert path.startswith("/flush_cache")

    async def metrics_of(target):
        return {}

    monkeypatch.setattr(own_server, "serving", serving)
    monkeypatch.setattr(own_server, "_warm_up", warm_up)
    monkeypatch.setattr(TrialPage, "draw", lambda page, path, **options: path.touch())
    for replaced in (measure_live, run_live, post, metrics_of):
        monkeypatch.setattr(trial_phases, replaced.__name__, replaced)
    return started


def trial(tmp_path, *options):
    words = ["--model-path", "m", "--chat", "demo-chat", "--batch", "demo-job", "--seed", "3"]
    return main(["trial", *words, "--out", str(tmp_path), *options])


def test_an_interrupted_trial_continues_with_the_phases_that_it_lacks(tmp_path, started, capsys):
    def interrupt(spec):
        if spec.setting.policy == "priority":
            raise KeyboardInterrupt

    started.on_phase = interrupt
    with pytest.raises(SystemExit) as ended:
        trial(tmp_path)
    assert ended.value.code == 130 and started.policies == ["sglang", "priority"]
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [*kept["phases"]] == ["stock-alone", "stock-batch"]
    # Phases fill ten minutes; 15 answers of 400 tokens are many of 40.
    assert 80 < kept["window_s"] < 110 and kept["rate"] == pytest.approx(0.3 * kept["capacity"])
    started.policies.clear()
    specs = []
    started.on_phase = specs.append
    assert trial(tmp_path) == 0
    assert started.policies == ["priority", "cosched"]
    assert {spec.duration_s for spec in specs} == {kept["window_s"]}
    shown = capsys.readouterr().out
    assert "cosched serve --model-path m --cosched-slo-ttft-ms=1000" in shown
    figures = json.loads((tmp_path / "trial.json").read_text())
    assert figures["phases"].keys() == set(TITLES) | {"priority-batch"}
    assert json.loads(shown.splitlines()[-1])["phases"].keys() == figures["phases"].keys()
    text = (tmp_path / "trial.md").read_text()
    assert "30 % of what stock SGLang bears" in text and "--seed 3" in text
    assert (tmp_path / "trial.png").exists()
    started.policies.clear()
    assert trial(tmp_path) == 0 and not started.policies, "all is kept"


def test_a_trace_is_replayed_at_its_own_rate_and_lines_of_requests_at_the_rate_asked_for(
    tmp_path, started
):
    trace = tmp_path / "trace.csv"
    rows = [f"{second},100,10" for second in range(20)]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    body = {"model": "x", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps(line) + "\n")
    trial(tmp_path / "a", "--chat", str(trace), "--batch", str(lines))
    kept = json.loads((tmp_path / "a" / "kept.json").read_text())
    assert kept["rate"] == pytest.approx(1.0) and kept["capacity"] is None
    assert kept["phases"]["cosched-batch"]["job_tokens"] == 6 + 5
    trial(tmp_path / "b", "--chat", str(lines), "--rate", "2")
    records = (tmp_path / "b" / "stock-alone.jsonl").read_text().splitlines()
    window_s = json.loads((tmp_path / "b" / "kept.json").read_text())["window_s"]
    assert len(records) == pytest.approx(2 * window_s, rel=0.3)


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["trial", *words])
    assert ended.value.code == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("cosched: ")
    return shown


def test_other_options_do_not_continue_a_trial(tmp_path, started, capsys):
    trial(tmp_path, "--load", "0.2")
    words = ["--model-path", "m", "--chat", "demo-chat", "--batch", "demo-job", "--seed", "3"]
    words += ["--out", str(tmp_path), "--load"]
    said = refusal(capsys, *words, "0.5")
    assert "holds a trial with --load 0.2, now 0.5" in said and "another --out" in said
    said = refusal(capsys, *words, "0.2", "--tp", "2")
    assert "holds a trial with --flags none, now --tp 2" in said
    (tmp_path / "kept.json").write_text("{}")
    assert "is not of a trial" in refusal(capsys, *words, "0.2")


def test_too_little_time_is_an_error_that_says_what_would_do(tmp_path, started, capsys):
    with pytest.raises(SystemExit):
        trial(tmp_path, "--minutes", "0.5")
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--minutes 0.5 leaves 0 s for each of 5 phases" in said
    assert said.endswith("give it at least 3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chat", "nothing"], "no workload and no file 'nothing'; choose from agents"),
        (["--batch", "azure-lik"], "'azure-lik'"),
        (["--minutes", "0"], "--minutes"),
        (["--load", "1.5"], "--load"),
        (["--plot", "trial.png/x/y"], "--plot"),
        (["--rate", "2", "--load", "0.5"], "--rate 2 and --load 0.5: name one"),
        (["--port", "1"], "--port is set by the trial itself"),
        (["--cosched-policy=hygen"], "--cosched-policy is set by the trial itself"),
        (["--api-key", "x"], "are for the server of --base-url"),
        (["--base-url", "http://x", "--tp", "2"], "leave out --tp"),
        (["--base-url", "http://x"], "--base-url: name --rate"),
        (["--base-url", "x", "--rate", "1"], "must begin with http"),
    ],
)
def test_wrong_options_are_one_sentence_before_anything_starts(words, said, tmp_path, capsys):
    assert said in refusal(capsys, *words, "--out", str(tmp_path))
    assert not [*tmp_path.iterdir()]


def running(server, *options):
    words = ["--base-url", server.url, "--chat", "demo-chat", "--rate", "4", "--minutes", "0.5"]
    words += ["--admin-api-key", GUARDED_ADMIN_KEY, "--concurrency", "8", *options]
    return main(["trial", *words])


def test_a_server_that_runs_is_measured_and_left_as_it_was(servers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trial_phases, "LEAST_PHASE_S", 1.0)
    server = servers.get(*GUARDED_FLAGS)
    admin = {"authorization": f"Bearer {GUARDED_ADMIN_KEY}"}

    def limits(body=None):
        kind = "POST" if body else "GET"
        path = "/cosched/offline" if body else "/cosched"
        reply = httpx.request(kind, server.url + path, headers=admin, json=body)
        return reply.json()["replicas"][0]["offline_limits"]

    with pytest.raises(SystemExit):
        running(server, "--out", str(tmp_path))
    assert "has no offline work: start a batch, or name --batch" in capsys.readouterr().err
    before = limits({"max_running": 7})
    try:
        assert running(server, "--out", str(tmp_path), "--batch", "demo-job") == 0
        assert limits() == before and before["max_running"] == 7
    finally:
        limits({"max_running": None})
    figures = json.loads((tmp_path / "trial.json").read_text())
    paused, resumed = (figures["phases"][name] for name in ("paused", "resumed"))
    for one in (paused, resumed):
        online = one["summary"]["online"]
        assert online["num_finished"] == online["num_requests"] > 0 == online["num_failed"]
    assert paused["summary"]["offline"]["num_requests"] == 0
    assert resumed["summary"]["offline"]["tokens_per_s"] > 0 < resumed["job_s"]
    assert resumed["prediction_error"] is not None and 0 <= resumed["idle_share"] <= 1
    assert "beside offline work" in (tmp_path / "trial.md").read_text()
