"""What a server logs when it starts and when it is ready."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from sglang.srt.arg_groups.overrides import resolving_view

from cosched.config import Config
from cosched.engine.support import support, why_sglang_evicts
from cosched.files import DEMO_MODEL_STAMP
from cosched.policies import PolicyEntry, policy_entry
from cosched.schedule.cosched import CoschedOptions

logger = logging.getLogger(__name__)

_LISTEN_S = 30.0


def describe(config: Config, server_args: Any) -> str:
    """One line: the policy and its settings."""
    entry = policy_entry(config.policy)
    facts = [f"cosched {version('cosched')} on SGLang {version('sglang')}"]
    if entry.make is None:
        facts.append(f"policy {entry.name}: SGLang schedules, cosched reads classes only")
        return "; ".join(facts)
    facts.append(f"policy {entry.name}")
    facts.append(f"targets TTFT {config.slo.ttft_ms:g} ms, TPOT {config.slo.tpot_ms:g} ms")
    if entry.timed:
        budget = config.latency_budget_ms
        facts.append(
            "latency budget " + ("from the targets" if budget is None else f"{budget:g} ms")
        )
        model = config.latency_model
        facts.append(f"latency model {'learnt while running' if model is None else model}")
    resolved = resolving_view(server_args)
    facts.append(f"mixed chunks {'on' if resolved.enable_mixed_chunk else 'off'}")
    if resolved.enable_hierarchical_cache:
        facts.append(f"host memory at {config.kv.host_bandwidth_gb_s:g} GB/s")
    found = support(server_args, config)
    if why_sglang_evicts(resolved, config) is None:
        facts.append(f"KV evicted by {config.named_kv().eviction}")
    is_by_arrival = config.named_pool() is None
    facts.append(f"offline pool in {'order of arrival' if is_by_arrival else 'prefix order'}")
    facts += [f"without {what}" for what in found.without]
    return "; ".join(facts)


def batch_price(config: Config) -> str:
    """One sentence: how much slower chats may become while a batch runs."""
    entry, tolerance = policy_entry(config.policy), config.tolerance
    target = f"target {config.slo.tpot_ms:g} ms"
    if config.tiers:
        slos = (tier.slo.tpot_s for tier in config.online_tiers())
        tpots_ms = [config.slo.tpot_ms if tpot_s is None else 1e3 * tpot_s for tpot_s in slos]
        target = f"targets of its tiers {', '.join(f'{tpot_ms:g}' for tpot_ms in tpots_ms)} ms"
        most_ms = max(tpots_ms)
    else:
        most_ms = config.slo.tpot_ms
    begin = "while a batch runs, chat decodes at "
    if not entry.timed:
        return f"{begin}any pace ({target}): policy {entry.name} plans without predicted times"
    if tolerance is not None and tolerance.tpot is not None:
        price = f"{begin}most {100 * tolerance.tpot:g} % slower than alone, mean and p99 ({target})"
    elif config.latency_budget_ms is not None:
        price = f"{begin}up to {config.latency_budget_ms:g} ms a token (latency budget; {target})"
    else:
        price = f"{begin}up to {most_ms:g} ms a token ({target})"
        if _is_paced(entry):
            price += f", mostly faster (budgets.chat_pace {config.budgets.chat_pace:g})"
    if tolerance is not None and tolerance.ttft is not None:
        price += f"; its first tokens come at most {100 * tolerance.ttft:g} % later, mean and p99"
    return price


def _is_paced(entry: PolicyEntry) -> bool:
    """Iterations may be shorter than the targets allow."""
    options = getattr(entry.make, "keywords", {}).get("options")
    return isinstance(options, CoschedOptions) and options.paced


def wait_until_listening(server_args: Any) -> bool:
    """Wait until this process listens on the server's port. False: it does not."""
    port = resolving_view(server_args).port
    process = psutil.Process()
    deadline_s = time.monotonic() + _LISTEN_S
    while time.monotonic() < deadline_s:
        if any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in process.net_connections(kind="tcp")
        ):
            return True
        time.sleep(0.05)
    logger.error("cosched: this server cannot listen on port %d; another one may have it", port)
    return False


def log_ready(server_args: Any, config: Config) -> None:
    """Log the policy, two requests to try, and how to activate the virtual environment."""
    url = server_args.url()
    logger.info("cosched: ready on %s: %s", url, describe(config, server_args))
    logger.info("cosched: %s", batch_price(config))
    resolved = resolving_view(server_args)
    if (Path(resolved.model_path) / DEMO_MODEL_STAMP).exists():
        logger.info("cosched: the demo model has random weights: its replies are gibberish")
    body = {
        "model": resolved.served_model_name,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Hello!"}],
    }
    for what, more in (("online", {"stream": True}), ("offline", {"service_tier": "flex"})):
        logger.info(
            "cosched: try %s: curl %s/v1/chat/completions -H 'Content-Type: application/json' "
            "-d '%s'",
            what,
            url,
            json.dumps({**body, **more}),
        )
    if sys.prefix != sys.base_prefix and shutil.which("cosched") is None:
        logger.info(
            "cosched: to use its commands in another terminal: source %s/bin/activate", sys.prefix
        )
