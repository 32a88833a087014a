"""The page at ``/cosched``: it asks nobody but its server, for what that has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from importlib.resources import files

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.batch.jsonl.lines import URLS
from cosched.core.plan import SkipReason
from cosched.engine.latency_histogram import bucket_of, p99_s
from cosched.engine.state import ReplicaState
from cosched.memory.occupancy import KV_USES, KvOccupancy
from cosched.pool.prefix_pool import PoolStats
from cosched.server.history import History

PAGE = files("cosched.server").joinpath("page.html").read_text()
SCRIPT = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)[1]


def test_uses_of_memory_have_the_words_and_colours_of_the_plots():
    uses = re.search(r"const USES = \[(.*?)\];", SCRIPT, re.DOTALL)[1]
    rows = re.findall(r'"(.*?)", "(.*?)", "(.*?)"', uses)
    light = PAGE[: PAGE.index("prefers-color-scheme")]
    shown = {
        name: (text, re.search(re.escape(var[4:-1]) + ": (#[0-9A-F]{6})", light)[1])
        for name, text, var in rows
    }
    assert shown == KV_USES and list(shown) == list(KV_USES)


def test_colours_of_classes_and_uses_mean_nothing_else():
    others = re.search(r"const OTHERS = \[(.*?)\];", SCRIPT)[1]
    uses = re.search(r"const USES = \[(.*?)\];", SCRIPT, re.DOTALL)[1]
    assert not set(re.findall(r"var\(.*?\)", others)) & set(re.findall(r"var\(.*?\)", uses))


# As much of a browser as the script needs.
BROWSER = """
const made = {};
class Node {
  constructor(name) {
    Object.assign(this, { name, children: [], style: {}, dataset: {}, own: "" });
  }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map((c) => c.textContent ?? c).join("|"); }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {}
  querySelectorAll() { return []; }
}
globalThis.document = {
  hidden: false, activeElement: null,
  getElementById: (id) => made[id] ||= new Node(id), createElement: (name) => new Node(name),
  createElementNS: (_, name) => new Node(name),
};
globalThis.location = { host: "localhost:30000" };
globalThis.sessionStorage = { getItem: () => "secret", setItem() {} };
const later = [];
globalThis.setTimeout = (act) => { later.push(act); };
const asked = [];
globalThis.fetch = async (path, options) => {
  asked.push([path, options.headers.authorization]);
  const answer = answers[path], ok = answer !== undefined;
  return { ok, status: ok ? 200 : 404, json: async () => answer };
};
"""


def numbers_of(struct, **more):
    """A value for each field, so that what is not there is undefined in the script."""
    return dict.fromkeys(struct.__struct_fields__, 1) | more


def state(at_s=0, tiers=()):
    """Of a replica after some time."""
    pool = {"num_requests": 7, "num_tokens": 700, "oldest_age_s": 61.0, "sharing_ratio": 0.5}
    assert pool.keys() <= PoolStats.__dataclass_fields__.keys()
    return numbers_of(
        ReplicaState,
        planning_us={"mean": 321.0, "p50": 1, "p99": 1},
        attainment={"ttft": [9, 1], "tpot": [9, 1], "all": [9, 1], "deadline": [3, 1]},
        times_s={
            "online_ttft": [1.0, 4],
            "online_missed_ttft": [36.0, 3],
            "online_tpot": [0.1, 4],
            "offline_ttft": [1.0, 4],
            "offline_tpot": [0.1, 4],
        },
        histograms={"ttft": {bucket_of(0.8): at_s}, "tpot": {bucket_of(0.06): at_s}},
        num_aborted_online=4,
        num_aborted_offline=5,
        num_cancelled_online=1,
        num_cancelled_offline=5,
        num_waiting_online=0,
        num_waiting_offline=20,
        online_output_tokens=at_s * 50,
        device_s={"online": {"team": at_s / 2}, "offline": {"team": at_s / 4, "": at_s / 8}},
        alone={
            "ttft": {"num": at_s, "total_s": 0.6 * at_s, "total_alone_s": 0.2 * at_s},
            "tpot": {"num": at_s, "total_s": 0.03 * at_s, "total_alone_s": 0.0087 * at_s},
        },
        tiers={
            name: {
                "times_s": {"ttft": [at_s * place, at_s], "tpot": [at_s / 100, at_s]},
                "attainment": {"all": [at_s, 0]},
                "histograms": {"ttft": {bucket_of(3 * place): at_s}, "tpot": {}},
            }
            for place, name in enumerate(tiers, start=1)
        },
        skipped={"latency_budget": 12},
        offline_limits={"paused": True, "max_running": 8, "stop_running": False},
        pool=pool,
        kv=numbers_of(KvOccupancy, running_online=94),
    )


def run(answers, then=None):
    """The texts of the page after it has asked once, or with `then` a second time and got that, and
    what it asked."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node")
    end = """
    const settled = (act) => setImmediate(() => setImmediate(() => setImmediate(act)));
    const again = (act) => {
      if (!THEN) return act();
      answers = THEN;
      later.shift()();
      settled(act);
    };
    settled(() => again(() => {
      const texts = Object.fromEntries(Object.entries(made).map(([id, n]) => [id, n.textContent]));
      const hidden = Object.fromEntries(Object.entries(made).map(([id, n]) => [id, n.hidden]));
      console.log(JSON.stringify({ texts, hidden, asked }));
    }));
    """
    given = f"let answers = {json.dumps(answers)};\nconst THEN = {json.dumps(then)};"
    code = f"{given}\n{BROWSER}\n{SCRIPT}\n{end}"
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BATCH = {
    "id": "batch_0123456789abcdef",
    "endpoint": "/v1/completions",
    "status": "in_progress",
    "request_counts": {"total": 10, "completed": 4, "failed": 1},
    "created_at": 1e9,
    "expires_at": 4e9,
    "errors": None,
    "output_file_id": None,
    "error_file_id": None,
    "cosched": {
        "state": "measured",
        "running": 2,
        "finish_s": 90.0,
        "slack_s": 1,
        "is_late": True,
        "miss_chance": 0.25,
    },
}


