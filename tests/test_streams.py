"""Random streams are named: the layout of the names is part of what makes a resumed run draw the same numbers."""

from __future__ import annotations

import hashlib
import struct

import pytest

from covey.streams import stream_seed, uniform, uniforms


def first_eight_bytes(text: bytes) -> int:
    found: int = struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())[0]
    return found


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 300), (12345, 2**32)])
def test_a_number_is_the_hash_of_seed_and_position(seed: int, position: int) -> None:
    """Two unsigned 64-bit integers, little-endian; the upper 53 of 64 bits as a fraction."""
    assert uniform(seed, position) == (first_eight_bytes(struct.pack("<QQ", seed, position)) // 2**11) / 2**53


def test_many_numbers_at_once_are_the_same() -> None:
    streams = [(0, 0), (2**63 - 1, 300), (12345, 2**32)]
    expected = [[uniform(seed, position + step) for step in range(5)] for seed, position in streams]
    assert uniforms(iter(streams), 5).tolist() == expected


def test_a_seed_is_the_hash_of_the_name_and_fits_a_signed_integer() -> None:
    """Other engines and torch take seeds of 63 bits."""
    assert stream_seed(7, "train", 3) == first_eight_bytes(b"7\x1ftrain\x1f3") // 2
    assert max(stream_seed(n) for n in range(100)) < 2**63
    assert stream_seed(1, 23) != stream_seed(12, 3)  # parts are kept apart


def test_numbers_are_even_over_the_unit_interval() -> None:
    """Of 20,000 a mean of ½ ± 4 standard errors of √(1/12/20,000), and every tenth about as often."""
    numbers = [uniform(n % 20, n) for n in range(20_000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert abs(sum(numbers) / 20_000 - 0.5) < 4 * (1 / 12 / 20_000) ** 0.5
    counts = [sum(int(10 * number) == tenth for number in numbers) for tenth in range(10)]
    assert all(abs(count - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5 for count in counts)
