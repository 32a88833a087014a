"""A policy by name, with what it needs of the rest of cosched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cosched.memory.config import KvConfig
from cosched.pool.prefix_pool import PoolConfig
from cosched.predict.length_estimator import LengthConfig
from cosched.schedule.base import Policy, PolicySettings

MIXED_CHUNK: Mapping[str, object] = {"enable_mixed_chunk": True}

MOST_FIT = LengthConfig(coverage=0.75)
"""Memory by lengths need not cover each of them: what one request takes too much another one gives
back early. EcoServe's predictions cover as many (§2.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One named policy.

    summary       one line for ``--help``
    source        where it comes from
    make          builds it for an engine; None: the engine's own scheduler decides
    pool          order of waiting offline requests, unless the configuration says; None: arrival
    kv            which KV goes first and how much is kept for online requests, unless the
                  configuration says (`eviction` and `reservation` alone count; absent: cosched's)
    tolerates     it keeps the slowdown of online requests within `Config.tolerance`
    groups        it plans ranks that step together (DP attention) and the microbatches of a
                  pipeline: it is a `GroupPolicy`
    timed         its plans depend on time: the latency predictor is kept up to date, and all ranks
                  use one clock
    early         an iteration is planned as soon as the one before it runs (`Config.plan_early`)
    length        how reply lengths are estimated, unless the configuration says
    predictor     the form of its predictor (`cosched.predict.fitted`), fitted to the points of a
                  profile, which it needs, and not corrected by what is measured later; None:
                  cosched's, which learns
    section       name of the section of the configuration that is its own (`PolicySettings.own`)
    server_flags  SGLang server arguments it needs, by field name
    source_file   of a policy of another package: the file with its code
    """

    name: str
    summary: str
    source: str
    make: Callable[[PolicySettings], Policy[Any]] | None = None
    pool: PoolConfig | None = None
    kv: KvConfig = field(default_factory=KvConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    timed: bool = False
    early: bool = False
    tolerates: bool = False
    groups: bool = False
    predictor: str | None = None
    section: str | None = None
    server_flags: Mapping[str, object] = field(default_factory=dict)
    source_file: str | None = None

    def arguments(self) -> dict[str, list[str]]:
        """`server_flags` as a command line: flag -> the flag and its value."""
        arguments = {}
        for name, value in self.server_flags.items():
            flag = "--" + name.replace("_", "-")
            arguments[flag] = [flag] if value is True else [flag, str(value)]
        return arguments
