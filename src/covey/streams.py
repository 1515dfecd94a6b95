"""Counter-based random streams: a number depends on the name of its stream and its position, not on earlier draws.

The seed of a request is named by (run seed, step, task, attempt, turn), and its t-th number by t. So a resumed run
draws what the uninterrupted run would have drawn, and a request draws the same whatever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy takes 0.1 s to import
    from numpy import ndarray


def stream_seed(*name: object) -> int:
    """A 63-bit seed from any printable name."""
    digest = blake2b("\x1f".join(map(str, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seed: int, position: int) -> float:
    """The number at a position of a stream, in [0, 1) with 53 random bits."""
    name = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def uniforms(streams: Iterable[tuple[int, int]], count: int) -> ndarray:
    """`uniform` for many streams: row n has the numbers at the n-th (seed, position) and at the next positions."""
    import numpy as np

    names = [
        name + at.to_bytes(8, "little")
        for seed, position in streams
        for name in (seed.to_bytes(8, "little"),)
        for at in range(position, position + count)
    ]
    bits = np.frombuffer(b"".join([blake2b(name, digest_size=8).digest() for name in names]), "<u8") >> np.uint64(11)
    return bits.reshape(-1, count) * 2.0**-53


def stream(*name: object) -> random.Random:
    """A generator seeded by name. Unlike `hash`, the digest is the same in every process."""
    digest = blake2b(repr(name).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))
