"""Agents of several turns, played against any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Generate = Callable[[Sequence[int], int, int], Awaitable[Sequence[int]]]  # prompt, new tokens, seed → sampled ids


@dataclass(frozen=True)
class AgentTurn:
    prompt: Sequence[int]
    tokens: int  # sampled
    tool_s: float


async def play_agents(generate: Generate, work: Sequence[Sequence[AgentTurn]]) -> int:
    """All agents at once. A turn adds a prompt to the conversation, samples an answer and waits for a tool. Returns the
    number of sampled tokens."""

    async def agent(number: int, turns: Sequence[AgentTurn]) -> int:
        ids: list[int] = []
        sampled = 0
        for at, turn in enumerate(turns):
            ids += turn.prompt
            answer = await generate(ids, turn.tokens, number * len(turns) + at)
            ids += answer
            sampled += len(answer)
            await asyncio.sleep(turn.tool_s)
        return sampled

    return sum(await asyncio.gather(*(agent(n, turns) for n, turns in enumerate(work))))
