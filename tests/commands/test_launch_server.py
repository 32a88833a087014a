"""The command line of the server, without starting one."""

import contextlib
import os
import re
import socket
from types import SimpleNamespace

import httpx
import pytest

from cosched import bootstrap, serve
from cosched.batch.open_store import lock_file
from cosched.cli import parse
from cosched.config import ENV_VAR, Config, parse_config
from cosched.engine import arguments as engine_side
from cosched.engine import options
from cosched.engine.options import ServeOptions
from cosched.errors import ConfigError
from cosched.memory.config import ENGINE_ORDERS, KvConfig
from cosched.policies import POLICIES
from cosched.predict.tolerance import ToleranceConfig
from cosched.serve import Serve
from tests.serving import TEST_FLAGS


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """A simulation in this process before leaves its configuration behind."""
    monkeypatch.delenv(ENV_VAR, raising=False)


def config_from(*words):
    return options.config_from(parse(ServeOptions, words))


def test_keys_may_come_from_files_and_the_environment(tmp_path):
    """`ps` shows flags to each user of the machine."""
    key = tmp_path / "key"
    key.write_text("--from-file\n")
    environ = {"COSCHED_ADMIN_API_KEY_FILE": str(key), "COSCHED_API_KEY": "k", "HOME": "/"}
    found = engine_side.key_arguments([], environ)
    assert found == ["--admin-api-key=--from-file", "--api-key=k"]
    assert environ == {"HOME": "/"}  # other processes inherit none
    (tmp_path / "empty").write_text("\n")
    for environ, argv, reason in (
        ({"COSCHED_API_KEY": ""}, [], "COSCHED_API_KEY has no key"),
        ({"COSCHED_API_KEY_FILE": str(tmp_path / "empty")}, [], "COSCHED_API_KEY_FILE has no key"),
        ({"COSCHED_API_KEY_FILE": "/no/file"}, [], "cannot read COSCHED_API_KEY_FILE '/no/file'"),
        ({"COSCHED_API_KEY": "k"}, ["--api-key", "x"], "COSCHED_API_KEY and --api-key; keep one"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine_side.key_arguments(argv, environ)


def test_shared_prefixes_are_off_on_or_left_to_the_server():
    assert config_from().shared_prefix.mode == "auto"
    assert config_from("--cosched-shared-prefix", "on").shared_prefix.mode == "on"
    with pytest.raises(ConfigError, match=r"for --cosched-shared-prefix. Choose from"):
        config_from("--cosched-shared-prefix", "always")
    with pytest.raises(ConfigError, match="Invalid enum value 'always'"):
        parse_config('{"shared_prefix": {"mode": "always"}}', source="a test")


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch):
    monkeypatch.setenv(ENV_VAR, '{"policy": "priority", "slo": {"ttft_ms": 300, "tpot_ms": 30}}')
    command = parse(Serve, ["--cosched-slo-ttft-ms", "700", "--port", "1", "--model-path", "x"])
    config = options.config_from(command.options)
    assert (config.policy, config.slo.ttft_ms, config.slo.tpot_ms) == ("priority", 700, 30)
    assert command.flags == ("--port", "1", "--model-path", "x")


def test_batches_have_a_folder_and_perhaps_a_database():
    url = "postgresql://me@host/batches"
    config = config_from("--cosched-batches", "/f", "--cosched-batches-url", url).batches
    assert (config.folder, config.url, config.is_shared) == ("/f", url, True)
    assert not config_from("--cosched-batches", "/f").batches.is_shared
    with pytest.raises(ConfigError, match="url without folder"):
        config_from("--cosched-batches-url", url)


def served(name, port=30000):
    other = dict.fromkeys(("smg_grpc_mode", "grpc_mode", "use_ray"), False)
    return SimpleNamespace(served_model_name=name, port=port, tokenizer_worker_num=1, **other)


@pytest.fixture
def data_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("sglang.srt.arg_groups.overrides.resolving_view", lambda it: it)
    return tmp_path / "data"


def test_batches_are_in_the_users_data_directory_by_model_and_port(data_home):
    folders = [
        serve.with_batches(Config(), served(name, port)).batches.folder
        for name, port in (("demo", 1), ("demo", 2), ("meta-llama/Llama-3.1-8B", 1), ("/", 1))
    ]
    names = ["demo-1", "demo-2", "meta-llama_Llama-3.1-8B-1", "-1"]
    assert folders == [str(data_home / "cosched" / "batches" / name) for name in names]
    assert (data_home / "cosched/batches/demo-1/batches.sqlite").exists()


def test_batches_are_elsewhere_or_off_where_a_flag_or_the_environment_says_so(
    data_home, monkeypatch
):
    for place, is_on in (("/f", True), ("off", False)):
        config = config_from("--cosched-batches", place)
        assert serve.with_batches(config, served("demo")) is config
        assert config.batches.is_on is is_on
    monkeypatch.setenv(ENV_VAR, '{"batches": {"folder": "off"}}')
    assert not config_from().batches.is_on
    assert not Config().batches.is_on  # of other programs than `cosched serve`
    assert not data_home.exists()


@pytest.mark.parametrize("fault", ["in use", "not writable"])
def test_a_server_whose_default_folder_cannot_be_used_has_no_batches_and_says_why(
    data_home, capsys, fault
):
    folder = data_home / "cosched" / "batches" / "demo-30000"
    if fault == "in use":
        reason = "another server uses it"
        lock = lock_file(folder / "lock", what="test")
    else:
        reason = "Not a directory"
        data_home.write_text("")
        lock = contextlib.nullcontext()
    with lock:
        config = serve.with_batches(Config(), served("demo"))
    assert not config.batches.is_on
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(folder) in told and reason in told
    assert "--cosched-batches FOLDER" in told


def test_a_folder_that_was_named_and_cannot_be_used_is_refused(data_home):
    data_home.write_text("")
    with pytest.raises(ConfigError, match=r"batches\.folder .*data/f"):
        engine_side.check_files(config_from("--cosched-batches", str(data_home / "f")))


def test_the_decision_log_is_a_flag_that_needs_a_policy_that_decides(monkeypatch):
    monkeypatch.setenv(ENV_VAR, '{"policy": "hygen", "decision_log": "old", "decision_log_mb": 8}')
    config = config_from("--decision-log", "new")
    assert (config.decision_log, config.decision_log_mb) == ("new", 8)
    assert config_from().decision_log == "old"
    with pytest.raises(ConfigError, match="decision_log: policy 'sglang' leaves all decisions"):
        config_from("--cosched-policy", "sglang")


def test_a_tolerance_is_a_flag_of_policies_that_keep_one(monkeypatch):
    config = config_from("--cosched-tolerance", "ttft=5%,tpot=2%")
    assert config.tolerance == ToleranceConfig(ttft=0.05, tpot=0.02)
    with pytest.raises(ConfigError, match="ttft '5' is not a percentage"):
        config_from("--cosched-tolerance", "ttft=5")
    hygen = ("--cosched-policy", "hygen", "--cosched-tolerance", "tpot=5%")
    with pytest.raises(ConfigError, match="policy 'hygen' keeps none; choose from cosched"):
        config_from(*hygen)
    monkeypatch.setenv(ENV_VAR, '{"tolerance": {"ttft": 0.5}}')
    assert config_from().tolerance == ToleranceConfig(ttft=0.5)
    monkeypatch.setenv(ENV_VAR, '{"tolerance": {"tpot": 11}}')
    with pytest.raises(ConfigError, match=r"tolerance\.tpot 11.* up to 10"):
        config_from()


def test_policy_flags_and_cpu_flags_are_added_unless_given(monkeypatch):
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: False)
    added = engine_side.engine_arguments(
        ["--model-path", "x"], Config(policy="sarathi"), mixed_chunk=True
    )
    assert "--enable-mixed-chunk" in added
    assert added[added.index("--device") + 1] == "cpu"
    assert added[added.index("--attention-backend") + 1] == "torch_native"
    added = engine_side.engine_arguments(
        ["--model-path", "x", "--attention-backend=intel_amx", "--max-total-tokens", "9"],
        Config(policy="priority"),
        mixed_chunk=True,
    )
    assert "--enable-priority-scheduling" in added and "--enable-mixed-chunk" not in added
    assert added.count("--max-total-tokens") == 1 and "--attention-backend" not in added


