"""One episode's policy, asked for several replies at once; its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.streams import stream_seed
from covey.types import Completion, Sampling, StopReason
from tests.conftest import byte_tokenizer

ASK = [{"role": "user", "content": "q"}]


class Slow:
    """Takes `seconds` for each reply, and replies with its seed."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.tokenizer = byte_tokenizer()
        self.seconds = list(seconds)
        self.asked: list[Sampling] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.asked.append(sampling)
        await asyncio.sleep(self.seconds.pop(0))
        ids = tuple(self.tokenizer(str(sampling.seed))["input_ids"])
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.EOS)


def policy(engine: Any, **more: Any) -> EpisodePolicy:
    return EpisodePolicy(engine, Renderer(engine.tokenizer), Sampling(temperature=0.7, top_p=0.9), (3, "x"), **more)


def test_replies_sampled_at_once_draw_from_different_streams() -> None:
    async def scene() -> tuple[list[str], list[str]]:
        engine = Slow([0.03, 0.02, 0.01, 0.0])
        made = policy(engine)
        together = [reply.text for reply in await asyncio.gather(*(made.ask(ASK) for _ in range(3)))]
        alone = (await made.ask(ASK)).text
        return together, [alone]

    together, alone = asyncio.run(scene())
    assert [*together, *alone] == [str(stream_seed(3, "x", turn)) for turn in range(4)]


def test_sampling_settings_of_one_reply() -> None:
    engine = Slow([0.0, 0.0])
    made = policy(engine)
    asyncio.run(made.ask(ASK, temperature=0.0, top_p=1.0))
    asyncio.run(made.ask(ASK))
    assert [(s.temperature, s.top_p) for s in engine.asked] == [(0.0, 1.0), (0.7, 0.9)]


def test_a_reply_of_no_tokens_is_refused() -> None:
    engine = Slow([])
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        asyncio.run(policy(engine).ask(ASK, max_tokens=0))
    assert not engine.asked


def test_the_clock_stands_still_until_the_last_of_several_replies() -> None:
    async def scene() -> float:
        async with asyncio.timeout(10.0) as deadline:
            left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
            made = policy(Slow([0.2, 0.5]), deadline=deadline)
            with made.waiting():
                await asyncio.gather(made.ask(ASK), made.ask(ASK))
                assert deadline.when() is None
            return left - ((deadline.when() or 0.0) - asyncio.get_running_loop().time())

    assert asyncio.run(scene()) == pytest.approx(0.0, abs=0.1)


def test_the_clock_runs_again_after_an_engines_error() -> None:
    async def scene() -> None:
        async with asyncio.timeout(10.0) as deadline:
            made = policy(Slow([]), deadline=deadline)
            with pytest.raises(IndexError):
                await made.ask(ASK)
            assert deadline.when() is not None

    asyncio.run(scene())
