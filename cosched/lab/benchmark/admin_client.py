"""What an operator asks of a server: its state, its metrics, its limits of offline work."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cosched.lab.benchmark.live import LiveTarget, ServerError

_ANSWER_S = 60.0


async def running_state(target: LiveTarget, *, has_batch: bool) -> dict[str, Any]:
    """What a server says of itself. ServerError if its offline work cannot be paused, or there is
    none."""
    async with _client(target) as client:
        try:
            response = await client.get("/cosched")
        except httpx.HTTPError as error:
            raise ServerError(f"no server at {target.base_url}: {error}") from None
    if response.status_code != 200:
        raise ServerError(
            f"{target.base_url}/cosched answers {response.status_code}: not a cosched server, or "
            "not its --admin-api-key"
        )
    state: dict[str, Any] = response.json()
    if not all(state["replicas"]):
        raise ServerError(
            f"{target.base_url} has policy {state['policy']!r}, which leaves scheduling to SGLang: "
            "there is nothing to pause"
        )
    offline = ("num_waiting_offline", "num_running_offline")
    if not has_batch and not any(one[name] for one in state["replicas"] for name in offline):
        raise ServerError(f"{target.base_url} has no offline work: start a batch, or name --batch")
    return state


def _client(target: LiveTarget) -> httpx.AsyncClient:
    """With the operator's key."""
    key = target.admin_api_key or target.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        base_url=target.base_url, headers=headers, timeout=_ANSWER_S, trust_env=False
    )


async def post(target: LiveTarget, path: str, body: object = None) -> None:
    async with _client(target) as client:
        response = await client.post(path, json=body)
    if response.status_code != 200:
        raise ServerError(f"{path} answers {response.status_code}: {response.text[:200]}")


async def metrics_of(target: LiveTarget) -> dict[str, float]:
    """Sums over labels by name; empty where the server has no metrics."""
    async with _client(target) as client:
        response = await client.get("/metrics")
    found: dict[str, float] = {}
    if response.status_code == 200:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