def test_nothing_is_added_on_a_gpu_but_what_the_policy_needs(monkeypatch):
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: True)
    given = ["--model-path", "x"]
    assert engine_side.engine_arguments(given, Config(policy="sglang"), mixed_chunk=True) == given
    sarathi = Config(policy="sarathi")
    # Whatever SGLang makes of the model: a planned iteration follows each, and the order is ours.
    needed = ["--radix-eviction-policy", "lru", "--prefill-decode-interval", "0"]
    added = engine_side.engine_arguments(given, sarathi, mixed_chunk=False)
    assert added == [*given, *needed]
    given += ["--prefill-decode-interval=3", "--radix-eviction-policy", "slru"]
    assert engine_side.engine_arguments(given, sarathi, mixed_chunk=False) == given


@pytest.mark.parametrize("theirs", ENGINE_ORDERS)
def test_an_order_of_sglang_is_told_to_it(theirs):
    config = Config(kv=KvConfig(eviction=theirs))
    added = engine_side.engine_arguments(["--model-path", "x"], config, mixed_chunk=True)
    assert added[added.index("--radix-eviction-policy") + 1] == theirs
    given = ["--radix-eviction-policy", "slru"]
    added = engine_side.engine_arguments(given, config, mixed_chunk=True)
    assert added.count("--radix-eviction-policy") == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tp", "2"], "0|1"),
        (["--dp-size=2"], "0|1"),
        ([], None),
        (["--tp", "4"], None),
    ],
)
def test_cpu_ranks_share_the_cores(monkeypatch, argv, expected):
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    environ = {}
    engine_side.bind_cpu_threads(argv, environ)
    assert environ.get("SGLANG_CPU_OMP_THREADS_BIND") == expected


