"""Rewards for the shape of a reply, whatever it says: how long it is, and how much it repeats itself.

They are worth little alone: `reward='[exact,length]' reward.only_if='{length: exact}'` pays brevity only where the
answer is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from covey.rewards.function import reward
from covey.types import Episode

MAX_TOKENS = 256  # where no limit is given


@reward
def length(
    completion: str,
    episode: Episode,
    max_tokens: int | None = None,
    max_characters: int | None = None,
    target_tokens: int | None = None,
    target_characters: int | None = None,
    zero_at: float = 2.0,
) -> dict[str, float]:
    """Up to a maximum 1, then falling linearly to 0 at `zero_at` times the maximum; or 1 at a target, falling linearly
    to 0 at `zero_at` times the target and, as fast, below it. Tokens are all that were sampled in the episode.

    Extra `size`: what was measured, in tokens or characters.
    """
    limits = {
        "max_tokens": max_tokens,
        "max_characters": max_characters,
        "target_tokens": target_tokens,
        "target_characters": target_characters,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None} or {"max_tokens": MAX_TOKENS}
    if len(given) > 1:
        raise ValueError(f"length takes one limit, not {' and '.join(given)}")
    ((name, limit),) = given.items()
    if limit <= 0 or zero_at <= 1:
        raise ValueError(f"length: {name} must be positive and zero_at over 1, got {limit} and {zero_at:g}")
    size = episode.response_tokens if name.endswith("tokens") else len(completion)
    distance = size - limit if name.startswith("max") else abs(size - limit)
    return {"reward": min(1.0, max(0.0, 1 - distance / (limit * (zero_at - 1)))), "size": float(size)}


@reward
def repetition(completion: str, episode: Episode, n: int = 4, unit: str = "words") -> dict[str, float]:
    """1 − the share of n-grams that occurred before: 1 where nothing is repeated (also in a text shorter than n), near
    0 in a loop. `unit` is words or tokens; tokens also count where words are not parted by spaces.

    Extra `repeated`: the share.
    """
    if unit not in ("words", "tokens"):
        raise ValueError(f"repetition: unit is words or tokens, not {unit!r}")
    if n < 1:
        raise ValueError(f"repetition: n must be at least 1, got {n}")
    texts: list[Sequence[Any]] = (
        [completion.lower().split()] if unit == "words" else [turn.completion_ids for turn in episode.turns]
    )
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
    return {"reward": 1 - repeated, "repeated": repeated}