def test_it_shows_both_classes_memory_and_batches():
    server = {"policy": "hygen", "slo": {"ttft_ms": 1000, "tpot_ms": 50}, "shutting_down": False}
    server["model"] = "demo"
    ended = BATCH | {"status": "completed", "output_file_id": "file-1"}
    ended["cosched"] = {"device_seconds": 1.5}
    seen = run(
        {
            "cosched": server | {"replicas": [state(), state()]},
            "v1/batches?limit=50": {"data": [BATCH, ended], "cosched": {"servers": 3}},
        }
    )
    texts = seen["texts"]
    assert texts["what"] == "demo on localhost:30000, policy hygen" and texts["fault"] == ""
    assert "within targets, since the start|90.0 %" in texts["online"]
    for row in ("mean TTFT, target|\N{EN DASH}, 1.00 s", "mean TPOT, target|\N{EN DASH}, 50 ms"):
        assert row in texts["online"]
    assert "deadlines met, since the start|75.0 %" in texts["offline"]
    assert "tokens in the pool|1,400" in texts["offline"]
    assert "work per second|" in texts["offline"]
    assert "cancelled, since the start|2|aborted, since the start|6" in texts["online"]
    assert "cancelled, since the start|10|aborted, since the start|0" in texts["offline"]
    assert "online 94.9 %" in texts["kv-legend"]
    assert "time budget of the iteration used up|24" in texts["waits"]
    assert "not reached: lower in queue|16" in texts["waits"]
    assert "offline work is paused|yes" in texts["waits"]
    first, second = texts["batch-rows"].split("batch_01234567")[1:]
    assert "4 of 10|2 at the engine|1 failed" in first and "90 s" in first and "25.0 %" in first
    assert "Cancel" in first and "Results" not in first and " d old" in first
    assert "Results" in second and "Cancel" not in second and " old" not in second
    assert texts["servers"] == "answered by 3 servers" and not seen["hidden"]["servers"]
    assert "undefined" not in json.dumps(texts) and "NaN" not in json.dumps(texts)
    assert {key for _, key in seen["asked"]} == {"Bearer secret"}