def test_help_shows_our_flags_and_help_all_sglangs_and_every_policy_too(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    serve.main(["--help"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 80
    for text in ("--cosched-policy NAME", "--cosched-slo-ttft-ms", "[ms]", "--help-all shows them"):
        assert text in shown
    assert "--model-path MODEL" in lines[0]
    told = re.sub(r"[\s│]+", " ", shown)
    for target, default in (("ttft", "1000"), ("tpot", "50")):
        assert re.search(rf"--cosched-slo-{target}-ms FLOAT [^;]*; default: {default} ", told)
    for name in ("cosched", "hygen", "sarathi", "priority", "sglang"):
        assert any(line.startswith(f" • {name}: ") for line in lines)
    assert "echo-bs" not in shown
    serve.main(["--help-all"])
    ours, engines = capsys.readouterr().out.split("\nSGLang:\n")
    assert "--model-path" in engines and "--cosched" not in engines
    assert all(f" • {entry.name}: " in ours for entry in POLICIES.values())
    # Choices are not one long line; only flags whose own names are long are wider than a terminal.
    wide = [line for line in engines.splitlines() if len(line) > 80]
    assert all(line.lstrip().startswith("--") and len(line) < 150 for line in wide)


class TestEarlyChecks:
    """What is wrong is said in one sentence before a model is loaded."""

    def test_files_are_checked_and_left_as_they_are(self, tmp_path):
        (tmp_path / "old").write_text("kept")
        for name in ("new", "old"):
            engine_side.check_files(Config(decision_log=str(tmp_path / name)))
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old").read_text() == "kept"
        absent = str(tmp_path / "absent" / "log")
        for config, message in (
            (Config(decision_log=absent), "cannot write --decision-log '.*': No such file or"),
            (Config(decision_log=str(tmp_path)), "cannot write --decision-log .*: Is a directory"),
            (Config(latency_model="absent"), "cannot read --latency-model 'absent': No such file"),
        ):
            with pytest.raises(ConfigError, match=message):
                engine_side.check_files(config)

    def test_ports(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--nccl-port {port} of 127.0.0.1: Address"):
                engine_side._check_port("--nccl-port", "127.0.0.1", port)
        engine_side._check_port("--port", "127.0.0.1", port)
        engine_side._check_port("--port", "0.0.0.0", port)
        with pytest.raises(ConfigError, match="--port must be from 1 to 65535, not 70000"):
            engine_side._check_port("--port", "127.0.0.1", 70000)
        with pytest.raises(ConfigError, match=r"--host 'no\.such\.host\.invalid' is no address"):
            engine_side._check_port("--port", "no.such.host.invalid", port)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--cosched-slo-tpot-ms", "-5"], r"--cosched-slo: tpot_ms must be a positive.*-5"),
            (["--cosched-drain-s", "-1"], "drain_s must be 0 or more"),
            (["--cosched-drain-s", "nan"], "drain_s must be 0 or more"),
            (["--cosched-kv-eviction", "fifo"], "kv.eviction 'fifo' is unknown.*slru"),
            (["--cosched-max-offline-waiting", "0"], "max_offline_waiting must be at least 1"),
            (
                ["--cosched-max-offline-waiting", "5", "--cosched-policy", "priority"],
                "policy 'priority' keeps no pool",
            ),
        ],
    )
    def test_nonsense(self, flags, message):
        with pytest.raises(ConfigError, match=message):
            config_from(*flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "31000"], "no model: --model-path takes a folder"),
        (["--model-path", "{}/absent"], "--model-path '{}/absent' does not exist"),
        (["--model={}/absent"], "--model-path '{}/absent' does not exist"),
        (["{}/absent"], "--model-path '{}/absent' does not exist"),
        (["--model-path", "{}"], "'{}' is no model: it has no config.json"),
    ],
)
def test_a_model_that_is_none_is_named_in_one_sentence(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        serve.main([word.format(tmp_path) for word in words])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("cosched: ") and shown.count("\n") == 1
    assert message.format(tmp_path) in shown


def unreachable(*_, **__):
    raise httpx.ConnectError("no route to host")


def test_a_name_is_looked_for_here_first_and_then_on_the_hub(monkeypatch, tmp_path):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(httpx, "head", unreachable)
    engine_side.check_model(["--model-path", "org/model"])
    for name in ("org/other", "gpt-none"):
        with pytest.raises(ConfigError, match=f"'{name}' is no folder.*reached: no route to host"):
            engine_side.check_model(["--model-path", name])
    cached = str(tmp_path / "org" / "model" / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached)
    engine_side.check_model(["--model-path", "org/other"])


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "s3://bucket/a/model"])
def test_a_model_that_is_elsewhere_is_left_to_sglang(name, monkeypatch):
    monkeypatch.setattr(httpx, "head", lambda *_, **__: None)
    engine_side.check_model(["--model-path", name])
    engine_side.check_model(["--config", "model.yaml"])


