"""What BROS leaves to the operator: section `bros` of the configuration."""

from __future__ import annotations

import msgspec

from cosched.errors import ConfigError


class BrosConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """token_group  tokens that are due together (§4.1; the paper names no value)"""

    token_group: int = 1

    def __post_init__(self) -> None:
        if self.token_group < 1:
            raise ConfigError(f"bros.token_group {self.token_group} is below 1")
