"""A scheduler that a planning policy cannot serve is refused whichever way it was made."""

from __future__ import annotations

from importlib.metadata import version
from unittest import mock

import msgspec
import pytest

import cosched.bootstrap  # noqa: F401  # before sglang
from cosched.config import Config
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


@pytest.mark.parametrize(
    ("config", "price"),
    [
        ({}, "at up to 50 ms a token (target 50 ms), mostly faster (budgets.chat_pace 0.02)"),
        ({"policy": "hygen", "slo": {"tpot_ms": 30}}, "at up to 30 ms a token (target 30 ms)"),
        ({"policy": "cosched-unpaced"}, "at up to 50 ms a token (target 50 ms)"),
        ({"latency_budget_ms": 25}, "at up to 25 ms a token (latency budget; target 50 ms)"),
        (
            {"tolerance": {"tpot": 0.05}},
            "at most 5 % slower than alone, mean and p99 (target 50 ms)",
        ),
        (
            {"tolerance": {"ttft": 0.1}},
            "at up to 50 ms a token (target 50 ms), mostly faster (budgets.chat_pace 0.02); its "
            "first tokens come at most 10 % later, mean and p99",
        ),
        (
            {
                "tiers": [
                    {"name": "free", "priority": 0, "tpot_ms": 80},
                    {"name": "gold", "priority": 1},
                ]
            },
            "at up to 80 ms a token (targets of its tiers 50, 80 ms), mostly faster "
            "(budgets.chat_pace 0.02)",
        ),
        (
            {"policy": "sarathi"},
            "at any pace (target 50 ms): policy sarathi plans without predicted times",
        ),
        (
            {"policy": "priority"},
            "at any pace (target 50 ms): policy priority plans without predicted times",
        ),
    ],
)
def test_the_price_of_a_batch_is_that_of_the_configuration(config, price):
    from cosched.engine.startup import batch_price

    told = batch_price(msgspec.convert(config, Config))
    assert told.startswith("while a batch runs, chat decodes at ")
    assert told.endswith(price)


def test_the_log_says_what_schedules(make_engine):
    from cosched.engine import attach

    config = {"slo": {"ttft_ms": 300, "tpot_ms": 40}, "latency_budget_ms": 25}
    with mock.patch.object(attach.logger, "info") as info:  # SGLang replaces logging's handlers
        make_engine(policy="hygen", config=config)
    attention, line = (call.args[0] % call.args[1:] for call in info.call_args_list)
    assert attention == "cosched: shared-prefix attention off: there is no GPU"
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
