"""Agents that chat: one answer, or several turns with tools.

`ChatAgent` samples one answer to the task's messages. `ToolAgent` repeats: sample a reply, run its tool calls, add the
results to the conversation, until a reply calls no tool. Mistakes of the model (malformed calls, unknown tools, wrong
arguments) come back to it as observations. A failure of the infrastructure ends the episode as a failure. A reply that
was cut off ends the episode too; nothing in it is parsed or run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from covey.agents.formats.base import with_pictures
from covey.agents.tools.session import ToolSession, reward_of_tools
from covey.agents.tools.toolset import ToolSet
from covey.protocols import NoRoom, Policy
from covey.replies import with_system
from covey.types import Episode, Messages, StopReason, Task, ToolUse
from covey.workers import WorkerPool

if TYPE_CHECKING:
    from covey.tool_calls import Format

Message = Mapping[str, Any]


class ChatAgent:
    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        reply = {"role": "assistant", "content": await policy.chat(task.messages)}
        (turn,) = policy.turns
        return Episode(task, (turn,), (*task.messages, reply), stop=turn.stop)


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run with their limits. `pool` runs users' tools; a run sets it when it starts."""

    tools: ToolSet
    max_tokens: int = 512
    seconds: float = 10.0
    pool: WorkerPool | None = None

    def schemas(self) -> list[dict[str, Any]]:
        return self.tools.schemas()

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the pool for `in_workers` must have."""
        return self.tools.functions

    def in_workers(self, pool: WorkerPool) -> Toolbox:
        """A copy that runs users' tools in the pool."""
        return replace(self, pool=pool)

    def open(self, policy: Policy) -> ToolSession:
        """The tool session of this policy's episode."""
        return self.tools.open(
            self.pool,
            cut=policy.cut,
            max_tokens=self.max_tokens,
            seconds=self.seconds,
            waiting=policy.waiting,
            sees_images=policy.sees_images,
        )


@dataclass(frozen=True)
class ToolAgent:
    """The same loop for every tool-call format."""

    tools: Toolbox
    format: Format
    max_turns: int

    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """The task's messages and the tools for the chat template; or the tools explained in the system message."""
        schemas = self.tools.schemas()
        if self.format.native_tools or not schemas:
            return task.messages, schemas or None
        return with_system(task.messages, self.format.instructions(schemas)), None

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the pool for `in_workers` must have."""
        return self.tools.functions

    def in_workers(self, pool: WorkerPool) -> ToolAgent:
        return replace(self, tools=self.tools.in_workers(pool))

    async def run(self, policy: Policy, task: Task) -> Episode:
        messages: list[Message] = []  # after the task's own
        uses: list[ToolUse] = []
        stop, answer = await self._converse(policy, task, messages, uses)
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *messages),
            stop=stop,
            answer=answer,
            tools=tuple(uses),
        )

    async def _converse(
        self, policy: Policy, task: Task, messages: list[Message], uses: list[ToolUse]
    ) -> tuple[StopReason, str | None]:
        """Play the episode, adding to `messages` and `uses`. Returns why it stopped, and the final answer if it is not
        the last reply."""
        opening, schemas = self.opening(task)
        async with self.tools.open(policy) as session:
            for _ in range(self.max_turns):
                try:
                    reply = await policy.ask([*opening, *messages], tools=schemas, stop=self.format.stop)
                except NoRoom:
                    return StopReason.LENGTH, None
                if reply.stop is StopReason.LENGTH:
                    messages.append({"role": "assistant", "content": reply.text})
                    return reply.stop, None
                parsed = self.format.parse(reply.text)
                policy.remember(parsed.message)
                messages.append(parsed.message)
                if not parsed.calls:
                    return reply.stop, parsed.answer
                results = await session.call(parsed.calls)
                policy.record_turn(reward=reward_of_tools(results))
                uses += [result.use for result in results]
                for result in results:
                    if result.ended:
                        return StopReason.ANSWER, result.answer
                observed = self.format.observe([(result.call, result.text) for result in results])
                messages += with_pictures(observed, [result.images for result in results])
        return StopReason.TURNS, None