@pytest.mark.parametrize("told", ["paused", "estimating"])
def test_a_batch_without_a_forecast_says_why(told):
    outlook = {"state": told, "running": 0, "finish_s": None, "slack_s": None, "miss_chance": None}
    batch = BATCH | {"cosched": outlook | {"is_late": False}}
    page = {"data": [batch], "cosched": {"servers": 1}}
    texts = run({"v1/batches?limit=50": page})["texts"]
    assert told in texts["batch-rows"] and "%" not in texts["batch-rows"]
    assert "NaN" not in texts["batch-rows"] and "null" not in texts["batch-rows"]


def test_lines_in_the_store_are_among_what_waits():
    """Although no request waits at the scheduler."""
    idle = numbers_of_idle()
    server = {"policy": "hygen", "slo": {"ttft_ms": 1000, "tpot_ms": 50}, "shutting_down": False}
    counts = {"total": 3000, "completed": 200, "failed": 50}
    seen = run(
        {
            "cosched": server | {"replicas": [idle]},
            "v1/batches?limit=50": {
                "data": [BATCH | {"request_counts": counts}, BATCH | {"status": "completed"}],
                "cosched": {"servers": 1},
            },
        }
    )
    assert "batch lines in the store|2,748" in seen["texts"]["waits"]
    assert seen["hidden"]["no-waits"]


def hour(num=20, tiers=()):
    """What a server with two replicas has to show of its last minutes."""
    history = History()
    for at_s in range(0, 10 * num, 10):
        history.add(at_s, [state(at_s, tiers), state(at_s, tiers)])
    return history.to_dict()


def test_the_last_hour_is_drawn():
    server = {"policy": "hygen", "slo": {"ttft_ms": 1000, "tpot_ms": 50}, "shutting_down": False}
    seen = run({"cosched": server | {"replicas": [state()]}, "cosched/history": hour()})
    charts = seen["texts"]["charts"]
    assert not seen["hidden"]["hour"]
    assert "Mean TTFT" in charts and "target 1.00 s" in charts and "target 50.0 ms" in charts
    assert re.search(r"Mean TTFT.*?\|alone 200 ms\|Mean TPOT.*?\|alone 8\.7 ms\|Within", charts)
    assert "p99 TTFT, five minutes" in charts and re.search("online (79|8[01])\\d ms", charts)
    assert re.search(r"p99 TPOT.*?online (59|60|61)\.\d ms, target 50\.0 ms", charts)
    assert "Output tokens per second" in charts and "online 100" in charts
    assert "team 150.0 %" in charts and "no key 25.0 %" in charts, "of two devices"
    assert "NaN" not in charts and "undefined" not in charts


def test_latencies_without_the_batch_stand_beside_those_with_it():
    slo = {"ttft_ms": 1000, "tpot_ms": 50}
    server = {"policy": "cosched", "slo": slo, "shutting_down": False}
    now = {"cosched": server | {"replicas": [state(60), state(60)]}}
    online = run({"cosched": server | {"replicas": [state(30), state(0)]}}, now)["texts"]["online"]
    assert "TTFT alone, now|200 ms, 600 ms" in online
    assert "TPOT alone, now|8.7 ms, 30.0 ms" in online
    unknown = run({"cosched": server | {"replicas": [state() | {"alone": None}]}})
    assert "alone" not in unknown["texts"]["online"]


