"""Rewards of small tries, under the names of the real ones: a random model earns them in some of its answers."""

from __future__ import annotations


def math_equal(final_answer: str) -> float:
    """Half of all answers: those whose characters sum to an even number."""
    return float(sum(map(ord, final_answer)) % 2 == 0)


def qa_f1_reward(final_answer: str) -> dict[str, float]:
    earned = math_equal(final_answer)
    return {"reward": earned, "em": earned, "f1": earned}


def code_reward(final_answer: str) -> float:
    return math_equal(final_answer)


def ifeval(final_answer: str) -> float:
    return math_equal(final_answer)
