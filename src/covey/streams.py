"""Counter-based random streams: a number depends on its name, never on what was drawn before it.

A request's seed is named by (run seed, step, task, attempt, turn), its t-th number by t. So a resumed run draws what
the uninterrupted one would have drawn, and a request draws the same whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
import random
from hashlib import blake2b


def stream_seed(*name: object) -> int:
    """A 63-bit seed from any printable name."""
    digest = hashlib.blake2b("\x1f".join(map(str, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, position: int) -> float:
    """The position-th number of a stream, in [0, 1) with 53 random bits."""
    name = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 11) * 2.0**-53


# -- Random streams that depend on nothing but their name --------------------------------------------------------------


def stream(*name: object) -> random.Random:
    """The stream called `name`. Unlike `hash`, a digest is the same in every process."""
    digest = blake2b(repr(name).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))
