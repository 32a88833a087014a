"""How lengths of responses are estimated: the key ``length`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cosched.errors import ConfigError, choices

__all__ = ["MODES", "LengthConfig"]

MODES: Mapping[str, str] = {
    "histogram": "lengths of earlier requests that are like it",
    "learned": "these, corrected by what the tokens of the prompt say",
    "limit": "the most it may generate; nothing is learned",
    "oracle": "its hint, taken for the truth; the limit without one",
    "oracle-noise": "its hint, with an error of known size; for experiments",
}
"""Mode -> what an estimate is made of."""


class LengthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is believed of the output that a request is still to generate.

    mode       histogram: lengths of earlier requests that are like it; learned: corrected by what
               the tokens of the prompt say; limit: the most it may generate, nothing is learned;
               oracle: its hint, taken for the truth; oracle-noise: with an error of known size
    coverage   share of the requests that are to end within the upper estimate
    padding    the upper estimate is so much above the median one instead (EcoServe §2.3: 0.10,
               0.15, 0.20)
    hints      believe ``output_tokens_hint`` as far as hints have been right; the oracles always do
    window     lengths that are kept of requests of one likeness; the oldest goes for a new one
    max_cells  likenesses that are kept; the one unused for longest goes for a new one
    sigma      of oracle-noise: standard deviation of the logarithm of its error
    """

    mode: str = "histogram"
    coverage: float = 0.95
    padding: float | None = None
    hints: bool = True
    window: int = 128
    max_cells: int = 8192
    sigma: float = 0.23

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"length.mode {self.mode!r} is unknown: {choices(MODES)}")
        if not 0.5 < self.coverage < 1:
            raise ConfigError(f"length.coverage must be above 0.5 and below 1, not {self.coverage}")
        for name in ("padding", "sigma"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"length.{name} must be 0 or more, not {value}")
        for name in ("window", "max_cells"):
            value = getattr(self, name)
            if value < 8:
                raise ConfigError(f"length.{name} must be 8 or more, not {value}")

    @property
    def learns(self) -> bool:
        """Finished requests are looked at."""
        return self.mode in ("histogram", "learned")

    @property
    def needs_hints(self) -> bool:
        """It knows nothing else: a simulation must tell the true lengths."""
        return self.mode in ("oracle", "oracle-noise")
