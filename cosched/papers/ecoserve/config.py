"""What EcoServe leaves to the operator: section `ecoserve` of the configuration."""

from __future__ import annotations

import msgspec

from cosched.errors import ConfigError, choices


class EcoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are the paper's, or between its values where it has several.

    reserve    share of the KV memory kept for prompts and for outputs longer than expected (§2.2,
               §4)
    buffer     share of its length by which a hosted request should end before its host needs the
               memory (§4)
    overrun    a request longer than expected: reserve: takes of the reserve; free: waits, its KV
               kept; offload: is preempted, its KV copied to host memory (§2.3, Fig. 5)
    replan_on  generation tasks are chosen when all of a group have ended (group, §3.2.2) or one has
               (request)
    block      tokens by which lengths count as equal (§2.1)
    slo_scale  deadline of a request that names none, in multiples of its time on an idle device
    (§4)
    """

    reserve: float = 0.03
    buffer: float = 0.15
    overrun: str = "reserve"
    replan_on: str = "group"
    block: int = 32
    slo_scale: float = 2.0

    def __post_init__(self) -> None:
        for name, most in (("reserve", 1.0), ("buffer", 10.0)):
            value = getattr(self, name)
            if not 0 <= value < most:
                raise ConfigError(f"ecoserve.{name} {value} is not from 0 to below {most:g}")
        for name, known in (("overrun", OVERRUNS), ("replan_on", REPLANS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"ecoserve.{name} {value!r} is unknown: {choices(known)}")
        if self.block < 1:
            raise ConfigError(f"ecoserve.block {self.block} is below 1")
        if not 0 < self.slo_scale < float("inf"):
            raise ConfigError(f"ecoserve.slo_scale {self.slo_scale} is not a positive number")


OVERRUNS = ("reserve", "free", "offload")
REPLANS = ("group", "request")
