"""The tools of a run, with where they run and their limits: what an agent opens for each episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.agents.formats import Format
from covey.agents.tools import Bench, Runner, ToolSet
from covey.protocols import NoRoom, Policy
from covey.types import Episode, Messages, StopReason, Task, ToolUse


@dataclass(frozen=True)
class Toolbox:
    """`runner` has the functions of users' tools; it is there when the run begins."""

    tools: ToolSet
    max_tokens: int = 512
    seconds: float = 10.0
    runner: Runner | None = None

    def schemas(self) -> list[dict[str, Any]]:
        return self.tools.schemas()

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What a pool of workers must have for `in_workers`."""
        return self.tools.functions

    def in_workers(self, pool: Runner) -> Toolbox:
        """The same, with users' tools in killable processes."""
        return replace(self, runner=pool)

    def open(self, policy: Policy) -> Bench:
        """The bench of the episode that this policy plays."""
        return self.tools.open(
            self.runner, cut=policy.cut, max_tokens=self.max_tokens, seconds=self.seconds, waiting=policy.waiting
        )


# -- The plain agent: the task's messages in, one answer out -----------------------------------------------------------


class ChatAgent:
    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        reply = {"role": "assistant", "content": await policy.chat(task.messages)}
        (turn,) = policy.turns
        return Episode(task, (turn,), (*task.messages, reply), stop=turn.stop)


# -- The turn loop: ask, run the tools that were called, show what came back, until there is an answer -----------------
# The model's mistakes (malformed calls, unknown tools, wrong arguments) come back to it as observations. A failure of
# ours ends the episode as a failure. A reply that was cut off ends it too: nothing in it is parsed or run.

Message = Mapping[str, Any]


@dataclass
class Talk:
    """What was said after the task's own messages, and what the tools did."""

    said: list[Message] = field(default_factory=list)
    uses: list[ToolUse] = field(default_factory=list)
    answer: str | None = None


@dataclass(frozen=True)
class ToolAgent:
    """One loop for all ways of writing a call."""

    tools: Toolbox
    format: Format
    max_turns: int

    def opening(self, task: Task) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
        """The task with the tools explained, by the template or in the system message."""
        schemas = self.tools.schemas()
        if self.format.native_tools or not schemas:
            return task.messages, schemas or None
        return with_system(task.messages, self.format.instructions(schemas)), None

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What a pool of workers must have for `in_workers`."""
        return self.tools.functions

    def in_workers(self, pool: Runner) -> ToolAgent:
        return replace(self, tools=self.tools.in_workers(pool))

    async def run(self, policy: Policy, task: Task) -> Episode:
        talk = Talk()
        stop = await self._converse(policy, task, talk)
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *talk.said),
            stop=stop,
            answer=talk.answer,
            tools=tuple(talk.uses),
        )

    async def _converse(self, policy: Policy, task: Task, talk: Talk) -> StopReason:
        opening, shown = self.opening(task)
        async with self.tools.open(policy) as bench:
            for _ in range(self.max_turns):
                try:
                    reply = await policy.ask([*opening, *talk.said], tools=shown, stop=self.format.stop)
                except NoRoom:
                    return StopReason.LENGTH
                if reply.stop is StopReason.LENGTH:
                    talk.said.append({"role": "assistant", "content": reply.text})
                    return reply.stop
                parsed = self.format.parse(reply.text)
                policy.remember(parsed.message)
                talk.said.append(parsed.message)
                if not parsed.calls:
                    talk.answer = parsed.answer
                    return reply.stop
                results = await bench.call(parsed.calls)
                talk.uses += [result.use for result in results]
                ended = [result for result in results if result.ended]
                if ended:
                    talk.answer = ended[0].answer
                    return StopReason.ANSWER
                talk.said += self.format.observe([(result.call, result.text) for result in results])
        return StopReason.TURNS


def with_system(messages: Messages, text: str | None) -> Messages:
    """Messages with a text at the end of their system message."""
    if not text:
        return messages
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        return ({"role": "system", "content": text}, *messages)
    return ({**first, "content": f"{first['content']}\n\n{text}"}, *rest)
