"""A scripted engine, and episodes that it plays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from covey.protocols import Agent
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.types import Completion, Episode, Sampling, StopReason, Task
from tests.conftest import byte_tokenizer


class Script:
    """Replies with its texts in order, each followed by an end-of-turn token, and records the prompts."""

    def __init__(self, *texts: str, tokenizer: Any = None) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []
        self.tokenizer = tokenizer or byte_tokenizer()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        self.prompts.append(self.tokenizer.decode(list(token_ids)))
        ids = (*self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        stop = StopReason.EOS
        if len(ids) > sampling.max_tokens:
            ids, stop = ids[: sampling.max_tokens], StopReason.LENGTH
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), stop)


def with_braces() -> Any:
    """The tests' tokenizer with brackets and braces for JSON."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*"{}[]"])
    return tokenizer


def policy_of(engine: Script, max_tokens: int = 10_000, **limits: Any) -> EpisodePolicy:
    sampling = Sampling(max_tokens=max_tokens)
    return EpisodePolicy(engine, Renderer(engine.tokenizer), sampling, ("test",), **limits)  # type: ignore[arg-type]


async def scored(agent: Agent, task: Task, engine: Script, reward: Any = "given", **limits: Any) -> Episode:
    """One episode as training collects it, with its failure if it has one."""
    collector = Collector(
        engine,  # type: ignore[arg-type]
        Renderer(engine.tokenizer),
        agent,
        resolve_rewards(reward, None, {}),
        seed=1,
        max_seconds=limits.pop("max_seconds", 30.0),
        **limits,
    )
    (group,) = await collector.groups([task], 1, Sampling(max_tokens=10_000), ("test",))
    return group.episodes[0]


def one_row(episode: Episode) -> bool:
    """Whether every prompt continues the tokens of the turn before it."""
    for before, after in zip(episode.turns, episode.turns[1:], strict=False):
        whole = before.prompt_ids + before.completion_ids
        if after.prompt_ids[: len(whole)] != whole:
            return False
    return True
