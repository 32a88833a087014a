"""The command line of the server, without starting one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from cosched import bootstrap, launch_server
from cosched.config import ENV_VAR, Config
from cosched.engine import arguments as engine_side
from cosched.errors import ConfigError


def flags_of(*argv):
    return launch_server.build_parser().parse_known_args(argv)


def test_flags_win_over_the_environment_and_that_over_defaults(monkeypatch):
    monkeypatch.setenv(ENV_VAR, '{"policy": "priority", "slo": {"ttft_ms": 300, "tpot_ms": 30}}')
    flags, rest = flags_of("--cosched-slo-ttft-ms", "700", "--port", "1", "--model-path", "x")
    config = launch_server.config_from(flags)
    assert (config.policy, config.slo.ttft_ms, config.slo.tpot_ms) == ("priority", 700, 30)
    assert rest == ["--port", "1", "--model-path", "x"]


def test_the_decision_log_is_a_flag_that_needs_a_policy_that_decides(monkeypatch):
    monkeypatch.setenv(ENV_VAR, '{"policy": "hygen", "decision_log": "old", "decision_log_mb": 8}')
    config = launch_server.config_from(flags_of("--decision-log", "new")[0])
    assert (config.decision_log, config.decision_log_mb) == ("new", 8)
    assert launch_server.config_from(flags_of()[0]).decision_log == "old"
    with pytest.raises(ConfigError, match="decision_log: policy 'sglang' leaves all decisions"):
        launch_server.config_from(flags_of("--cosched-policy", "sglang")[0])


def test_a_bad_target_is_named():
    flags, _ = flags_of("--cosched-slo-tpot-ms", "-5")
    with pytest.raises(ConfigError, match=r"tpot_ms must be a positive.*-5"):
        launch_server.config_from(flags)


def test_policy_flags_and_cpu_flags_are_added_unless_given(monkeypatch):
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: False)
    added = launch_server.engine_arguments(
        ["--model-path", "x"], Config(policy="sarathi"), mixed_chunk=True
    )
    assert "--enable-mixed-chunk" in added
    assert added[added.index("--device") + 1] == "cpu"
    assert added[added.index("--attention-backend") + 1] == "torch_native"
    added = launch_server.engine_arguments(
        ["--model-path", "x", "--attention-backend=intel_amx", "--max-total-tokens", "9"],
        Config(policy="priority"),
        mixed_chunk=True,
    )
    assert "--enable-priority-scheduling" in added and "--enable-mixed-chunk" not in added
    assert added.count("--max-total-tokens") == 1 and "--attention-backend" not in added


def test_nothing_is_added_on_a_gpu_but_what_the_policy_needs(monkeypatch):
    monkeypatch.setattr(bootstrap, "has_cuda", lambda: True)
    given = ["--model-path", "x"]
    assert launch_server.engine_arguments(given, Config(policy="sglang"), mixed_chunk=True) == given
    sarathi = Config(policy="sarathi")
    assert launch_server.engine_arguments(given, sarathi, mixed_chunk=False) == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disaggregation_mode", "prefill"),
        ("pp_size", 2),
        ("speculative_algorithm", "EAGLE"),
        ("dllm_algorithm", "LLaDA"),
        ("enable_dp_attention", True),
        ("enable_priority_scheduling", True),
        ("disable_radix_cache", True),
    ],
)
def test_flags_that_cannot_go_together_are_refused_in_one_sentence(name, value):
    arguments = SimpleNamespace(disaggregation_mode="null", pp_size=1)
    setattr(arguments, name, value)
    with pytest.raises(ConfigError) as error:
        launch_server.check_arguments(arguments, Config(policy="sarathi"))
    message = str(error.value)
    assert "--" + name.replace("_", "-") in message and "sarathi" in message
    assert "\n" not in message
    launch_server.check_arguments(arguments, Config(policy="sglang"))


def test_every_refused_flag_is_a_server_argument_of_sglang():
    from sglang.srt.server_args import ServerArgs

    fields = {field for cls in ServerArgs.__mro__ for field in getattr(cls, "__annotations__", {})}
    for name, *_ in engine_side._REFUSED:
        assert name in fields or hasattr(ServerArgs, name), name


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
    launch_server.bind_cpu_threads(argv, environ)
    assert environ.get("SGLANG_CPU_OMP_THREADS_BIND") == expected


def test_help_shows_our_flags_with_units_and_sglangs_too():
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cosched.launch_server", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for text in ("--cosched-policy", "sarathi", "--cosched-slo-ttft-ms MS", "[ms]", "--model-path"):
        assert text in shown


def test_a_wrong_flag_ends_with_one_sentence_and_status_2():
    ended = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "cosched.launch_server"),
            *("--cosched-slo-ttft-ms", "0", "--model-path", "x"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("cosched: --cosched-slo: ttft_ms must")
