"""Fuzz a server: no request may end it, hurt it or get an answer of 500 and more.

    scripts/fuzz_server --seed 1 --requests 1000

Sends requests of both classes to all endpoints, right, subtly wrong and garbage, some of which hang
up at a random moment. A small chat is sent as a probe every half second beside them, whether or not
the last one is answered. Every answer must be 2xx or 4xx, every probe must be answered within
`--probe-limit` seconds, and at the end nothing may wait, run or hold KV. With `--keys` each request
has one of these API keys in turn; at the end no place of a key may be taken, and the device seconds
of all keys must be those in which the device was busy.

Other programs on the machine make probes slow too: give a larger limit there.

A seed gives the same requests in the same order; how they meet in time differs between runs.
`--only N` sends request N alone. The last line is one JSON object; 1 is the exit status when
something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

from cosched.lab.demo_model import SIZES, ensure_demo_model
from tests.adapters import make_adapters
from tests.forks import Forks
from tests.fuzz.cases import FEATURES, Case, World, make_case
from tests.serving import Server, ServerError, start_server

CONTEXT_LEN = 1024
LORAS = ("A", "B", "C")
SERVED_MODEL = "fuzzed"
CASE_TIMEOUT_S = 90.0
"""Beyond any wait that a busy machine explains."""
DRAIN_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 500.0
PROBE_EVERY_S = 0.5
PROBE_LIMIT_S = 2.0
MOST_IN_FLIGHT = 6
"""Sequences of a key, of each class: fewer than a run asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A chat that was answered.

    sent_s     since the start of the run
    took_s     until its whole answer was there
    under_way  numbers of the requests under way when it was sent
    """

    sent_s: float
    took_s: float
    under_way: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What a run found."""

    num_sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """What went wrong, and the request as a command line."""
    probes: list[Probe] = field(default_factory=list)
    took_s: float = 0.0
    """Of all requests, without the start of the server and the checks at the end."""
    probe_failures: list[str] = field(default_factory=list)
    device_s: float = 0.0
    """What all keys cost."""
    busy_s: float = 0.0

    def fail(self, what: str, case: Case | None = None) -> None:
        self.failures.append(what if case is None else f"{what}\n  {case.shown()}")


