"""The plain agent: the task's messages in, one answer out."""

from __future__ import annotations

from covey.protocols import Policy
from covey.types import Episode, Task, Turn


class ChatAgent:
    async def run(self, policy: Policy, task: Task) -> Episode:
        prompt = policy.render(task.messages)
        done = await policy.generate(prompt)
        turn = Turn(prompt, done.token_ids, done.logprobs, done.versions, done.stop)
        reply = {"role": "assistant", "content": policy.decode(done.token_ids)}
        return Episode(task, (turn,), (*task.messages, reply), stop=done.stop)
