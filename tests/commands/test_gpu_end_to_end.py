"""The end-to-end measurement: what it asks, compares and writes, with servers that are none."""

import contextlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cosched.lab.cost_models.specs import MODELS
from tests.scripts import script

OURS = "cosched_shared_prefix"


def test_the_prompts_share_documents_and_more(tmp_path):
    asked = script("gpu_end_to_end").prompts(0, length=40, documents=2, questions=6)
    assert {rid[0] for rid in asked} == {"d", "q", "c"} and len(asked) == 2 + 12 + 6
    for index in range(12):
        document = asked[f"d{index % 2}"]
        assert asked[f"q{index}"][: len(document)] == document
    heads = [tuple(asked[f"q{i}"][:50]) for i in range(12)]
    assert len(set(heads)) < 12, "some go on alike"
    assert asked == script("gpu_end_to_end").prompts(0, length=40, documents=2, questions=6)


def test_a_shape_is_a_model_without_weights(tmp_path):
    folder = script("gpu_end_to_end").write_model(tmp_path, "Llama-3.1-8B")
    config, spec = json.loads((folder / "config.json").read_text()), MODELS["Llama-3.1-8B"]
    shape = [config[f"num_{name}"] for name in ("hidden_layers", "key_value_heads")]
    assert shape == [spec.num_layers, spec.num_kv_heads] and config["head_dim"] == 128
    assert (folder / "tokenizer.json").exists() and not list(folder.glob("*.safetensors"))


def test_the_table_has_a_row_for_each_server():
    load = {
        "step": "load",
        "backend": "triton",
        "offline_tokens_per_s": 1234.56,
        "attainment": 0.5,
        "ttft_ms": {"p50": 1.0, "p99": None},
        "tpot_ms": {"p50": 2.0, "p99": 3.0},
        "is_client_late": True,
    }
    tokens = {"step": "tokens", "model": "tiny, float32", "replies": 20, "same": 20}
    table = script("gpu_end_to_end").markdown([tokens, load])
    assert "| tiny, float32 | 20 | 20 |" in table
    assert "| triton (the client was late) | 1,234.6 | 50.0% | 1.0,  | 2.0, 3.0 |" in table


class FakeServer(BaseHTTPRequestHandler):
    """Replies with tokens that follow from the prompt; of some it gets one wrong if told to."""

    wrong = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked, params = body["input_ids"], body["sampling_params"]
        assert params["temperature"] == 0 and params["ignore_eos"]
        tokens = [(sum(asked) + i) % 2000 for i in range(params["max_new_tokens"])]
        if len(asked) % 100 in range(20, 20 + self.wrong):
            tokens[3] = -1
        reply = json.dumps({"output_ids": tokens}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_servers(monkeypatch):
    """`serving` starts a fake server; those of our backend get `wrong` replies wrong."""
    started = []

    @contextlib.asynccontextmanager
    async def serving(*, model_path, flags, log_path):
        backend = flags[flags.index("--attention-backend") + 1]
        config = json.loads(os.environ["COSCHED_CONFIG"])["shared_prefix"]
        started.append((backend, model_path, config))
        handler = type("Handler", (FakeServer,), {"wrong": FakeServer.wrong * (backend == OURS)})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()

    monkeypatch.setattr(script("gpu_end_to_end"), "serving", serving)
    return started


def run(monkeypatch, capsys, folder, *options):
    command = ["gpu_end_to_end", "--device", "cpu", "--only", "tokens", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, "--questions", "3", *options])
    script("gpu_end_to_end").main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_both_backends_are_asked_the_same(tmp_path, monkeypatch, capsys, fake_servers):
    result = run(monkeypatch, capsys, tmp_path, "--new-tokens", "8")
    (row,) = result["rows"]
    assert row["same"] == row["replies"] == 2 + 6 + 3 and not row["parted_at"]
    assert json.loads((tmp_path / "end_to_end.json").read_text()) == result
    assert "| tiny, float32 | 11 | 11 |" in (tmp_path / "end_to_end.md").read_text()
    (stock, model, config), (ours, other_model, _) = fake_servers
    assert (stock, ours, model) == ("torch_native", OURS, other_model)
    assert config["inner"] == "torch_native" and config["min_saved_tokens"] == 1


def test_replies_that_differ_fail_the_run(tmp_path, monkeypatch, capsys, fake_servers):
    monkeypatch.setattr(FakeServer, "wrong", 1)
    with pytest.raises(SystemExit, match=r"replies differ: \{'c0': 3\}"):
        run(monkeypatch, capsys, tmp_path)
    assert (tmp_path / "end_to_end.json").exists()
