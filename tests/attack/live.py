"""Attacks on a real server with the tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from rich.console import Console

from cosched.lab.demo_model import ensure_demo_model
from tests.attack.items import Setting, attack
from tests.attack.policies import TRIGGER
from tests.batch.api import Api
from tests.fuzz import run as fuzz
from tests.fuzz.cases import World, make_case
from tests.request_lines import chat as chat_line
from tests.serving import Server, start_server


def started(setting: Setting, *flags: str):
    model = ensure_demo_model(size="tiny", dtype="float32")
    return start_server(model, *flags, forks=setting.forks)


def state_of(server: Server, key: str = "none") -> dict[str, object]:
    headers = {"authorization": f"Bearer {key}"}
    info = httpx.get(f"{server.url}/get_server_info", headers=headers, timeout=60).json()
    return info["internal_states"][0]["cosched"]


def chat_s(server: Server, text: str = "hello", **headers: str) -> float:
    """How long a chat of 4 tokens takes [s]."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "default", "messages": messages, "max_tokens": 4, "ignore_eos": True}
    began_s = time.monotonic()
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=300)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    return time.monotonic() - began_s


@attack(
    "claims spoofing", full="each sign of class and targets, lines of a batch", needs_server=True
)
def spoof(setting: Setting) -> dict[str, object]:
    """Keys `chat` may send no offline work, `job` is offline whatever it says, and lines of a batch
    are offline whatever they say."""
    claims = {"keys": {"chat": {"max_offline": 0}, "job": {"class": "offline"}, "*": {}}}
    flags = ("--cosched-claims", json.dumps(claims), "--cosched-batches", str(setting.folder / "b"))
    own = {"cosched": {"ttft_slo_ms": 1e-9, "tpot_slo_ms": 1e-9, "deadline_s": 1e-9}}
    signs: tuple[tuple[dict[str, object], dict[str, str]], ...] = (
        ({}, {}),
        ({"priority": 2**31 - 1}, {}),
        ({"priority": 5, "custom_params": own}, {}),
        ({"service_tier": "auto", "custom_params": own}, {}),
        ({"custom_params": {"cosched": {"class": "online"}}}, {}),
        ({"custom_params": {"cosched": {}, "cosched_class": "online", "own": True}}, {}),
        ({}, {"x-smg-priority": "system"}),
        ({}, {"x-cosched-class": "online", "x-cosched-own": "1", "cosched-own": "true"}),
        ({}, {"x-slo-ttft-ms": "0.0000001", "x-slo-tpot-ms": "0.0000001"}),
        ({"state": {"own": True}, "scope": {"state": {"own": True}}}, {}),
    )
    seen = {"answered": 0, "refused": 0, "online_of_offline_key": 0, "lines_online": 0}
    with started(setting, *flags) as server:
        before = state_of(server)["online_prefill_tokens"]
        for fields, headers in signs:
            reply = _completion(server, fields, headers | {"authorization": "Bearer job"})
            seen["answered" if reply.status_code == 200 else "refused"] += 1
            assert reply.status_code in (200, 400), reply.text
            if reply.status_code == 200:
                assert reply.headers["x-cosched-class"] == "offline", (fields, headers)
        lines = []
        for number, (fields, _) in enumerate(signs):
            lines.append(chat_line(f"c{number}", **fields))
            lines.append(chat_line(f"h{number}") | {"headers": {"x-smg-priority": "system"}})
        api = Api(server.url)
        done = api.wait(api.create(lines, endpoint="/v1/chat/completions"), timeout_s=300)
        for record in api.records(done.output_file_id):
            assert record["response"]["body"]["service_tier"] == "flex", record
        seen["lines"] = len(api.records(done.output_file_id)) + len(api.records(done.error_file_id))
        seen["online_tokens"] = int(state_of(server)["online_prefill_tokens"] - before)
        assert seen["online_tokens"] == 0, seen
        for fields, headers in (
            ({"service_tier": "flex"}, {}),
            ({"priority": -1}, {}),
            ({}, {"x-smg-priority": "bulk"}),
            ({"priority": -1, "service_tier": "flex"}, {"x-cosched-own": "1"}),
        ):
            reply = _completion(server, fields, headers | {"authorization": "Bearer chat"})
            assert reply.status_code == 429, (fields, headers, reply.text)
            seen["refused"] += 1
        # Targets below the floors do not slow down others.
        seen["chat_ms"] = round(chat_s(server, authorization="Bearer chat") * 1e3)
    return seen


