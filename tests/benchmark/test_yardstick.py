"""The yardstick's pairs of workloads, and what of them the command line changes."""

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.bench import build_parser
from cosched.benchmark.yardstick import WORKLOADS, run_yardstick, specs_of, yardstick_page
from cosched.errors import ConfigError
from cosched_traces.catalogue import WORKLOADS as CATALOGUE


def arguments_of(*given):
    return build_parser().parse_args(["yardstick", *given])


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("COSCHED_DATA", raising=False)


def test_every_pair_can_be_made_with_and_without_a_data_folder(tmp_path):
    without = specs_of(arguments_of())
    with_data = specs_of(arguments_of("--data-dir", str(tmp_path)))
    assert list(without) == list(with_data) == list(WORKLOADS)
    for key in WORKLOADS:
        for specs in (without, with_data):
            online = CATALOGUE[specs[key].online.name]
            assert online.in_sessions == (specs[key].online.num_sessions is not None)
        assert not CATALOGUE[without[key].online.name].needs_files


def test_sessions_have_targets_and_memory_of_their_own():
    specs = specs_of(arguments_of())
    ttft_s = {key: spec.slo.ttft_s for key, spec in specs.items()}
    assert ttft_s == {"i": 1.0, "ii": 1.0, "iii": 1.0, "iv": 3.0, "iv-b": 3.0, "v": 0.3, "vi": 1.0}
    assert specs["i"].machine.kv_tokens is None
    assert specs["iv"].machine.kv_tokens == 400_000 > specs["v"].machine.kv_tokens


def test_options_win():
    given = ("--slo-ttft", "2", "--kv-tokens", "5000", "--offline-requests", "7")
    specs = specs_of(arguments_of(*given, "--online", "sharegpt", "--online-rate", "1.5"))
    for spec in specs.values():
        assert (spec.slo.ttft_s, spec.slo.tpot_s) == (2.0, 0.05)
        assert spec.machine.kv_tokens == 5000
        assert spec.offline.num_requests == 7
        assert (spec.online.name, spec.online.rate) == ("sharegpt", 1.5)
        assert spec.online.num_sessions is None
    few = specs_of(arguments_of("--offline", "iv", "--online-sessions", "2"))
    assert few["iv"].online.num_sessions == 2


@pytest.mark.parametrize(
    ("offline", "keys"), [("iv", ["iv"]), ("arxiv", ["i", "iv"]), ("documents", ["iii", "iv-b"])]
)
def test_a_number_picks_one_pair_and_a_name_those_with_it(offline, keys):
    assert list(specs_of(arguments_of("--offline", offline))) == keys


def test_an_unknown_pair_is_named():
    with pytest.raises(ConfigError, match=r"'vii' is no set of the yardstick; choose from arxiv"):
        specs_of(arguments_of("--offline", "vii"))


def test_the_page_says_what_each_table_ran_with(ran):
    small = ("--duration", "3", "--offline-requests", "5", "--cost-model", "roofline")
    arguments = arguments_of("--offline", "v", "--online-sessions", "2", *small)
    suites = run_yardstick(arguments, num_jobs=1, quiet=True, names=["s0"])
    page = yardstick_page(arguments, suites)
    assert "Online `multi-turn`, 2 sessions at a time; targets TTFT " in page
    assert "280,000 KV tokens" in page