class Fuzz:
    """Sends the cases and watches the server."""

    def __init__(
        self,
        url: str,
        cases: Sequence[Case],
        *,
        concurrency: int,
        keys: Sequence[str] = (),
    ) -> None:
        self.url = url
        self.cases = cases
        self.concurrency = concurrency
        self.keys = keys
        self.outcome = Outcome()
        self.dead = False
        self.in_flight: dict[int, Case] = {}
        self._started_s = 0.0

    async def run(self) -> None:
        # A connection each: what one request breaks is not put down to the next.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=None) as client:
            await self._probe(client)  # the first chat pays for what is set up lazily
            self.outcome.probes.clear()
            await self._send_all(client)
            self.outcome.took_s = time.perf_counter() - self._started_s
            if not self.dead:
                await self._check_drained(client)
            if not self.dead and self.keys:
                await self._check_keys(client)

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        """With probes beside."""
        waiting, done = iter(self.cases), asyncio.Event()
        self._started_s = time.perf_counter()
        probing = asyncio.create_task(self._probe_until(client, done))
        await asyncio.gather(*[self._work(client, waiting) for _ in range(self.concurrency)])
        done.set()
        await probing

    async def _work(self, client: httpx.AsyncClient, waiting: Iterator[Case]) -> None:
        for case in waiting:
            if self.dead:
                return
            self.in_flight[case.number] = case
            await self._send(client, case)
            del self.in_flight[case.number]
            self.outcome.num_sent += 1

    async def _send(self, client: httpx.AsyncClient, case: Case) -> None:
        timeout_s = CASE_TIMEOUT_S if case.abort_after_s is None else case.abort_after_s
        try:
            async with asyncio.timeout(timeout_s):
                status, text = await self._answer(client, case)
        except TimeoutError:
            if case.abort_after_s is None:
                self.outcome.fail(f"no answer within {CASE_TIMEOUT_S:g} s", case)
            self.outcome.statuses["hung up"] += 1
            return
        except httpx.TransportError as error:
            self.dead = self.dead or not await self._is_alive()
            reason = None if self.dead else known_reason(case.path, 0, str(error))
            if reason is None:
                self.outcome.fail(f"connection: {error!r}", case)
            else:
                self.outcome.known[reason] += 1
            return
        self.outcome.statuses[str(status)] += 1
        found = status if status >= 500 else _status_in_stream(text)
        if found < 500:
            return
        reason = known_reason(case.path, found, text)
        if reason is None:
            self.outcome.fail(f"{found}: {text[:400]}", case)
        else:
            self.outcome.known[reason] += 1

    async def _answer(self, client: httpx.AsyncClient, case: Case) -> tuple[int, str]:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in case.headers.items()]
        if self.keys and not {"authorization", "x-api-key"} & case.headers.keys():
            key = self.keys[case.number % len(self.keys)]
            headers.append((b"authorization", f"Bearer {key}".encode()))
        request = client.build_request(
            case.method, case.path, headers=headers, content=case.content or None
        )
        response = await client.send(request)
        return response.status_code, response.text

    async def _is_alive(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
                return (await client.get("/health")).status_code == 200
        return False

    async def _probe_until(self, client: httpx.AsyncClient, done: asyncio.Event) -> None:
        """Send a user's chat every `PROBE_EVERY_S`, also while earlier ones wait for an answer."""
        probes = [asyncio.create_task(self._probe(client))]
        while not self.dead:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), PROBE_EVERY_S)
            if done.is_set():
                break
            probes.append(asyncio.create_task(self._probe(client)))
        await asyncio.gather(*probes)

    async def _probe(self, client: httpx.AsyncClient) -> None:
        sent_s = time.perf_counter()
        under_way = tuple(self.in_flight)
        number = int(sent_s * 1e6)
        messages = [{"role": "user", "content": f"{number} is a number. Name another."}]
        body = {"model": SERVED_MODEL, "messages": messages, "max_tokens": 4, "ignore_eos": True}
        try:
            answer = await client.post("/v1/chat/completions", json=body, timeout=CASE_TIMEOUT_S)
            num_tokens = answer.json()["usage"]["completion_tokens"]
            assert num_tokens == 4, f"{num_tokens} tokens of 4"
        except (httpx.TransportError, ValueError, KeyError, AssertionError) as error:
            self.outcome.probe_failures.append(repr(error)[:300])
            self.dead = self.dead or not await self._is_alive()
            return
        took_s = time.perf_counter() - sent_s
        self.outcome.probes.append(
            Probe(sent_s=sent_s - self._started_s, took_s=took_s, under_way=under_way)
        )

    async def _check_drained(self, client: httpx.AsyncClient) -> None:
        """Nothing waits or runs, and no KV is held by what has ended."""
        until_s = time.monotonic() + DRAIN_TIMEOUT_S
        load: dict[str, int] = {}
        while time.monotonic() < until_s:
            loads = (await client.get("/v1/loads?include=core,queues", timeout=30)).json()
            load = loads["loads"][0]
            if not load["num_running_reqs"] and not load["num_waiting_reqs"]:
                break
            await asyncio.sleep(0.5)
        else:
            self.outcome.fail(f"not idle {DRAIN_TIMEOUT_S:g} s after the last answer: {load}")
            return
        for name in [f"session-{number}" for number in range(6)] + [""]:
            await client.post("/close_session", json={"session_id": name}, timeout=30)
        info = (await client.get("/get_server_info", timeout=30)).json()
        state = info["internal_states"][0].get("cosched") or {}
        left = {
            name: n for name, n in state.items() if re.match("num_(waiting|running)", name) and n
        }
        if left:
            self.outcome.fail(f"cosched still counts {left}")
        flushed = await client.post("/flush_cache?timeout=30", timeout=60)
        if flushed.status_code != 200:
            self.outcome.fail(f"the cache cannot be flushed: {flushed.text[:200]}")
        loads = (await client.get("/v1/loads?include=core", timeout=30)).json()
        used = loads["loads"][0]["num_used_tokens"]
        if used:
            self.outcome.fail(f"{used} tokens of KV are held by nobody")
        await self._probe(client)

    async def _check_keys(self, client: httpx.AsyncClient) -> None:
        """No place of a key is taken, and the costs of all keys are that of the device."""
        for key in self.keys:
            for tier in ("default", "flex"):
                body = {
                    "model": SERVED_MODEL,
                    "prompt": ["1 2 3"] * MOST_IN_FLIGHT,
                    "max_tokens": 2,
                    "service_tier": tier,
                }
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                if answer.status_code != 200:
                    self.outcome.fail(f"key {key!r} has no place left: {answer.text[:300]}")
        for replica in (await client.get("/cosched", timeout=30)).json()["replicas"]:
            costs = [s for by_name in replica["device_s"].values() for s in by_name.values()]
            self.outcome.device_s += sum(costs)
            self.outcome.busy_s += replica["busy_s"]
        # Each is rounded to a microsecond.
        if abs(self.outcome.device_s - self.outcome.busy_s) > 1e-6 * (len(costs) + 1):
            self.outcome.fail(
                f"the keys cost {self.outcome.device_s:.6f} s, the device was busy for "
                f"{self.outcome.busy_s:.6f} s"
            )


