"""How KV memory is managed: the key ``kv`` of the configuration."""

from __future__ import annotations

import msgspec

from cosched.errors import ConfigError

ENGINE_ORDERS = ("lru", "slru", "priority")
"""SGLang's own, by its names (``--radix-eviction-policy``). All: `cosched.policies`."""


class KvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is evicted first, and what offline work may take.

    eviction        value: least expected value per token first; echo: the order of Echo §4.2; lru,
                    slru, priority: SGLang's; absent: the policy's own
    reservation     what is kept for online requests. cosched: mean and deviations of their demand,
                    in which contexts count that are expected back, and at least that of now; off:
                    nothing; echo: mean and deviations of what they held (Echo §5.3); echo-arrivals:
                    by the predicted rate of arrivals (Echo §7.4); absent: the policy's own
    deviations      of a reservation, above the mean
    window_s        of a reservation, over which it is measured [s]; absent: 300, of Echo's 3600
    recompute_share share of the device's time that recomputing after preemptions may take; beyond
                    it no offline request is admitted beside a running one
    late_weight     weight of a second that makes an online request miss its target
    horizon_s       within which an expected return counts as demand [s]
    half_life_s     after which an observed return counts half [s]
    host_bandwidth_gb_s  of copies to host memory and back [GB/s per GPU]
    bidirectional_pages  an online and an offline request may share their last page (BROS §5.1)
    """

    eviction: str | None = None
    reservation: str | None = None
    deviations: float = 2.0
    window_s: float | None = None
    recompute_share: float = 0.25
    late_weight: float = 4.0
    horizon_s: float = 120.0
    half_life_s: float = 3600.0
    host_bandwidth_gb_s: float = 20.0
    bidirectional_pages: bool = False

    def __post_init__(self) -> None:
        for name in ("deviations", "late_weight"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"kv.{name} must be 0 or more, not {value}")
        if not 0 < self.recompute_share <= 1:
            raise ConfigError(
                f"kv.recompute_share must be above 0 and at most 1, not {self.recompute_share}"
            )
        for name in ("window_s", "horizon_s", "half_life_s", "host_bandwidth_gb_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                unit = "GB/s" if name.endswith("_gb_s") else "seconds"
                raise ConfigError(f"kv.{name} must be a positive number of {unit}, not {value}")

    @property
    def is_ours(self) -> bool:
        """The order is cosched's, and not the engine's. Of a configuration that names one
        (`cosched.config.Config.named_kv`)."""
        assert self.eviction is not None, "no order is named"
        return self.eviction not in ENGINE_ORDERS
