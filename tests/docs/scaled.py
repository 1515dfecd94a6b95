"""A command line of `covey train` or `covey sft`, scaled down: one step on two tasks with answers of a few tokens.

What the line itself says stays as far as it is small, so that groups of one remain groups of one.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST = {  # what a number may be at most, and is where the line says nothing
    "data.train_batch_size": 2,
    "rollout.group_size": 4,
    "rollout.max_tokens": 6,
    "loop.total_steps": 1,
}
IF_GIVEN = {  # only where the line says more
    "actor_rollout_ref.rollout.n": 2,
    "agent.num_chains": 4,
    "agent.max_turns": 2,
    "algorithm.overlong_buffer": 2,
    "data.train_size": 16,
    "eval.n": 2,
    "learner.epochs": 2,
    "learner.mini_batch_size": 1,
    "loop.total_epochs": 1,
    "trainer.total_training_steps": 1,
}
SAME = {"actor_rollout_ref.rollout.n": "rollout.group_size", "agent.num_chains": "rollout.group_size"}
SAME |= {"trainer.total_training_steps": "loop.total_steps", "loop.total_epochs": "loop.total_steps"}
ALWAYS = ("data.val_size=2", "rollout.max_sequences=8", "model.context_length=4096", "logging.to=[]")
SHORT = ("loop.save_final=false", "eval.before=false", "eval.after=false")


def scaled(words: Sequence[str], *, whole: bool = False, keep: Sequence[str] = ()) -> list[str]:
    """`whole`: with its evaluations and its last checkpoint. `keep`: keys whose values are needed as they are."""
    given = dict(word.partition("=")[::2] for word in words if "=" in word and not word.startswith("-"))
    found = [word for word in words if word.partition("=")[0] in keep or not _too_large(word)]
    for key, most in IF_GIVEN.items():
        if key in given and key not in {word.partition("=")[0] for word in found}:
            found.append(f"{key}={most}")
    spoken = {SAME.get(key, key) for key in given}
    for key, most in MOST.items():
        if key not in spoken or (key in given and key not in keep and _too_large(f"{key}={given[key]}")):
            found.append(f"{key}={most}")
    return [*found, *(word for word in (*ALWAYS, *(() if whole else SHORT)) if word.partition("=")[0] not in given)]


def _too_large(word: str) -> bool:
    key, _, value = word.partition("=")
    most = (MOST | IF_GIVEN).get(key)
    return most is not None and value.replace(".", "", 1).isdigit() and float(value) > most