# (path, status, text) as regular expressions -> why stock SGLang's answer is no failure. None of it
# hurts another request. Status 0: the connection broke in the middle of an answer.
KNOWN = {
    ("/api/(chat|generate)", "0", "peer closed connection"): (
        "SGLang reads a request to its Ollama routes after their stream has begun: a wrong value "
        "ends the connection instead of a 400"
    ),
}


def known_reason(path: str, status: int, text: str) -> str | None:
    """Why this answer is no failure; None: it is one."""
    for (of_path, of_status, of_text), reason in KNOWN.items():
        if (
            re.fullmatch(of_path, path)
            and re.fullmatch(of_status, str(status))
            and re.search(of_text, text)
        ):
            return reason
    return None


def _status_in_stream(text: str) -> int:
    """The worst code of an error inside a stream that began well; 0: none."""
    if not text.startswith(("data:", "event:")):
        return 0
    found = re.findall(r'"error": ?\{[^}]*"code": ?(\d+)', text)
    return max(map(int, found), default=0)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="which sequence (default: 0)")
    parser.add_argument("--requests", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--only", type=int, metavar="N", help="send request N alone, and show it")
    parser.add_argument(
        "--concurrency", type=int, default=8, help="most under way at a time (default: 8)"
    )
    parser.add_argument(
        "--probe-limit",
        type=float,
        default=PROBE_LIMIT_S,
        metavar="S",
        help="longest that a probe may take, in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--without",
        choices=FEATURES,
        nargs="+",
        default=[],
        help="leave requests with these out",
    )
    parser.add_argument(
        "--keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help=f"API keys, each with {MOST_IN_FLIGHT} places of a class; with --url those "
        "of the server",
    )
    parser.add_argument("--url", help="a server that runs already, instead of one of its own")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="its demo model")
    parser.add_argument("--policy", default="hygen", help="its policy (default: hygen)")
    parser.add_argument(
        "server_flags", nargs="*", metavar="-- FLAG", help="further flags of the server, after --"
    )
    return parser