def test_tiers_are_drawn_against_their_own_targets():
    tiers = {"gold": {"ttft_ms": 1000, "tpot_ms": 50}, "free": {"ttft_ms": 4000, "tpot_ms": 50}}
    server = {"policy": "cosched", "slo": {"ttft_ms": 1, "tpot_ms": 1}, "shutting_down": False}
    server |= {"replicas": [state(tiers=tiers)], "tiers": tiers}
    seen = run({"cosched": server, "cosched/history": hour(tiers=tiers)})
    ttft, tpot, met, ttft_p99, tpot_p99, *_ = re.split(
        "Mean TTFT|Mean TPOT|Within|p99 TTFT|p99 TPOT", seen["texts"]["charts"]
    )[1:]
    assert "gold 1.00 s, target 1.00 s" in ttft and "free 2.00 s, target 4.00 s" in ttft
    assert "0 to 110 % of target" in ttft and "of target" not in tpot
    assert "gold 100.0 %" in met and "free 100.0 %" in met
    assert re.search(r"gold (2\.9|3\.0).*free (5\.9|6\.0).*", ttft_p99)
    assert "gold \N{EN DASH}, target 50.0 ms" in tpot_p99, "no request"
    assert "mean TTFT|" in seen["texts"]["online"], "all have no common target"
    assert "NaN" not in seen["texts"]["charts"] and "undefined" not in seen["texts"]["charts"]


def test_a_p99_is_of_the_requests_of_five_minutes():
    history = History()
    for minute in range(12):
        one = state() | {
            "histograms": {"ttft": {bucket_of(10): 1, bucket_of(1): minute}, "tpot": {}}
        }
        for tenth in range(6):
            history.add(60 * minute + 10 * tenth, [one, one])
    p99s = [sample["ttft_p99_s"] for sample in history.to_dict()["samples"]]
    assert p99s[0] is None and p99s[-1] == pytest.approx(1, rel=0.015)
    assert p99_s(Counter({bucket_of(1): 99, bucket_of(5): 1})) == pytest.approx(1, rel=0.015)
    assert p99_s(Counter({bucket_of(1): 98, bucket_of(5): 2})) == pytest.approx(5, rel=0.015)


def numbers_of_idle():
    """The state of a replica at which nothing waits."""
    limits = {"paused": False, "max_running": None, "stop_running": False}
    return state() | {
        "num_waiting_online": 0,
        "num_waiting_offline": 0,
        "skipped": {},
        "offline_limits": limits,
    }


def test_it_shows_what_was_done_since_it_looked_first():
    server = {"policy": "hygen", "slo": {"ttft_ms": 1000, "tpot_ms": 50}, "shutting_down": False}
    before = state()
    times = before["times_s"] | {"online_tpot": [0.7, 6], "offline_ttft": [22.0, 7]}
    times["online_missed_ttft"] = [60.0, 5]
    after = before | {"times_s": times, "budget_s": 5, "budget_used_s": 4}
    first, second = ({"cosched": server | {"replicas": [one, one]}} for one in (before, after))
    texts = run(first, second)["texts"]
    assert "mean TTFT of the late|12 s|" in texts["online"]
    assert "mean TPOT, target|300 ms, 50 ms" in texts["online"]
    assert "mean TTFT|7.00 s|mean TPOT|\N{EN DASH}" in texts["offline"]
    assert "budget used, last minute|75.0 %" in texts["engine"]


def test_a_server_without_batches_or_a_policy_of_ours():
    server = {"policy": "sglang", "slo": {"ttft_ms": 1000, "tpot_ms": 50}, "shutting_down": False}
    seen = run({"cosched": server | {"replicas": [None]}})
    assert seen["hidden"]["live"] and seen["hidden"]["batches"]
    assert seen["texts"]["fault"] == ""


def test_it_needs_no_other_host_and_names_what_there_is():
    assert not re.search(r"https?:|//[a-z]|src=|@import|url\(", PAGE)
    ids = set(re.findall(r'id="([^"]+)"', PAGE))
    assert set(re.findall(r'\$\("([^"]+)"\)', SCRIPT)) <= ids
    assert set(re.findall(r"<option>([^<]+)</option>", PAGE)) == set(URLS)
    reasons = re.search(r"const REASONS = \{(.*?)\};", SCRIPT, re.DOTALL)[1]
    assert set(re.findall(r"(\w+): \"", reasons)) == {reason.value for reason in SkipReason}
    for name in re.findall(r"\br\.(\w+)", SCRIPT):
        assert name in ReplicaState.__struct_fields__, name
    assert "innerHTML" not in SCRIPT
