"""The plain agent: the task's messages in, one answer out."""

from __future__ import annotations

from covey.protocols import Policy
from covey.types import Episode, Messages, Task


class ChatAgent:
    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        reply = {"role": "assistant", "content": await policy.chat(task.messages)}
        (turn,) = policy.turns
        return Episode(task, (turn,), (*task.messages, reply), stop=turn.stop)