@contextlib.contextmanager
def fuzzed_server(args: argparse.Namespace, forks: Forks | None = None) -> Iterator[Server]:
    """A server with little of everything: memory, context, requests at a time."""
    with tempfile.TemporaryDirectory(prefix="cosched-fuzz-") as folder:
        flags = ["--cosched-policy", args.policy, "--served-model-name", SERVED_MODEL]
        flags += ["--context-length", str(CONTEXT_LEN), "--max-total-tokens", "6000"]
        flags += ["--max-running-requests", "12", "--chunked-prefill-size", "256"]
        if "lora" not in args.without:
            folders = make_adapters(Path(folder), LORAS, size=args.size)
            adapters = [f"{name}={path}" for name, path in folders.items()]
            flags += ["--enable-lora", "--lora-backend", "torch_native"]
            flags += ["--max-loras-per-batch", "2", "--lora-paths", *adapters]
        if args.keys:
            limits = {"max_online": MOST_IN_FLIGHT, "max_offline": MOST_IN_FLIGHT}
            flags += ["--cosched-claims", json.dumps({"keys": dict.fromkeys(args.keys, limits)})]
        model = ensure_demo_model(size=args.size)
        flags += args.server_flags
        with start_server(
            model,
            *flags,
            module="tests.fuzz.server",
            ready_timeout_s=READY_TIMEOUT_S,
            forks=forks,
        ) as server:
            yield server


def report(console: Console, args: argparse.Namespace, outcome: Outcome) -> bool:
    """Print what was found; whether all went well."""
    if outcome.failures:
        console.print(f"\n{len(outcome.failures)} failures", style="bold red")
    for failure in outcome.failures[:50]:
        console.print(f"* {failure}", markup=False, highlight=False)
    for failure in outcome.probe_failures[:10]:
        console.print(f"* the probe: {failure}", style="red", markup=False)
    probe_s = sorted(probe.took_s for probe in outcome.probes) or [0.0]
    slow = [probe for probe in outcome.probes if probe.took_s > args.probe_limit]
    for probe in slow[:20]:
        console.print(
            f"* a probe at {probe.sent_s:.1f} s took {probe.took_s:.1f} s; under way were "
            f"{' '.join(map(str, probe.under_way))}",
            style="red",
            highlight=False,
        )
    ok = not outcome.failures and not outcome.probe_failures and not slow
    result = {
        "config": vars(args),
        "seed": args.seed,
        "ok": ok,
        "num_sent": outcome.num_sent,
        "num_failures": len(outcome.failures),
        "took_s": round(outcome.took_s, 1),
        "num_probes": len(outcome.probes),
        "num_probe_failures": len(outcome.probe_failures),
        "num_slow_probes": len(slow),
        "probe_ms": {
            "p50": round(probe_s[len(probe_s) // 2] * 1e3, 1),
            "p99": round(probe_s[len(probe_s) * 99 // 100] * 1e3, 1),
            "max": round(probe_s[-1] * 1e3, 1),
        },
        "device_s": round(outcome.device_s, 6),
        "busy_s": round(outcome.busy_s, 6),
        "statuses": dict(sorted(outcome.statuses.items())),
        "known": dict(outcome.known),
    }
    print(json.dumps(result), flush=True)
    return ok


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    world = World(
        model=SERVED_MODEL,
        context_len=CONTEXT_LEN,
        vocab_size=SIZES[args.size].vocab_size,
        loras=LORAS,
        without=frozenset(args.without),
    )
    numbers = range(args.first, args.first + args.requests) if args.only is None else [args.only]
    cases = [make_case(args.seed, number, world) for number in numbers]
    if args.only is not None:
        console.print(cases[0].shown(), markup=False, highlight=False)
    log = ""
    try:
        with contextlib.ExitStack() as stack:
            server = None if args.url else stack.enter_context(fuzzed_server(args))
            url = args.url or server.url
            fuzz = Fuzz(url, cases, concurrency=args.concurrency, keys=args.keys)
            asyncio.run(fuzz.run())
            log = server.log() if server else ""
    except ServerError as error:
        raise SystemExit(f"fuzz_server: {error}") from None
    if fuzz.dead:
        under_way = "\n".join(case.shown() for case in fuzz.in_flight.values())
        fuzz.outcome.fail(f"the server is gone; under way were\n{under_way}")
    if not report(console, args, fuzz.outcome):
        console.print("\n".join(log.splitlines()[-60:]), markup=False, highlight=False)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
