"""Batches to measure: numbers of requests, chunks, contexts and cached prefixes, spread evenly in
the logarithm of their ranges.

A round is a pool of prefilled requests and batches of it: some of the pool decode, the others are
paused, and prefills compute new tokens over no context or over a prefix of the pool. So a round
pays for its contexts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cosched.errors import ConfigError

MOST_PREFILLS = 4
"""Requests with prompt tokens in one designed batch, at most."""

MOST_DECODES = 512
"""Requests in a pool, at most."""

_LEAST_CONTEXT = 32
_POOL_SHARE = 0.5
"""Share of the KV memory for the pool; the rest is for prefills and new tokens of decodes."""

_CHUNK_SHARE = 0.25
_KV_PER_REQUEST = 256
"""Least KV memory per request of a pool, its output included [tokens]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the engine.

    max_tokens   most tokens in one iteration
    max_running  most requests at a time
    kv_tokens    KV memory
    max_context  longest context of a request
    mixed        prefill and decode may share an iteration
    page_size    tokens that are cached together
    """

    max_tokens: int
    max_running: int
    kv_tokens: int
    max_context: int
    mixed: bool
    page_size: int = 1

    def __post_init__(self) -> None:
        for name, least in (("max_running", 2), ("kv_tokens", 256), ("max_context", 64)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; measuring needs {least}")

    @property
    def num_beside(self) -> int:
        """Request slots for prefills: of an iteration and of the one before, whose end is not
        known yet."""
        return min(2 * MOST_PREFILLS, self.max_running // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignedPrefill:
    """num_new prompt tokens over the first num_cached of the prompt of `prefix` (in the pool)."""

    num_new: int
    num_cached: int = 0
    prefix: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignedBatch:
    """decodes: which of the pool decode."""

    prefills: tuple[DesignedPrefill, ...] = ()
    decodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """pool: prompt length of each request [tokens]."""

    pool: tuple[int, ...]
    batches: tuple[DesignedBatch, ...]


def design_rounds(limits: Limits, *, num_batches: int, seed: int) -> list[Round]:
    """Rounds of growing contexts, by seed. Each kind of batch that the engine can run is equally
    frequent: decodes, prefills, prefills over cached tokens, mixed ones (half over cached
    tokens)."""
    rng = np.random.default_rng(seed)
    longest = min(limits.max_context, int(_POOL_SHARE * limits.kv_tokens)) // 2
    scales = [_LEAST_CONTEXT]
    while scales[-1] * 4 <= longest:
        scales.append(scales[-1] * 4)
    shares = [num_batches * (i + 1) // len(scales) for i in range(len(scales))]
    counts = [b - a for a, b in zip([0, *shares], shares, strict=False)]
    return [
        _Designer(limits, rng, scale=scale, num_batches=count).round()
        for scale, count in zip(scales, counts, strict=True)
    ]


class _Designer:
    """One round of contexts of mean `scale`."""

    def __init__(
        self, limits: Limits, rng: np.random.Generator, *, scale: int, num_batches: int
    ) -> None:
        self._limits = limits
        self._rng = rng
        self._num_batches = num_batches
        self._pool = self._contexts(scale)
        self._max_tokens = min(limits.max_tokens, int(_CHUNK_SHARE * limits.kv_tokens))

    def _contexts(self, scale: int) -> tuple[int, ...]:
        limits = self._limits
        most = min(
            MOST_DECODES,
            limits.max_running - limits.num_beside,
            limits.kv_tokens // max(scale, _KV_PER_REQUEST),
        )
        memory = int(_POOL_SHARE * limits.kv_tokens)
        longest = min(4 * scale, limits.max_context // 2, memory)
        drawn = np.clip(self._rng.exponential(scale, most), 2, longest)
        inside = np.cumsum(drawn) <= memory
        return tuple(int(x) for x in drawn[: max(int(inside.sum()), 1)])

    def round(self) -> Round:
        kinds = [self._decode, self._prefill, self._cached_prefill]
        if self._limits.mixed:
            kinds.append(self._mixed)
        batches: list[DesignedBatch] = []
        for i, kind in enumerate(kinds):
            count = len(range(i, self._num_batches, len(kinds)))
            sizes = zip(
                self._spread(count, self._max_tokens),
                self._spread(count, len(self._pool)),
                strict=True,
            )
            batches += [kind(tokens, num_decodes) for tokens, num_decodes in sizes]
        order = self._rng.permutation(len(batches))
        return Round(pool=self._pool, batches=tuple(batches[i] for i in order))

    def _spread(self, count: int, most: int) -> list[int]:
        """Sizes 1 to `most`, one in each of `count` strata of equal width in the logarithm."""
        at = (self._rng.permutation(count) + self._rng.random(count)) / max(count, 1)
        return [min(int(x), most) for x in np.exp(at * np.log(most + 1))]

    def _decode(self, tokens: int, num_decodes: int) -> DesignedBatch:
        return DesignedBatch(decodes=self._some(num_decodes))

    def _prefill(self, tokens: int, num_decodes: int) -> DesignedBatch:
        return DesignedBatch(prefills=self._chunks(tokens, cached=False))

    def _cached_prefill(self, tokens: int, num_decodes: int) -> DesignedBatch:
        return DesignedBatch(prefills=self._chunks(tokens, cached=True))

    def _mixed(self, tokens: int, num_decodes: int) -> DesignedBatch:
        tokens = max(min(tokens, self._max_tokens - num_decodes), 1)
        chunks = self._chunks(tokens, cached=bool(self._rng.integers(2)))
        return DesignedBatch(prefills=chunks, decodes=self._some(num_decodes))

    def _some(self, num: int) -> tuple[int, ...]:
        """Of the pool: any, or as often some whose contexts are alike. Among any, the longest grows
        with the mean, so that nothing would tell what either costs."""
        if self._rng.integers(2):
            first = int(self._rng.integers(len(self._pool) - num + 1))
            by_context = sorted(range(len(self._pool)), key=self._pool.__getitem__)
            return tuple(sorted(by_context[first : first + num]))
        return tuple(sorted(self._rng.choice(len(self._pool), num, replace=False).tolist()))

    def _chunks(self, tokens: int, *, cached: bool) -> tuple[DesignedPrefill, ...]:
        most = min(MOST_PREFILLS, self._limits.num_beside // 2 or 1)
        count = min(int(self._rng.choice([1, 1, 2, MOST_PREFILLS])), most, tokens)
        cuts = np.sort(self._rng.choice(np.arange(1, tokens), count - 1, replace=False))
        chunks = []
        for num_new in np.diff([0, *cuts, tokens]).tolist():
            prefix = int(self._rng.integers(len(self._pool)))
            num_new = min(num_new, self._limits.max_context)
            most_cached = min(self._pool[prefix], self._limits.max_context - num_new)
            num_cached = 0
            if cached:
                num_cached = int(self._rng.integers(most_cached // 2, most_cached + 1))
                num_cached -= num_cached % self._limits.page_size
            chunks.append(DesignedPrefill(num_new=num_new, num_cached=num_cached, prefix=prefix))
        return tuple(chunks)
