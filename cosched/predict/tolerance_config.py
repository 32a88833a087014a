"""What is promised, as the operator writes it."""

from __future__ import annotations

import re

import msgspec

from cosched.errors import ConfigError, choices

TOLERANCE_METAVAR = "ttft=5%,tpot=5%"
TOLERANCE_HELP = (
    "mean and p99 of online requests stay so close to what these would have alone, for cosched and "
    "its ablations (docs/policies/cosched.md); either key may be left out"
)

MOST = 10.0
"""The largest share: eleven times as long."""


class ToleranceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what share mean and p99 of the online requests may be above what these would have alone
    (docs/policies/cosched.md); absent: nothing is promised of it.

    ttft  of the time to the first token; 0.05 is 5 %
    tpot  of the time per output token after it
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value <= MOST:
                raise ConfigError(
                    f"tolerance.{name} {value} is not a share above 0 and up to {MOST:g} "
                    "(0.05 is 5 %)"
                )


def parse_tolerance(text: str) -> ToleranceConfig:
    """``ttft=5%,tpot=5%``, either of the two or both. ConfigError naming what is wrong with it."""
    known = ToleranceConfig.__struct_fields__
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, is_given, value = (piece.strip() for piece in part.partition("="))
        if name not in known or not is_given:
            raise ConfigError(
                f"tolerance {text!r}: {part.strip()!r} is not KEY=SHARE%; the keys are "
                f"{choices(known)}"
            )
        if name in shares:
            raise ConfigError(f"tolerance {text!r}: {name!r} is given twice")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?%", value):
            raise ConfigError(
                f"tolerance {text!r}: {name} {value!r} is not a percentage such as 5% or 2.5%"
            )
        percent = float(value[:-1])
        if not 0 < percent <= 100 * MOST:
            raise ConfigError(
                f"tolerance {text!r}: {name} {value!r} is not above 0% and up to {100 * MOST:g}%"
            )
        shares[name] = percent / 100
    return ToleranceConfig(**shares)
