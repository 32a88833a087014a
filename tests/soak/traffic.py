"""Who sends what: clients as generators that sleep, send and abort.

Every choice is drawn from a generator of its own, named after the seed, the request and the
feature: leaving out a feature or a request changes nothing else, so that a failure can be narrowed
down.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from cosched.wire import OFFLINE_PRIORITY, PARAMS_KEY
from tests.soak.spec import SoakSpec

ADAPTERS = ("A", "B", "C")
MOMENTS = ("sent", "waiting", "prefilling", "decoding", "held", "preempted")
"""When a request may be aborted."""

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")

_TOKENS = range(10, 2040)  # of the tiny model's 2,048, without the special ones
_REGEX = "[a-z]{3,30}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    sampling       SGLang's sampling parameters
    logprob_start  log probabilities from this position on, -1: of the output; None: none
    abort          moment and how many iterations after it first came; None: never
    """

    rid: str
    tokens: array[int]
    offline: bool
    priority: int | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprob_start: int | None = None
    adapter: str | None = None
    session: str | None = None
    stream: bool = True
    abort: tuple[str, int] | None = None

    def is_repeatable(self, *, overlap: bool) -> bool:
        """Whether the same request alone gives the same output. Under the overlap scheduler a
        penalty does not count the latest token where that is still on its way."""
        if overlap and any(name in self.sampling for name in (*PENALTIES, "min_new_tokens")):
            return False
        return self.session is None and "beam_width" not in self.sampling


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send these and go on when all of them have ended."""

    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Post:
    """Send these and go on."""

    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Command:
    """Anything else: ``abort`` (of a rid or a prefix of several), ``abort_all``, ``flush``,
    ``pause``, ``continue``, ``open``, ``open_streaming``, ``close``, ``query``."""

    name: str
    argument: str = ""


Action = Sleep | Send | Post | Command
Client = Generator[Action, dict[str, list[int]], None]
"""Gets the outputs of what it sent, by rid."""


class Traffic:
    """The clients of a soak."""

    def __init__(self, spec: SoakSpec) -> None:
        self.spec = spec
        self._documents = [
            self._random_tokens(self._rng("document", index), length)
            for index, length in enumerate((10, 16, 33, 64, 100, 128, 190, 256, 300, 420, 600))
        ]

    def episode(self, index: int) -> list[Client]:
        """The clients of one stretch of traffic."""
        rng = self._rng("episode", index)
        seconds = rng.choice((0.1, 1.0, 5.0))
        kinds: dict[str, tuple[float, Callable[[str, Random], Client]]] = {
            "": (3, self._single),
            "chat": (3, self._chat),
            "job": (3, self._job),
            "restart": (1, self._restart),
            "n": (1, self._parallel),
            "sessions": (0.7, partial(self._session, opened_by="open")),
            "stream-sessions": (0.7, partial(self._session, opened_by="open_streaming")),
            "abort-all": (0.1, self._abort_all),
            "flush": (0.3, self._flush),
            "pause": (0.3, self._pause),
            "queries": (0.4, self._query),
        }
        weights = [weight for weight, _ in kinds.values()]
        clients = []
        for number in range(rng.randint(4, 14)):
            key = f"e{index:04d}-c{number:02d}"
            (feature,) = rng.choices(list(kinds), weights)
            start_s = rng.choice((0.0, rng.uniform(0, seconds)))
            if not feature or self.spec.has(feature):
                client = kinds[feature][1](key, self._rng(key))
                clients.append(_later(start_s, client))
        return clients

    def _single(self, key: str, rng: Random) -> Client:
        """A burst of requests of one class that have little in common."""
        offline = rng.random() < 0.4
        burst = rng.choice((1, 1, 3, 15))
        yield Send([self._ask(f"{key}-{i:03d}", self._prompt(rng), offline) for i in range(burst)])

    def _chat(self, key: str, rng: Random) -> Client:
        history = self._prompt(rng)
        for turn in range(rng.randint(1, 5)):
            ask = self._ask(f"{key}-{turn:03d}", history, offline=False)
            outputs = yield Send([ask])
            history = array("q", [*ask.tokens, *outputs[ask.rid], *self._some(rng, 1, 40)])
            if len(history) > self.spec.capacity // 2:
                return
            yield Sleep(rng.expovariate(1 / 1.5))

    def _job(self, key: str, rng: Random) -> Client:
        asks = self._job_asks(key, rng)
        window = rng.choice((4, len(asks)))
        for first in range(0, len(asks), window):
            yield Send(asks[first : first + window])

    def _job_asks(self, key: str, rng: Random) -> list[Ask]:
        head = rng.choice(self._documents)
        ways = [[*head, *self._some(rng, 1, 80)] for _ in range(3)]
        return [
            self._ask(
                f"{key}-{i:03d}", array("q", [*rng.choice(ways), *self._some(rng, 1, 40)]), True
            )
            for i in range(rng.randint(3, 30))
        ]

    def _restart(self, key: str, rng: Random) -> Client:
        asks = self._job_asks(key + "a", rng)
        if rng.random() < 0.5:
            asks = [replace(ask, offline=False, priority=0) for ask in asks]
        yield Post(asks)
        yield Sleep(rng.choice((0.0, 0.02, rng.uniform(0, 1.5))))
        if rng.random() < 0.5:
            yield Command("abort", key + "a")
        else:
            for ask in asks:
                yield Command("abort", ask.rid)
        yield Sleep(rng.choice((0.0, 0.01, 0.5)))
        yield Send([replace(ask, rid=key + "b" + ask.rid.removeprefix(key + "a")) for ask in asks])

    def _parallel(self, key: str, rng: Random) -> Client:
        """As the tokenizer process serves ``n``: the prompt alone, then every reply."""
        first = self._ask(f"{key}-000", self._prompt(rng), rng.random() < 0.5)
        if "beam_width" in first.sampling:
            return
        warm = dict(first.sampling) | {"max_new_tokens": 0, "min_new_tokens": 0}
        yield Send([replace(first, sampling=warm, stream=False)])
        yield Send([replace(first, rid=f"{key}-{i:03d}") for i in range(1, rng.randint(3, 6))])

    def _session(self, key: str, rng: Random, *, opened_by: str) -> Client:
        yield Command(opened_by, key)
        offline = rng.random() < 0.4
        for turn in range(rng.randint(1, 4)):
            ask = self._ask(f"{key}-{turn:03d}", array("q", self._some(rng, 1, 120)), offline)
            if "beam_width" in ask.sampling:
                continue
            yield Send([replace(ask, session=key, logprob_start=None)])
            yield Sleep(rng.choice((0.0, 0.3)))
        yield Command("close", key)

    def _abort_all(self, key: str, rng: Random) -> Client:
        yield Command("abort_all")

    def _flush(self, key: str, rng: Random) -> Client:
        for _ in range(rng.randint(1, 4)):
            yield Command("flush")
            yield Sleep(rng.uniform(0, 2))

    def _pause(self, key: str, rng: Random) -> Client:
        yield Command("pause", rng.choice(("in_place", "retract")))
        yield Sleep(rng.choice((0.0, 0.05, 1.0)))
        if rng.random() < 0.3 and self.spec.has("flush"):
            yield Command("flush")
        yield Command("continue")

    def _query(self, key: str, rng: Random) -> Client:
        for _ in range(5):
            yield Command("query")
            yield Sleep(rng.uniform(0, 1))

    def _ask(self, rid: str, tokens: array[int], offline: bool) -> Ask:
        """A request with whatever features fall to it."""
        rng = self._rng(rid)
        sampling: dict[str, Any] = {
            "max_new_tokens": rng.choice((1, 2, rng.randint(3, 30), rng.randint(20, 120))),
            "ignore_eos": True,
        }
        ask = Ask(
            rid=rid,
            tokens=tokens,
            offline=offline,
            priority=OFFLINE_PRIORITY if offline else None,
            stream=rng.random() < 0.7,
        )
        changes: dict[str, Any] = {}
        for feature, share in SHARES.items():
            of_feature = self._rng(rid, feature)
            if of_feature.random() < share and self.spec.has(feature):
                changes |= _add(feature, of_feature, ask, sampling, self.spec)
        if sampling.get("beam_width"):
            changes |= {"adapter": None, "logprob_start": None, "stream": False}
            sampling.pop("regex", None)
        return replace(ask, sampling=sampling, **changes)

    def _prompt(self, rng: Random) -> array[int]:
        shape = rng.random()
        if shape < 0.05:
            return array("q", self._some(rng, 1, 1))
        if shape < 0.15:
            # Two tokens: prompts that share prefixes by chance.
            return array("q", rng.choices((10, 11), k=rng.randint(1, 40)))
        head = rng.choice(self._documents) if shape < 0.7 else array("q")
        if shape < 0.2:
            return head
        return array("q", [*head, *self._some(rng, 1, rng.choice((5, 60, 200)))])

    def _some(self, rng: Random, least: int, most: int) -> array[int]:
        return self._random_tokens(rng, rng.randint(least, most))

    @staticmethod
    def _random_tokens(rng: Random, number: int) -> array[int]:
        return array("q", rng.choices(_TOKENS, k=number))

    def _rng(self, *key: object) -> Random:
        return Random("/".join(map(str, (self.spec.seed, *key))))


def _later(seconds: float, client: Client) -> Client:
    yield Sleep(seconds)
    yield from client


SHARES: Mapping[str, float] = {
    "stop": 0.1,
    "too-long": 0.01,
    "min-tokens": 0.05,
    "penalties": 0.1,
    "logprobs": 0.1,
    "lora": 0.15,
    "grammar": 0.04,
    "priorities": 0.1,
    "targets": 0.1,
    "beam": 0.02,
    "abort": 0.15,
}
"""The share of requests that each feature falls to. Later ones see what earlier ones did."""


def _add(
    feature: str, rng: Random, ask: Ask, sampling: dict[str, Any], spec: SoakSpec
) -> dict[str, Any]:
    """Change `sampling`, and return the changes of other fields."""
    match feature:
        case "abort":
            return {"abort": (rng.choice(MOMENTS), rng.choice((0, 0, 1, 2, 5, 20)))}
        case "beam" if spec.page_size == 1:
            sampling["beam_width"] = rng.choice((2, 3))
        case "grammar":
            sampling |= {"regex": _REGEX, "ignore_eos": False}
        case "logprobs":
            return {"logprob_start": rng.choice((-1, -1, 0, rng.randint(0, len(ask.tokens))))}
        case "lora":
            return {"adapter": rng.choice(ADAPTERS)}
        case "min-tokens":
            sampling["min_new_tokens"] = rng.randint(0, sampling["max_new_tokens"])
        case "penalties":
            kind = rng.choice(PENALTIES)
            sampling[kind] = 1.3 if kind == "repetition_penalty" else rng.choice((-0.5, 0.1, 1.5))
        case "priorities":
            online, offline = (0, 1, 10**6), (-1, -50, -(10**6))
            return {"priority": rng.choice(offline if ask.offline else online)}
        case "stop":
            sampling |= {"stop_token_ids": rng.sample(_TOKENS, 150), "ignore_eos": False}
        case "targets":
            names = rng.sample(("ttft_slo_ms", "tpot_slo_ms", "deadline_s"), rng.randint(1, 3))
            chosen = {name: rng.choice((1e-3, 1.0, 8.0, 100.0, 1e4, 1e9)) for name in names}
            sampling["custom_params"] = {PARAMS_KEY: chosen}
        case "too-long" if rng.random() < 0.4:
            sampling["max_new_tokens"] = rng.choice((spec.capacity // 2, spec.capacity, 10**6))
            return {"abort": ("decoding", rng.choice((100, 400)))}
        case "too-long":
            length = spec.capacity + rng.choice((-spec.page_size, -10, -6, -5, -1, 0, 1, 1000))
            return {"tokens": array("q", rng.choices(_TOKENS, k=length))}
    return {}
