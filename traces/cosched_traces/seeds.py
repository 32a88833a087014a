"""Seeds and segment keys that depend on names and numbers only, never on the process."""

from __future__ import annotations

import hashlib

import numpy as np

KEYS = 2**62  # keys are below; they fit a signed 64-bit integer


def key_base(*labels: str | int) -> int:
    """First key of a key space of its own: use ``base``, ``base + 1``, … as segment keys.

    Spread over `KEYS`, so that spaces of different labels do not meet: workloads are merged, and
    equal keys would share a prefix by accident.
    """
    digest = hashlib.blake2b(repr(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % KEYS


def seed_for(seed: int, *labels: str | int) -> int:
    """A seed of its own, so that two workloads made from one seed do not move in step."""
    return key_base(seed, *labels)


def rng_of(seed: int, *labels: str | int) -> np.random.Generator:
    """A generator for one purpose: a new draw elsewhere never shifts the numbers drawn here."""
    return np.random.Generator(np.random.PCG64([seed, key_base(*labels)]))
