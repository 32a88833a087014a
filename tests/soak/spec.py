"""What a soak is of: everything that decides what happens in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from cosched.errors import ConfigError, choices
from cosched.policies import POLICIES, policy_entry

EPISODES_PER_HOUR = 6
"""Stretches of traffic; the rest of the hour is idle."""

FEATURES: Mapping[str, str] = {
    "abort": "requests aborted at a chosen moment: waiting, prefilling, decoding, held, preempted",
    "abort-all": "everything aborted at once",
    "beam": "beam search (page size 1)",
    "chat": "conversations whose turns begin with all that was said before",
    "flush": "the prefix cache flushed at random moments",
    "grammar": "outputs bound to a regular expression",
    "hiccups": "single iterations that take fifty times as long",
    "job": "offline jobs whose prompts begin alike",
    "logprobs": "log probabilities of outputs, and of prompts from some position on",
    "lora": "three adapters, two of which fit into a batch",
    "min-tokens": "outputs of a least length",
    "n": "several replies to one prompt",
    "pause": "the engine paused in place and by retraction, and continued",
    "penalties": "frequency, presence and repetition penalties",
    "priorities": "priorities other than those of the classes",
    "queries": "load reports and internal state read at random moments",
    "restart": "clients that drop all their requests and send them again under other ids",
    "sessions": "sessions whose requests continue one another",
    "stop": "stop tokens and end of text",
    "stream-sessions": "sessions that keep their KV",
    "targets": "targets per request, some of them absurd, and deadlines",
    "too-long": "prompts and outputs that exceed the KV pool or the context",
}
"""Kinds of traffic that can be left out. Leaving one out changes nothing in the others."""

NEEDS_MODEL = frozenset({"beam", "grammar", "logprobs"})
"""Features that need a model's probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSpec:
    """Equal specifications run alike, iteration by iteration.

    conservativeness  ``--schedule-conservativeness``; below 1 the engine overcommits its memory
    kv_tokens         capacity of the KV pool, whole pages; None: 2,048 or 40 pages
    slots, chunk      ``--max-running-requests``, ``--chunked-prefill-size``
    ttft_ms, tpot_ms  targets of online requests; an iteration takes 4 ms and more
    shared_pages      ``kv.bidirectional_pages``
    compute           the tiny model runs; else tokens are made up: faster, without KV
                      contents, adapters' weights and `NEEDS_MODEL`
    without           features left out
    episodes          only these; None: all of the hours
    """

    seed: int = 0
    hours: float = 10.0
    policy: str = "hygen"
    page_size: int = 16
    overlap: bool = True
    mixed: bool = True
    conservativeness: float = 1.0
    kv_tokens: int | None = None
    slots: int = 8
    chunk: int = 128
    ttft_ms: float = 150.0
    tpot_ms: float = 6.5
    shared_pages: bool = False
    compute: bool = True
    without: tuple[str, ...] = ()
    episodes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        policy_entry(self.policy)
        unknown = set(self.without) - FEATURES.keys()
        if unknown:
            raise ConfigError(f"no feature {min(unknown)!r}; choose from {choices(FEATURES)}")
        for name in ("hours", "page_size", "conservativeness", "slots", "chunk"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    def has(self, feature: str) -> bool:
        assert feature in FEATURES, feature
        return feature not in self.without and (self.compute or feature not in NEEDS_MODEL)

    @property
    def capacity(self) -> int:
        tokens = self.kv_tokens or max(2048, 40 * self.page_size)
        return tokens // self.page_size * self.page_size

    @property
    def num_episodes(self) -> int:
        return max(round(self.hours * EPISODES_PER_HOUR), 1)

    def arguments(self) -> list[str]:
        """The command line that runs this."""
        default = SoakSpec()
        arguments: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == getattr(default, field.name):
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, bool):
                no = "" if value else "no-"
                arguments.append(f"--{no}{field.name.replace('_', '-')}")
            elif isinstance(value, tuple):
                arguments += [flag, ",".join(map(str, value))]
            else:
                arguments += [flag, str(value)]
        return arguments

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {"kv_tokens": self.capacity}


_BROS = tuple(
    name for name, of in POLICIES.items() if name.startswith("bros") and of.predictor is None
)
_COSCHED = tuple(name for name in POLICIES if name.startswith("cosched"))
_ECO = tuple(name for name in POLICIES if name.startswith("eco"))


def _matrix() -> tuple[SoakSpec, ...]:
    return (
        SoakSpec(policy="hygen", page_size=1),
        SoakSpec(policy="hygen", page_size=16),
        SoakSpec(policy="hygen", page_size=64),
        SoakSpec(policy="hygen", page_size=1, conservativeness=0.3),
        SoakSpec(policy="hygen", page_size=64, conservativeness=0.3, overlap=False),
        SoakSpec(policy="hygen", page_size=16, mixed=False),
        SoakSpec(policy="hygen", page_size=16, conservativeness=0.3, shared_pages=True),
        SoakSpec(policy="sarathi", page_size=64, overlap=False, shared_pages=True),
        SoakSpec(policy="hygen", page_size=1, overlap=False, kv_tokens=1024, slots=4),
        SoakSpec(policy="sarathi", page_size=1),
        SoakSpec(policy="sarathi", page_size=64, conservativeness=0.3),
        SoakSpec(policy="sarathi", page_size=16, overlap=False, mixed=False),
        *(SoakSpec(policy=name, page_size=16, conservativeness=0.3) for name in _COSCHED),
        SoakSpec(policy="hygen-throttled", page_size=16),
        SoakSpec(policy="hygen-fcfs", page_size=16, conservativeness=0.3),
        SoakSpec(policy="hygen-vtc", page_size=16, conservativeness=0.3),
        SoakSpec(policy="echo-regular", page_size=16, conservativeness=0.3),
        SoakSpec(policy="echo-bs", page_size=1, overlap=False),
        SoakSpec(policy="echo-bs+e", page_size=64),
        SoakSpec(policy="echo-bs+e+s", page_size=1, conservativeness=0.3),
        *(SoakSpec(policy=name, page_size=16, conservativeness=0.3) for name in _BROS),
        *(SoakSpec(policy=name, page_size=16, conservativeness=0.3) for name in _ECO),
        SoakSpec(policy="bros", page_size=1),
        SoakSpec(policy="bros", page_size=64, overlap=False, mixed=False),
        SoakSpec(policy="echo-bs+e+s+m", page_size=16, overlap=False),
        SoakSpec(policy="priority", page_size=16),
        SoakSpec(policy="sglang", page_size=1, conservativeness=0.3),
    )


MATRIX = _matrix()
"""Page sizes, switches and all policies but those that need a profile, not all combinations; stock
scheduling for comparison."""
