"""What the configuration says of API keys, whatever request, file or batch they come with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cosched.core.shares import Share, share_of, share_path
from cosched.limits.claims import ANY_KEY, KeyClaims

_OWNER_DIGITS = 8
"""Of an owner without a name, where offline work is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """Looked up by the hex digest of an API key; "" without a key.

    names       ``sha256:`` and a digest, or ``*`` -> the name of its owner
    claims      likewise -> what it may claim
    weights     as of `cosched.core.shares.share_of`
    has_owners  files and batches of keys without a name are kept apart, too
    """

    names: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, KeyClaims] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    has_owners: bool = False

    def name(self, digest: str) -> str:
        """Of the owner; empty: the configuration has none."""
        return self.names.get(f"sha256:{digest}", self.names.get(ANY_KEY, ""))

    def owner(self, digest: str) -> str:
        """What stands for an owner without a name among others of them; else ""."""
        return "" if not self.has_owners or self.name(digest) else digest[:_OWNER_DIGITS]

    def share(self, digest: str, tenant: str) -> Share:
        """Of the batches of an owner and a tenant."""
        path = share_path(f"{self.name(digest)}/{tenant}", self.owner(digest))
        return share_of(path, self.weights)

    def may_be_offline(self, digest: str) -> bool:
        """False: ``max_offline`` of the key is 0, so neither its requests nor its batches run
        offline."""
        claims = self.claims.get(f"sha256:{digest}", self.claims.get(ANY_KEY))
        return claims is None or claims.max_offline != 0

    def may_have_batches(self, owner: str) -> bool:
        """owner: digest of the first key of the owner; empty where the server does not keep keys
        apart, so that the batch may be of any."""
        return (not owner and not self.has_owners) or self.may_be_offline(owner)


NO_KEYS = ApiKeys()
