"""How reply lengths are estimated: the key ``length`` of the configuration."""

from __future__ import annotations

import msgspec

from cosched.errors import ConfigError, choices

MODES = ("histogram", "limit", "oracle", "oracle-noise")


class LengthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the output that a request has still to generate is estimated.

    mode       histogram: from the lengths of earlier similar requests; limit: the most it may
               generate, nothing is learned; oracle: its hint, taken as exact; oracle-noise: its
               hint with an error of known size, for experiments
    coverage   share of the requests that are to end within the upper estimate
    padding    the upper estimate is the median plus this share of it instead (EcoServe §2.3: 0.10,
               0.15, 0.20)
    hints      use ``output_tokens_hint`` as far as hints have been accurate; the oracles always do
    window     newest lengths kept for each group of similar requests
    max_cells  groups of similar requests that are kept; the least recently used one goes first
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
        """Finished requests are learned from."""
        return self.mode == "histogram"

    @property
    def needs_hints(self) -> bool:
        """Only hints are used: a simulation must give the true lengths."""
        return self.mode in ("oracle", "oracle-noise")
