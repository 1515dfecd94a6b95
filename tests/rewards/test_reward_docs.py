"""docs/rewards.md and docs/rewards-builtin.md against the code."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from covey.rewards import REWARDS, resolve_rewards
from covey.rewards.judge import PROMPT, Judge
from covey.rewards.reward_model import RewardModel
from covey.types import Episode, Task
from tests.test_docs import DOCS, blocks, quoted, tables, value

PAGE = DOCS / "rewards.md"


def test_every_built_in_reward_is_listed() -> None:
    listed = [name for row in tables(DOCS / "rewards-builtin.md", "name") for name in quoted(row[0])]
    assert sorted(listed) == sorted(REWARDS)


def test_options_and_their_defaults() -> None:
    written = [(quoted(row[0])[0], value(row[1])) for row in tables(PAGE, "option")]
    fields = [f for made in (RewardModel, Judge) for f in dataclasses.fields(made) if f.init]
    shown = {dataclasses.MISSING: "", PROMPT: "a short one"}
    assert written == [(f.name, shown.get(f.default, f.default)) for f in fields]


def test_the_examples_work() -> None:
    space: dict[str, Any] = {}
    for language, text in blocks(PAGE):
        if language == "python":
            exec(text, space)
    task = Task("t", ({"role": "user", "content": "?"},), "a b")
    episodes = [
        Episode(task, (), (*task.messages, {"role": "assistant", "content": text})) for text in ("b c d", "a b b a")
    ]
    rewards = resolve_rewards(
        [space[name] for name in ("short", "overlap", "shortest")], None, {}, options={"short": {"limit": 10}}
    )
    assert asyncio.run(rewards.group(task, episodes)) == [
        {"short": 0.5, "overlap": 0.5, "shortest": 1.0, "overlap/extra_words": 2.0},
        {"short": 1 - 0.7, "overlap": 1.0, "shortest": 0.0, "overlap/extra_words": 0.0},
    ]
