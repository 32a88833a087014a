"""Sends lines to a server until each is answered or has failed for good."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import httpx
import msgspec

from cosched.batch.jsonl.errors import ServerGoneError, ServerRefusedError
from cosched.batch.jsonl.line_results import Failure, Outcome, TryAgain, judge
from cosched.batch.jsonl.lines import RequestLine
from cosched.errors import ConfigError

# httpx scans every connection of a pool for every request: with 256 in one pool that costs
# 13 ms a line, with pools of 16 under 1 ms (2 cores, local server).
_CONNECTIONS_PER_POOL = 16
_CONNECT_TIMEOUT_S = 10.0
_MAX_DOUBLINGS = 16
_PERMANENT = (401, 403, 404, 405, 501)
"""Answers of GET /health that waiting will not change."""
_IGNORES_CLASSES = "sglang"
"""The policy of cosched that does not distinguish online from offline requests."""
_HEADERS = {
    "content-type": "application/json",
    "x-smg-priority": "bulk",  # says offline also where the body has no service_tier
}
# An answer may take hours, so a silent connection proves nothing; probes distinguish a slow
# server from a machine that is gone (after 2 minutes).
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Waits double from `base_s` to `cap_s`; each is then cut by up to half at random, so that
    lines which failed together are not retried together."""

    max_wait_s: float = 600.0
    max_retries: int = 5
    base_s: float = 0.25
    cap_s: float = 15.0

    def wait_s(self, num_tries: int, rng: random.Random) -> float:
        longest = min(self.cap_s, self.base_s * float(1 << min(num_tries, _MAX_DOUBLINGS)))
        return longest * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The server has answered nothing for a while."""

    waited_s: float
    limit_s: float
    reason: str


class HttpClients:
    """Closes its `pools` at the end of an ``async with``."""

    pools: Sequence[httpx.AsyncClient]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for pool in self.pools:
            await pool.aclose()


class Client(HttpClients):
    """One per job. At most `concurrency` calls of `send` may run at a time."""

    def __init__(
        self,
        *,
        base_url: str,
        concurrency: int,
        rules: RetryRules,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport`: replaces the network, and is not limited to `concurrency`."""
        self.base_url = base_url
        self._rules = rules
        self._rng = rng or random.Random()
        self._clock = clock
        self._timeout_s = timeout_s
        headers = dict(_HEADERS)
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        if transport is None:
            self.pools = _pools(base_url, concurrency=concurrency, headers=headers)
        else:
            self.pools = [
                httpx.AsyncClient(
                    base_url=base_url, headers=headers, timeout=None, transport=transport
                )
            ]
        self._failing_since_s: float | None = None
        self._limit_s = rules.max_wait_s
        self._last_reason = ""
        self._tickets = count()
        self._sent_at_s: dict[int, float] = {}  # of requests without an answer; oldest first

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with the server at the moment, for the progress display."""
        if self._failing_since_s is None:
            return None
        return Trouble(
            waited_s=self._clock() - self._failing_since_s,
            limit_s=self._limit_s,
            reason=self._last_reason,
        )

    @property
    def num_in_flight(self) -> int:
        """Requests at the server now."""
        return len(self._sent_at_s)

    async def wait_ready(
        self,
        *,
        max_wait_s: float,
        check: Callable[[], None] = lambda: None,
        absent_wait_s: float | None = None,
    ) -> None:
        """Return when the server is ready. `check` is called between tries and may raise.

        ServerGoneError after `max_wait_s`, or after `absent_wait_s` without a connection;
        ConfigError if the server refuses the key; ServerRefusedError if it answers no requests.
        """
        began_s = self._clock()
        num_tries = 0
        while (found := await self._not_ready()) is not None:
            check()
            reason, is_absent = found
            limit_s = max_wait_s
            if is_absent and absent_wait_s is not None:
                limit_s = min(max_wait_s, absent_wait_s)
            self._failing_since_s, self._limit_s, self._last_reason = began_s, limit_s, reason
            if self._clock() - began_s >= limit_s:
                if limit_s < max_wait_s:
                    raise ServerGoneError(
                        f"no server at {self.base_url} ({reason}). Start it first, or say with "
                        "--wait-s how long to wait for one that is starting"
                    )
                raise ServerGoneError(
                    f"{self.base_url} was not ready after {max_wait_s:g} s: {reason}"
                )
            await asyncio.sleep(min(1.0, self._rules.wait_s(num_tries, self._rng)))
            num_tries += 1
        self._failing_since_s, self._limit_s = None, self._rules.max_wait_s

    async def _not_ready(self) -> tuple[str, bool] | None:
        """Why the server is not ready, and whether it took no connection."""
        pool = self.pools[0]
        try:
            health = await pool.get("/health", timeout=_CONNECT_TIMEOUT_S)
            if health.status_code not in (200, *_PERMANENT):
                return f"GET /health: HTTP {health.status_code}", False
            models = await pool.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
        except httpx.RequestError as error:
            return _reason(error), isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        if models.status_code in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the API key (HTTP {models.status_code}): "
                "give the right one with --api-key"
            )
        if health.status_code in _PERMANENT and models.status_code != 200:
            raise ServerRefusedError(
                f"{self.base_url} does not serve these requests: GET /health answers HTTP "
                f"{health.status_code}, GET /v1/models HTTP {models.status_code}"
            )
        return None

    async def models(self) -> bytes | None:
        """The JSON of ``GET /v1/models``; None without an answer."""
        try:
            found = await self.pools[0].get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
        except httpx.RequestError:
            return None
        return found.content if found.is_success else None

    async def serves_classes(self) -> bool:
        """Whether the server is cosched's, with a policy that knows offline requests. Others serve
        them as online requests."""
        for url in ("/server_info", "/get_server_info"):
            try:
                found = await self.pools[0].get(url, timeout=_CONNECT_TIMEOUT_S)
                info = msgspec.json.decode(found.content) if found.is_success else None
            except (httpx.RequestError, msgspec.DecodeError, UnicodeDecodeError):
                continue
            states = info.get("internal_states") if isinstance(info, dict) else None
            first = states[0] if isinstance(states, list) and states else None
            state = first.get("cosched") if isinstance(first, dict) else None
            if isinstance(state, dict):
                return state.get("policy") != _IGNORES_CLASSES
        return False

    async def send(
        self,
        line: RequestLine,
        *,
        extensions: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        on_retry: Callable[[str], None] = lambda reason: None,
    ) -> Outcome:
        """The final outcome of `line`. ServerGoneError; may be cancelled at any time.

        extensions, headers  for the transport, at each try
        on_retry             is told why the line is sent again
        """
        num_tries = num_faults = 0
        aborted_since_s: float | None = None
        while True:
            verdict = await self._try(line, extensions, headers)
            if not isinstance(verdict, TryAgain):
                self._failing_since_s = None
                return verdict
            if verdict.failure is None:
                self._refused(verdict.reason)
            else:
                self._failing_since_s = None  # the server is there: it answered
                if verdict.is_aborted:  # no fault of the line, unless it happens again and again
                    aborted_since_s = aborted_since_s or self._clock()
                    if self._clock() - aborted_since_s >= self._rules.max_wait_s:
                        return verdict.failure
                else:
                    num_faults += 1
                if num_faults > self._rules.max_retries:
                    return verdict.failure
            wait_s = max(self._rules.wait_s(num_tries, self._rng), verdict.after_s)
            on_retry(verdict.reason)
            await asyncio.sleep(min(wait_s, 2 * self._rules.cap_s))
            num_tries += 1

    async def _try(
        self,
        line: RequestLine,
        extensions: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
    ) -> Outcome | TryAgain:
        pool = self.pools[line.number % len(self.pools)]
        ticket = next(self._tickets)
        self._sent_at_s[ticket] = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await pool.post(
                    line.url, content=line.body, headers=headers, extensions=dict(extensions or {})
                )
                return judge(reply)
        except TimeoutError:
            message = f"no answer within {self._timeout_s:g} s (--timeout)"
            return Failure(code="timeout", message=message)
        except httpx.RequestError as error:
            return TryAgain(reason=_reason(error))
        finally:
            del self._sent_at_s[ticket]

    def _refused(self, reason: str) -> None:
        """Note that the server could not be reached or took no request.

        ServerGoneError once this has lasted `max_wait_s`, unless the server still works on a
        request that it took before: then it is only full.
        """
        now_s = self._clock()
        self._last_reason = reason
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        failing_s = now_s - self._failing_since_s
        oldest_s = next(iter(self._sent_at_s.values()), now_s)
        if failing_s >= self._rules.max_wait_s and oldest_s >= self._failing_since_s:
            raise ServerGoneError(
                f"{self.base_url} answered nothing for {failing_s:.0f} s (--max-wait); "
                f"the last try: {reason}"
            )


def _pools(
    base_url: str, *, concurrency: int, headers: Mapping[str, str]
) -> list[httpx.AsyncClient]:
    # A line's pool is its number modulo the number of pools, so pools are not equally full: each
    # may hold more than its share.
    num_pools = -(-concurrency // _CONNECTIONS_PER_POOL)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    verify = ssl.create_default_context()  # slow to make: one for all pools
    return [
        httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                verify=verify, limits=limits, socket_options=_KEEP_ALIVE
            ),
            trust_env=False,  # proxies are for the internet, not for this server
        )
        for _ in range(num_pools)
    ]


def _reason(error: httpx.RequestError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