def _completion(server: Server, fields: dict[str, object], headers: dict[str, str]):
    body = {"model": "default", "prompt": "hello", "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)


@attack("offline flood, then one chat", full="20,000 requests, then 5 chats", needs_server=True)
def flood(setting: Setting) -> dict[str, object]:
    """With a chat that is answered alone beside it, for how much later it comes."""
    count, at_once = (20_000, 500) if setting.is_full else (1000, 100)
    with started(setting) as server:
        alone_s = sorted(chat_s(server, f"alone {n}") for n in range(5))

        body = {"sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        body |= {"service_tier": "flex"}
        with ThreadPoolExecutor(count // at_once) as threads, httpx.Client() as client:
            for first in range(0, count, at_once):
                prompts = [f"number {first + n} of many" for n in range(at_once)]
                threads.submit(
                    client.post,
                    f"{server.url}/generate",
                    json=body | {"text": prompts},
                    timeout=900,
                )
            most, until_s = 0, time.monotonic() + 300
            while most < count * 0.9 and time.monotonic() < until_s:
                state = state_of(server)
                now = int(state["num_waiting_offline"]) + int(state["num_running_offline"])
                if now < most:
                    break  # they end faster than they come
                most = now
                time.sleep(0.2)
            beside_s = sorted(chat_s(server, f"beside {n}") for n in range(5))
            left = int(state_of(server)["num_waiting_offline"])
            httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=60)
        after_s = chat_s(server)
    seen = {
        "requests": count,
        "most_at_once": most,
        "waiting_after_the_chats": left,
        "chat_alone_ms": round(alone_s[2] * 1e3),
        "chat_beside_ms": round(beside_s[2] * 1e3),
        "chat_beside_max_ms": round(beside_s[-1] * 1e3),
        "chat_after_ms": round(after_s * 1e3),
    }
    assert beside_s[-1] < 5, seen
    return seen


@attack("a policy that fails", full="raises, garbage, 5 s, never returns", needs_server=True)
def bad_policy(setting: Setting) -> dict[str, object]:
    seen: dict[str, object] = {}
    for name in ("Raises", "Garbage", "Slow", "Hangs"):
        with started(setting, "--cosched-policy", f"tests.attack.policies:{name}") as server:
            chat_s(server)
            assert not state_of(server)["failures"]
            began_s = time.monotonic()
            _completion(server, {"max_tokens": TRIGGER, "ignore_eos": True}, {}).raise_for_status()
            took_s = time.monotonic() - began_s
            _completion(server, {"service_tier": "flex"}, {}).raise_for_status()
            after_s = chat_s(server)
            state = state_of(server)
            assert state["policy_given_up"] and server.process.poll() is None, state
            assert "until the server is restarted" in server.log()
            assert f"policies:{name}' " in server.log(), "the policy is named"
            failures = " ".join(f"{place} {n}" for place, n in state["failures"].items())
            seen[name.lower()] = f"answered after {took_s:.1f} s, {after_s:.1f} s next ({failures})"
    return seen


@attack("fuzz", full="ten minutes", needs_server=True)
def fuzz_server(setting: Setting) -> dict[str, object]:
    args = fuzz.build_parser().parse_args([])
    num_sent, num_seeds, num_once, failures = 0, 0, 0, []
    probe_s: list[float] = []
    ends_s = time.monotonic() + 60 * setting.minutes
    world = World(
        model=fuzz.SERVED_MODEL,
        context_len=fuzz.CONTEXT_LEN,
        vocab_size=fuzz.SIZES[args.size].vocab_size,
        loras=fuzz.LORAS,
    )
    with fuzz.fuzzed_server(args, setting.forks) as server:
        while time.monotonic() < ends_s and not failures:
            cases = [make_case(setting.seed + num_seeds, number, world) for number in range(500)]
            run = fuzz.Fuzz(server.url, cases, concurrency=args.concurrency, model=world.model)
            asyncio.run(run.run(Console(stderr=True, quiet=True)))
            outcome = run.outcome
            failures += [failure.what for failure in outcome.failures] + outcome.probe_failures
            failures += ["the server is gone"] if run.dead else []
            num_sent += outcome.num_sent
            num_seeds += 1
            probe_s += [p.took_s for p in outcome.probes if p not in outcome.unconfirmed]
            num_once += len(outcome.unconfirmed)
    probe_s.sort()
    seen = {
        "requests": num_sent,
        "seeds": num_seeds,
        "failures": len(failures),
        "probes": len(probe_s),
        "probe_p50_ms": round(probe_s[len(probe_s) // 2] * 1e3),
        "probe_max_ms": round(probe_s[-1] * 1e3),
        "slow_once": num_once,
        "slower_than_2_s": sum(s > fuzz.PROBE_LIMIT_S for s in probe_s),
    }
    assert not failures and not seen["slower_than_2_s"], f"{seen} {failures[:3]}"
    return seen
