"""Sends lines to a server until each is answered or has failed for good."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import httpx

from cosched.errors import ConfigError
from cosched.jobs.errors import ServerGoneError
from cosched.jobs.lines import RequestLine
from cosched.jobs.records import Failure, Outcome
from cosched.jobs.responses import TryAgain, judge

__all__ = ["Client", "RetryRules"]

# httpx looks at every connection of a pool for every request: with 256 in one pool that costs
# 13 ms a line, with pools of 16 under 1 ms (2 cores, local server).
_CONNECTIONS_PER_POOL = 16
_CONNECT_TIMEOUT_S = 10.0
_MAX_DOUBLINGS = 16
_HEADERS = {
    "content-type": "application/json",
    "x-smg-priority": "bulk",  # says offline also where the body has no service_tier
}
# An answer may take hours, so a silent connection proves nothing; probes tell a slow server from
# a machine that is gone (after 2 minutes).
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Waits grow from `base_s` by doubling to `cap_s`; each is then cut by up to half at random,
    so that lines which failed together do not come back together."""

    max_wait_s: float = 600.0
    max_retries: int = 5
    base_s: float = 0.25
    cap_s: float = 15.0

    def wait_s(self, num_tries: int, rng: random.Random) -> float:
        longest = min(self.cap_s, self.base_s * float(1 << min(num_tries, _MAX_DOUBLINGS)))
        return longest * rng.uniform(0.5, 1.0)


class Client:
    """One per job. `send` may run as often at the same time as `concurrency` says."""

    def __init__(
        self,
        *,
        base_url: str,
        concurrency: int,
        rules: RetryRules,
        rng: random.Random,
        clock: Callable[[], float],
        timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> None:
        self.base_url = base_url
        self._rules = rules
        self._rng = rng
        self._clock = clock
        self._timeout_s = timeout_s
        self._pools = _pools(base_url, concurrency=concurrency, api_key=api_key)
        self._failing_since_s: float | None = None
        self._limit_s = rules.max_wait_s
        self._last_reason = ""
        self._sent_at_s: dict[int, float] = {}  # of requests without an answer; oldest first

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in self._pools:
            await pool.aclose()

    @property
    def trouble(self) -> str | None:
        """What is wrong with the server at the moment, for the progress display."""
        if self._failing_since_s is None:
            return None
        waited_s = self._clock() - self._failing_since_s
        return f"no answer for {waited_s:.0f} s of at most {self._limit_s:g}: {self._last_reason}"

    async def wait_ready(self, *, max_wait_s: float, check: Callable[[], None]) -> None:
        """Return when the server is ready. `check` is called between tries and may raise.

        Raises ServerGoneError after `max_wait_s`, ConfigError when the server wants a key.
        """
        began_s = self._clock()
        num_tries = 0
        while (reason := await self._not_ready()) is not None:
            check()
            self._failing_since_s, self._limit_s, self._last_reason = began_s, max_wait_s, reason
            if self._clock() - began_s >= max_wait_s:
                raise ServerGoneError(
                    f"{self.base_url} was not ready after {max_wait_s:g} s: {reason}"
                )
            await asyncio.sleep(min(1.0, self._rules.wait_s(num_tries, self._rng)))
            num_tries += 1
        self._failing_since_s, self._limit_s = None, self._rules.max_wait_s

    async def _not_ready(self) -> str | None:
        pool = self._pools[0]
        try:
            health = await pool.get("/health", timeout=_CONNECT_TIMEOUT_S)
            if health.status_code != 200:
                return f"GET /health: HTTP {health.status_code}"
            models = await pool.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
        except httpx.RequestError as error:
            return _reason(error)
        if models.status_code in (401, 403):
            raise ConfigError(
                f"{self.base_url} refuses the API key (HTTP {models.status_code}): "
                "give the right one with --api-key"
            )
        return None

    async def send(self, line: RequestLine) -> Outcome:
        """The final outcome of `line`. Raises ServerGoneError; may be cancelled at any time."""
        num_tries = num_faults = 0
        while True:
            verdict = await self._try(line)
            if not isinstance(verdict, TryAgain):
                self._failing_since_s = None
                return verdict
            if verdict.failure is None:
                self._refused(verdict.reason)
            else:
                self._failing_since_s = None  # the server is there: it answered
                num_faults += 1
                if num_faults > self._rules.max_retries:
                    return verdict.failure
            wait_s = max(self._rules.wait_s(num_tries, self._rng), verdict.after_s)
            await asyncio.sleep(min(wait_s, 2 * self._rules.cap_s))
            num_tries += 1

    async def _try(self, line: RequestLine) -> Outcome | TryAgain:
        pool = self._pools[line.number % len(self._pools)]
        self._sent_at_s[line.number] = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                return judge(await pool.post(line.url, content=line.body))
        except TimeoutError:
            message = f"no answer within {self._timeout_s:g} s (--timeout)"
            return Failure(code="timeout", message=message)
        except httpx.RequestError as error:
            return TryAgain(reason=_reason(error))
        finally:
            del self._sent_at_s[line.number]

    def _refused(self, reason: str) -> None:
        """Note that the server could not be reached or took no request.

        Gives up when that is all it has done for `max_wait_s`. It does more while it works on a
        request that it took earlier: then it is only full.
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


def _pools(base_url: str, *, concurrency: int, api_key: str | None) -> list[httpx.AsyncClient]:
    headers = dict(_HEADERS)
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
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
            trust_env=False,  # proxies are for the way out, not for the server beside us
        )
        for _ in range(num_pools)
    ]


def _reason(error: httpx.RequestError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
