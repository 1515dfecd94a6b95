"""The reward for tasks of the package reasoning-gym: each family's own scorer.

Some scorers let sympy parse what the model wrote, which may take long: this reward runs in a worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from covey.errors import Absent, InputError
from covey.install import install_extra
from covey.rewards.answers import tagged
from covey.rewards.function import reward
from covey.types import Task


def _check(task: Task) -> None:
    if "entry" not in task.columns or "dataset" not in task.columns:
        raise InputError(f"{task.where} is not of reasoning-gym\n  fix: the reward reasoning_gym goes with its data")
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise Absent(
            f"reward reasoning_gym needs the package reasoning-gym\n  fix: {install_extra('reasoning-gym')}"
        ) from error


@reward(check=_check)
def reasoning_gym(
    final_answer: str, entry: Mapping[str, Any], dataset: str, dataset_options: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """What the package's scorer says of the text in <answer>, or of the whole reply where there is none: 0 to 1.
    Scorers raise at some answers that they cannot parse, which earn 0; the extra `unread` is 1 there."""
    inside = tagged(final_answer)
    said = (final_answer if inside is None else inside).strip()
    scorer = _family(dataset, json.dumps(dataset_options or {}, sort_keys=True))
    try:
        return {"reward": float(scorer.score_answer(said, dict(entry))), "unread": 0.0}
    except Exception:  # int("no idea"), and whatever else: with a task of its own, only the answer can be at fault
        return {"reward": 0.0, "unread": 1.0}


@lru_cache(maxsize=64)
def _family(name: str, options: str) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    given = json.loads(options)
    if name == "composite":
        given["datasets"] = [DatasetSpec(**({"weight": 1.0, "config": {}} | part)) for part in given["datasets"]]
    return reasoning_gym.create_dataset(name, size=1, seed=0, **given)
