"""The configuration of a server: what ``COSCHED_CONFIG`` holds.

The environment variable ``COSCHED_CONFIG`` is JSON, or the path of a JSON file. It is what switches
cosched on: without it the plugin does nothing. Unknown keys are errors.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from cosched.batch.config import BatchesConfig
from cosched.core.request import Slo
from cosched.core.tiers import Tier
from cosched.errors import ConfigError, choices
from cosched.limits.api_keys import ApiKeys
from cosched.limits.claims import ANY_KEY, Claims
from cosched.limits.origins import AccessConfig
from cosched.memory.config import KvConfig
from cosched.papers.bros.config import BrosConfig
from cosched.papers.ecoserve.config import EcoConfig
from cosched.policies import EVICTION_NAMES, RESERVATIONS, policy_entry, without_tolerance
from cosched.pool.prefix_pool import PoolConfig
from cosched.predict.fitted import PREDICTORS
from cosched.predict.length_estimator import LengthConfig
from cosched.predict.tolerance import ToleranceConfig
from cosched.schedule.base import Budgets
from cosched.wire import SERVICE_TIERS, Bounds

ENV_VAR = "COSCHED_CONFIG"


class SloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TTFT: from the arrival to the first token. TPOT: from token to token after it, in the mean of
    a reply.

    ttft_ms  TTFT target of online requests that name none [ms]
    tpot_ms  TPOT target of online requests that name none [ms]
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of milliseconds, not {value}")

    def targets(self) -> Slo:
        return Slo(ttft_s=self.ttft_ms / 1e3, tpot_s=self.tpot_ms / 1e3)


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier of online requests (docs/policies.md). A request has the tier with the
    greatest priority that is not above its own.

    name      what `service_tier` calls it: letters, digits, ``_`` and ``-``
    priority  least priority of its requests, 0 or more; a higher one is served first
    ttft_ms   TTFT target of its requests that name none [ms]; absent: `slo`
    tpot_ms   TPOT target of its requests that name none [ms]; absent: `slo`
    share     least share of the iterations with online prefills in which its requests come first,
              while higher tiers have work
    """

    name: str
    priority: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.05

    def __post_init__(self) -> None:
        is_taken = self.name in SERVICE_TIERS and self.name not in ("default", "priority")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", self.name) or is_taken:
            raise ValueError(f"name {self.name!r} cannot be that of a tier of online requests")
        if self.priority < 0:
            raise ValueError(f"priority of tier {self.name} is below 0: {self.priority}")
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number of milliseconds, not {value}")
        if not 0 <= self.share <= 0.5:
            raise ValueError(f"share of tier {self.name} must be in [0, 0.5], not {self.share}")

    def tier(self) -> Tier:
        def seconds(value: float | None) -> float | None:
            return None if value is None else value / 1e3

        slo = Slo(ttft_s=seconds(self.ttft_ms), tpot_s=seconds(self.tpot_ms))
        return Tier(name=self.name, priority=self.priority, slo=slo, share=self.share)


class SharedPrefixConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention that reads a shared prefix once for all requests of a batch (docs/architecture.md).

    mode              auto: where SGLang's attention backend is one beside which the kernels were
                      measured (triton), on a GPU; on: a server that cannot have it does not start;
                      off: SGLang's attention alone
    inner             with ``--attention-backend cosched_shared_prefix``, SGLang's attention backend
                      for batches that share nothing; absent: fa3 on Hopper, flashinfer on Ampere
                      and Ada, triton on other GPUs
    kernels           what computes a shared batch: triton; cascade: FlashInfer's calls with merged
                      states where a batch runs without a CUDA graph (not run on a GPU; on a CPU in
                      PyTorch), triton elsewhere
    min_saved_tokens  share a batch if that saves so many reads of KV tokens in an iteration;
                      absent: by a model of the device
    device_model      file with that model, ``picker.json`` of ``scripts/gpu_profile``; absent: an
                      H200 that was measured
    """

    mode: Literal["off", "auto", "on"] = "auto"
    inner: str | None = None
    kernels: Literal["triton", "cascade"] = "triton"
    min_saved_tokens: int | None = None
    device_model: str | None = None

    def __post_init__(self) -> None:
        if self.min_saved_tokens is not None and self.min_saved_tokens < 1:
            raise ValueError(f"min_saved_tokens must be at least 1, not {self.min_saved_tokens}")


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How large a request may be before it is read (docs/api.md).

    chars_per_token  most characters of a text per token of the context
    body_mb          most that the JSON body of a request may have [MB of 1,000,000 bytes]; absent:
                     4, plus 64 bytes per token of the context, plus 64 MB where the model takes
                     images, sound or video
    """

    chars_per_token: int = 16
    body_mb: float | None = None

    def __post_init__(self) -> None:
        if self.chars_per_token < 1:
            raise ValueError(f"chars_per_token must be at least 1, not {self.chars_per_token}")
        if self.body_mb is not None and not 0 < self.body_mb < float("inf"):
            raise ValueError(f"body_mb must be above 0, not {self.body_mb}")

    def body_bytes(self, *, context_len: int, has_media: bool) -> int:
        """Most bytes of a body, for a model with that context."""
        if self.body_mb is not None:
            return int(self.body_mb * 1e6)
        return 4_000_000 + 64 * context_len + (64_000_000 if has_media else 0)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of ``COSCHED_CONFIG``.

    policy             name of the policy (docs/policies.md)
    slo                targets of online requests that name none
    tiers              tiers of online requests (docs/policies.md); absent: all have one
    claims             class and targets that requests may claim, by API key too (docs/api.md)
    limits             how large a request may be before it is read (docs/api.md)
    access             browsers that may use the server without an API key (docs/operate.md)
    pool               order of the offline pool, for policies that keep it in prefix order; absent:
                       the policy's own
    latency_budget_ms  most predicted time of an iteration while an online request runs or waits in
                       time [ms]; absent: derived from the targets
    budgets            how iteration times are derived from the targets
    tolerance          by how much online requests may be slower than alone, for cosched and its
                       ablations (docs/policies.md); absent: only targets count
    kv                 what is evicted first, and what offline work may take (docs/architecture.md)
    length             how reply lengths are predicted (`cosched.predict.length_estimator`); absent:
                       the policy's own
    bros               what BROS leaves to the operator, for the policies of that name
    ecoserve           what EcoServe leaves to the operator, for the policies of that name
    offline_rate       most offline requests admitted per second, for hygen-throttled; absent: any
                       number
    latency_model      profile of this engine (``python -m cosched.profile measure``) that
                       predictors start from; absent: they learn while they run
    predictor          form of a paper's predictor (docs/architecture.md), fitted to latency_model;
                       absent: the policy's own
    strict             an error of cosched's own ends the server instead of being planned around;
                       for tests and simulations
    predictor_error    for experiments: standard deviation of a random factor on all predictions of
                       a plan, 0 to 1 (docs/architecture.md)
    plan_early         plan an iteration as soon as the one before it runs, not at the last moment
                       (docs/architecture.md)
    decision_log       file for every decision, read by ``cosched explain`` (docs/operate.md)
    decision_log_mb    most that its parts take together [MB]
    max_offline_waiting  most offline requests that wait; further ones get HTTP 429 and Retry-After;
                       absent: any number
    drain_s            after SIGTERM, most seconds that online requests under way may take; offline
                       requests are aborted at once (503)
    batches            OpenAI's Files and Batches on the server itself (docs/api.md)
    shared_prefix      attention that reads a shared prefix once for all requests of a batch
                       (docs/architecture.md)

    latency_budget_ms, budgets and latency_model are read by policies with a latency budget; those
    with a token budget ignore them.
    """

    policy: str = "cosched"
    slo: SloConfig = SloConfig()
    tiers: tuple[TierConfig, ...] = ()
    claims: Claims = Claims()
    limits: LimitsConfig = LimitsConfig()
    access: AccessConfig = AccessConfig()
    pool: PoolConfig | None = None
    latency_budget_ms: float | None = None
    budgets: Budgets = Budgets()
    tolerance: ToleranceConfig | None = None
    kv: KvConfig = KvConfig()
    length: LengthConfig | None = None
    bros: BrosConfig = BrosConfig()
    ecoserve: EcoConfig = EcoConfig()
    offline_rate: float | None = None
    latency_model: str | None = None
    predictor: str | None = None
    strict: bool = False
    predictor_error: float = 0.0
    plan_early: bool = False
    decision_log: str | None = None
    decision_log_mb: float = 256.0
    max_offline_waiting: int | None = None
    drain_s: float = 30.0
    batches: BatchesConfig = BatchesConfig()
    shared_prefix: SharedPrefixConfig = SharedPrefixConfig()

    def __post_init__(self) -> None:
        entry = policy_entry(self.policy)
        if self.decision_log is not None and entry.make is None:
            raise ValueError(f"decision_log: policy {self.policy!r} leaves all decisions to SGLang")
        if self.max_offline_waiting is not None:
            if entry.make is None:
                raise ValueError(f"max_offline_waiting: policy {self.policy!r} keeps no pool")
            if self.max_offline_waiting < 1:
                raise ValueError(
                    f"max_offline_waiting must be at least 1, not {self.max_offline_waiting}"
                )
        if self.tolerance is not None and not entry.tolerates:
            raise ValueError(without_tolerance(self.policy))
        if not 0 <= self.drain_s < float("inf"):
            raise ValueError(f"drain_s must be 0 or more seconds, not {self.drain_s}")
        for name in ("latency_budget_ms", "offline_rate", "decision_log_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, not {value}")
        if self.predictor is not None:
            if self.predictor not in PREDICTORS:
                raise ValueError(
                    f"unknown predictor {self.predictor!r}; choose from {choices(PREDICTORS)}"
                )
        wanted = self.predictor or entry.predictor
        if wanted is not None and self.latency_model is None:
            raise ValueError(f"predictor {wanted!r}: it is fitted to a profile; name latency_model")
        if not 0 <= self.predictor_error <= 1:
            raise ValueError(f"predictor_error must be in [0, 1], not {self.predictor_error}")
        for name in ("name", "priority"):
            if len({getattr(tier, name) for tier in self.tiers}) < len(self.tiers):
                raise ValueError(f"tiers: two have the same {name}")
        known = {tier.name for tier in self.tiers}
        for key in self.claims.keys.values():
            for tier_name in key.tiers or ():
                if tier_name not in known:
                    raise ValueError(f"claims.keys: unknown tier {tier_name!r} in `tiers`")
        self.target_bounds()
        self.named_kv()

    def online_tiers(self) -> tuple[Tier, ...]:
        """From the highest to the lowest."""
        return tuple(sorted((one.tier() for one in self.tiers), key=lambda tier: -tier.priority))

    def target_bounds(self) -> Bounds:
        """Within what the targets of requests are taken at their word."""
        return self.claims.bounds(self.slo.targets())

    def key_names(self) -> dict[str, str]:
        """Digest of an API key, or ``*`` -> the name of its owner, in what requests cost."""
        names = {key: name for name, keys in self.batches.owners.items() for key in keys}
        for key, claims in self.claims.keys.items():
            if claims.name is not None or (key not in names and key != ANY_KEY):
                names[key] = claims.name or key.removeprefix("sha256:")[:8]
        return names

    def api_keys(self) -> ApiKeys:
        return ApiKeys(
            names=self.key_names(),
            claims=self.claims.keys,
            weights=self.batches.tenant_weights,
            has_owners=self.batches.isolates(None),
        )

    def key_digests(self) -> frozenset[str]:
        """Of all API keys that the configuration names."""
        owned = (key for keys in self.batches.owners.values() for key in keys)
        return frozenset((*self.claims.keys, *owned)) - {ANY_KEY}

    def most_running_offline(self) -> dict[str, int]:
        """Name of an API key's owner -> most of its offline requests that run at a time."""
        names = self.key_names()
        limits = [
            (names.get(key, ""), claims.max_running_offline)
            for key, claims in self.claims.keys.items()
        ]
        found: dict[str, int] = {}
        for name, most in limits:
            if most is not None:
                found[name] = min(most, found.get(name, most))
        return found

    def named_kv(self) -> KvConfig:
        """`kv` with order of eviction and reservation named: the policy's own unless others are
        given."""
        own = policy_entry(self.policy).kv
        order = self.kv.eviction or own.eviction or "value"
        reservation = self.kv.reservation or own.reservation or "cosched"
        for name, value, known in (
            ("eviction", order, EVICTION_NAMES),
            ("reservation", reservation, RESERVATIONS),
        ):
            if value not in known:
                raise ConfigError(f"kv.{name} {value!r} is unknown: {choices(known)}")
        return msgspec.structs.replace(self.kv, eviction=order, reservation=reservation)

    def named_pool(self) -> PoolConfig | None:
        """`pool` with its buckets named; without it the policy's own. None: it keeps none."""
        own = policy_entry(self.policy).pool
        if self.pool is None or own is None:
            return own
        num_buckets = self.pool.num_buckets or own.num_buckets
        return msgspec.structs.replace(self.pool, num_buckets=num_buckets)

    def named_length(self) -> LengthConfig:
        """`length`: the policy's own unless another is given."""
        return self.length or policy_entry(self.policy).length

    @property
    def latency_budget_s(self) -> float | None:
        return None if self.latency_budget_ms is None else self.latency_budget_ms / 1e3

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def parse_config(text: str, *, source: str) -> Config:
    """Read a configuration from JSON. ConfigError names `source`, the key and what is wrong."""
    try:
        return msgspec.json.decode(text, type=Config)
    except (msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from None


@contextlib.contextmanager
def configured(config: Config) -> Iterator[None]:
    """Engines built inside the block run with this configuration; the environment is restored
    after it."""
    before = os.environ.get(ENV_VAR)
    os.environ[ENV_VAR] = config.to_json()
    try:
        yield
    finally:
        del os.environ[ENV_VAR]
        if before is not None:
            os.environ[ENV_VAR] = before


def planning_config() -> Config | None:
    """The configuration of this process if cosched plans here; None under ``sglang`` and
    ``priority``, where SGLang does, and when cosched is switched off."""
    config = load_config()
    return None if config is None or policy_entry(config.policy).make is None else config


def load_config(environ: Mapping[str, str] = os.environ) -> Config | None:
    """The configuration of this process, or None when cosched is switched off."""
    text = environ.get(ENV_VAR, "").strip()
    if not text:
        return None
    if text.startswith("{"):
        return parse_config(text, source=ENV_VAR)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{ENV_VAR} is neither a JSON object nor a readable file: {text!r} ({error.strerror})"
        ) from None
    return parse_config(content, source=text)