class TestBeforeTheModelIsLoaded:
    """In processes of their own: these get as far as SGLang's flags or plugins."""

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--prot", "31000"], "unknown flag --prot; did you mean --port? ("),
            (["--cosched-polcy=hygen"], "flag --cosched-polcy; did you mean --cosched-policy? ("),
            (["--cosched-slo-ttft-ms", "0"], "--cosched-slo: ttft_ms must"),
            (["--xyzzy"], "unknown flag --xyzzy (--help lists"),
            (["model"], "unexpected argument 'model' (a model is named with --model-path)"),
            (["--tp", "x"], "argument --tp-size/--tensor-parallel-size: invalid int value: 'x'"),
            (["--tp", "0"], "--tp-size must be at least 1, not 0"),
            (["--attention-backend", "foo"], "--attention-backend: invalid choice: 'foo' (choose"),
            (["--config", "/absent.yaml"], "--config: "),
            (["--context-length", "99999999"], "User-specified context_length (99999999) is"),
        ],
    )
    def test_a_wrong_flag_is_one_sentence(self, forks, tiny_model, flags, message):
        ended = forks.run_module("cosched.launch_server", "--model-path", str(tiny_model), *flags)
        assert ended.returncode == 2
        last = ended.stderr.strip().splitlines()[-1]
        assert last.startswith("cosched: ") and message in last
        shown = ended.stdout + ended.stderr
        assert "Traceback" not in shown and "usage:" not in shown
        self.check_not_loaded(ended)

    def test_a_port_in_use_is_said(self, forks, tiny_model):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            flags = ["--model-path", str(tiny_model), "--port", str(port), *TEST_FLAGS]
            ended = forks.run_module("cosched.launch_server", *flags)
        assert ended.returncode == 2
        last = ended.stderr.strip().splitlines()[-1]
        in_use = "Address already in use"
        assert last == f"cosched: cannot listen on --port {port} of 127.0.0.1: {in_use}"
        self.check_not_loaded(ended)

    def test_sglangs_own_entry_point_refuses_too(self, forks, tiny_model):
        flags = ["--model-path", str(tiny_model), *TEST_FLAGS, "--disable-radix-cache"]
        env = {ENV_VAR: '{"policy": "hygen"}'}
        ended = forks.run_module("tests.plain_sglang", *flags, env=env)
        assert ended.returncode != 0
        refusal = "--disable-radix-cache cannot go with --cosched-policy hygen: preempted"
        assert refusal in ended.stderr
        self.check_not_loaded(ended)

    def check_not_loaded(self, ended):
        text = ended.stdout + ended.stderr
        assert "ready to roll" not in text and "Load weight" not in text


class TestAGpuThatTorchCannotUse:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path, monkeypatch):
        """nvidia-smi lists a GPU, and torch is built without CUDA."""
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("cosched.bootstrap.has_cuda", lambda: False)

    def arguments(self, *argv):
        return engine_side.engine_arguments(argv, Config(), mixed_chunk=True)

    def test_a_server_does_not_fall_back_to_the_cpu_silently(self, monkeypatch):
        monkeypatch.setattr("torch.version.cuda", None)
        with pytest.raises(ConfigError, match=r"lists a GPU, but torch .* without CUDA.*--device"):
            self.arguments()
        monkeypatch.setattr("torch.version.cuda", "13.0")
        with pytest.raises(ConfigError, match=r"lists a GPU, but torch, built for CUDA 13.0, sees"):
            self.arguments()

    def test_the_cpu_can_be_asked_for(self, monkeypatch):
        assert "torch_native" in self.arguments("--device", "cpu")
        assert self.arguments("--device", "cpu").count("--device") == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert "cpu" in self.arguments()
