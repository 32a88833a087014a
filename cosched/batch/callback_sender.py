"""Sends the callbacks of a store, beside everything else that the HTTP process does.

An attempt looks its host name up, connects to an address that `CallbackRules` allows, and reads the
status of the answer: 2xx is delivered, anything else is tried again later. Redirects are not
followed, bodies are not read, proxies and cookies are not used.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import httpx

from cosched.batch.callback_rules import CallbackRules, RefusedUrlError, host_of
from cosched.batch.callbacks import Callback, CallbackQueue, signed_headers
from cosched.batch.storage import FailureLog
from cosched.batch.threads import FairSlots, FairThreads

logger = logging.getLogger(__name__)

_STEP_S = 1.0
"""Between two looks at what is due when nothing happens."""
_MOST_PAUSE_S = 3600.0
_LEASE_S = 30.0
"""Of a claim beyond the time of an attempt: for the store, and for clocks that differ."""
_ADDRESSES = 3
"""Most of one host that are tried in an attempt."""
_NUM_NAME_THREADS = 4


class CallbackSender:
    """One per server; `run` until it is cancelled. What is under way then is sent again when its
    lease is over."""

    def __init__(
        self,
        queue: CallbackQueue,
        rules: CallbackRules,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """clock: for the log of failures [s]; chance: uniform in [0, 1)"""
        self._queue = queue
        self._rules = rules
        self._chance = chance
        self._failures = FailureLog(clock)
        self._store = FairThreads("cosched-callbacks", FairSlots(1, per_key=1))
        names = FairSlots(_NUM_NAME_THREADS, per_key=1)
        self._names = FairThreads("cosched-callback-names", names)
        self._ssl: ssl.SSLContext = httpx.create_ssl_context()
        self._wake = asyncio.Event()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        """By host."""
        self.ended: Counter[str] = Counter()
        """Since the start: callbacks that were delivered and that were given up, and attempts that
        are to be repeated (`delivered`, `failed`, `retried`)."""

    async def run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(verify=self._ssl, trust_env=False, limits=limits)
        try:
            async with transport:
                while True:
                    self._wake.clear()
                    await self._step(transport)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_STEP_S):
                            await self._wake.wait()
        finally:
            tasks = list(self._under_way.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._store.close()
            self._names.close()

    async def _step(self, transport: httpx.AsyncHTTPTransport) -> None:
        """Begin what is due."""
        settings = self._rules.settings
        limit = settings.max_at_once - len(self._under_way)
        if limit <= 0:
            return
        lease_s = settings.timeout_s + _LEASE_S
        busy = list(self._under_way)
        try:
            found = await self._store.run(
                None, self._queue.claim, limit=limit, busy=busy, lease_s=lease_s
            )
            self._failures.over()
        except Exception as error:
            self._failures.add(error, "no callback is sent")
            return
        for callback in found:
            task = asyncio.create_task(self._deliver(transport, callback))
            self._under_way[callback.host] = task

    async def _deliver(self, transport: httpx.AsyncHTTPTransport, callback: Callback) -> None:
        try:
            try:
                reason = await self._attempt(transport, callback)
            except Exception:  # of ours: an attempt all the same, or it would never end
                logger.exception("batches: the callback of %s", callback.batch_id)
                reason = "the server failed; its log says why"
            if reason is None:
                await self._store.run(None, self._queue.delivered, callback)
                self.ended["delivered"] += 1
            else:
                await self._put_off(callback, reason)
        except Exception as error:
            # The lease ends by itself: it is sent again.
            self._failures.add(error, f"the callback of {callback.batch_id} is not recorded")
        finally:
            self._under_way.pop(callback.host, None)
            self._wake.set()

    async def _put_off(self, callback: Callback, reason: str) -> None:
        settings, now = self._rules.settings, self._queue.now()
        # 2.0 ** 1024 is an error.
        pause_s = min(settings.retry_s * 2.0 ** min(callback.num_attempts - 1, 64), _MOST_PAUSE_S)
        next_at = now + pause_s * (1 - self._chance() / 2)
        is_last = next_at > callback.ended_at + settings.give_up_h * 3600
        due_at = None if is_last else next_at
        await self._store.run(None, self._queue.not_delivered, callback, reason, due_at=due_at)
        self.ended["failed" if is_last else "retried"] += 1
        if is_last or callback.num_attempts == 1:
            logger.warning(
                "batches: %s of %s was not told: %s; %s",
                callback.host,
                callback.batch_id,
                reason,
                f"given up after {callback.num_attempts}" if is_last else "trying again",
            )

    async def _attempt(self, transport: httpx.AsyncHTTPTransport, callback: Callback) -> str | None:
        """Why it failed; None: it was delivered."""
        timeout_s = self._rules.settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                url = self._rules.checked(callback.url)
                found = await self._names.run(callback.host, self._rules.addresses, url)
                status = await self._post(transport, callback, url, found[:_ADDRESSES])
        except RefusedUrlError as error:
            return str(error)
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if 200 <= status < 300 else f"HTTP {status}"

    async def _post(
        self,
        transport: httpx.AsyncHTTPTransport,
        callback: Callback,
        url: httpx.URL,
        addresses: list[str],
    ) -> int:
        """The status of the answer of the first address that can be reached."""
        body = callback.body()
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "cosched",
            **signed_headers(
                callback.event_id,
                body,
                secrets=self._rules.secrets(callback.owner),
                now=int(self._queue.now()),
            ),
        }
        for address in addresses:
            request = httpx.Request(
                "POST",
                url.copy_with(host=address),
                headers=headers,
                content=body,
                extensions={"sni_hostname": host_of(url)},
            )
            try:
                answer = await transport.handle_async_request(request)
            except httpx.ConnectError:
                if address == addresses[-1]:
                    raise
                continue
            await answer.aclose()
            return answer.status_code
        raise AssertionError("no address")
