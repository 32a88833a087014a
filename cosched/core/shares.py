"""Who shares offline work with whom: API keys by their weights, and in each its tenants by theirs.

A *share path* leads from the API key to the tenant: ``(KEY, TENANT)``. Keys that the operator has
not named are one key, since clients can make them up; in it the owners of files and batches are
told apart where they are known: ``("", OWNER, TENANT)``. So neither names of tenants nor made-up
keys get anyone more than the share of one key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Share", "SharePath", "share_of", "share_path"]

SharePath = tuple[str, ...]


class Share(NamedTuple):
    """path, and of each name in it the weight among its siblings."""

    path: SharePath
    weights: tuple[float, ...]


def share_path(name: str, owner: str = "") -> SharePath:
    """name: ``KEY/TENANT`` or ``KEY``, empty where the key has no name. owner: of a key without
    one, or empty."""
    key, _, tenant = name.partition("/")
    return (key, tenant) if key else ("", owner, tenant)


def share_of(path: SharePath, weights: Mapping[str, float]) -> Share:
    """weights: ``KEY`` or ``KEY/TENANT`` -> weight, and ``TENANT`` of keys without a name; others
    have 1. A tenant's name says nothing about its key: a client chooses it."""
    key, tenant = path[0], path[-1]
    of_key = weights.get(key, 1.0) if key else 1.0
    of_tenant = weights.get(f"{key}/{tenant}" if key else tenant, 1.0) if tenant else 1.0
    return Share(path, (of_key, *[1.0] * (len(path) - 2), of_tenant))
