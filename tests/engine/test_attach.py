"""A scheduler that a planning policy cannot serve is refused whichever way it was made."""

from __future__ import annotations

from importlib.metadata import version
from unittest import mock

import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.errors import ConfigError


@pytest.mark.parametrize(
    ("switches", "flag"),
    [
        (["--disable-radix-cache"], "--disable-radix-cache"),
        (["--enable-priority-scheduling"], "--enable-priority-scheduling"),
        (["--prefill-decode-interval", "3"], "--prefill-decode-interval 3"),
    ],
)
def test_settings_that_cannot_go_together(make_engine, switches, flag):
    with pytest.raises(ConfigError) as refusal:
        make_engine(policy="hygen", switches=switches)
    message = str(refusal.value)
    assert message.startswith(f"{flag} cannot go with --cosched-policy hygen: ")
    assert "\n" not in message


def test_stock_policies_take_them(make_engine):
    engine = make_engine(policy="sglang", switches=["--disable-radix-cache"])
    assert getattr(engine.scheduler, "cosched", None) is None


def test_the_log_says_what_schedules(make_engine):
    from cosched.engine import attach

    config = {"slo": {"ttft_ms": 300, "tpot_ms": 40}, "latency_budget_ms": 25}
    with mock.patch.object(attach.logger, "info") as info:  # SGLang replaces logging's handlers
        make_engine(policy="hygen", config=config)
    (call,) = info.call_args_list
    line = call.args[0] % call.args[1:]
    for fact in (
        "policy hygen",
        "TTFT 300 ms, TPOT 40 ms",
        "latency budget 25 ms",
        "learnt while running",
        "mixed chunks on",
        "offline pool in prefix order",
        f"SGLang {version('sglang')}",
    ):
        assert fact in line
