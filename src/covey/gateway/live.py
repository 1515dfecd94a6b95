"""One episode under way: every request is answered by its policy, which keeps the turns.

Requests whose messages go on from an earlier reply go on from its tokens. Several may come at once, and one may ask for
several replies: each reply is a turn of the episode, and all of them are learned from.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError
from covey.gateway.answers import Choice
from covey.gateway.messages import Format, Memory, Message, Said, outward, with_system
from covey.gateway.refusal import Refused
from covey.gateway.requests import Asked
from covey.protocols import NoRoom, Policy
from covey.types import Episode, RewardTable, Sampling, StopReason, Task


@dataclass(frozen=True)
class Rules:
    """What holds for all episodes. `sampling`: in training the run's own, and no other; None: a request chooses."""

    model: str
    format: Format | None = None
    sampling: Sampling | None = None
    max_turns: int | None = None
    hidden: frozenset[str] = frozenset()  # columns of a task that no program sees


class Live:
    def __init__(self, id: str, key: str, policy: Policy, task: Task, rules: Rules, metadata: Any = None) -> None:
        self.id = id
        self.key = key
        self.policy = policy
        self.task = task
        self.rules = rules
        self.metadata = metadata
        self.given: RewardTable | None = None
        self.error: Exception | None = None  # of the engine
        self.closed = asyncio.Event()
        self.began = self.used = time.monotonic()
        self._memory = Memory(rules.format)
        self._running: set[asyncio.Task[list[Choice]]] = set()
        self._stop: StopReason | None = None
        self._conversation: tuple[Mapping[str, Any], ...] = ()
        self._begun = 0  # replies that were asked for

    # -- requests ----------------------------------------------------------------------------------------------------

    def start(self, asked: Asked) -> asyncio.Task[list[Choice]]:
        """Sample the replies to a request. The task is cancelled when the episode ends."""
        if self.closed.is_set():  # while the request was still coming in
            raise Refused(410, "this episode is over: nothing more can be asked in it", code="episode_over")
        self._check(asked)
        self.used = time.monotonic()
        self._begun += asked.n
        task = asyncio.get_running_loop().create_task(self._ask(asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _check(self, asked: Asked) -> None:
        ours = self.rules.sampling
        if ours is not None:
            _same("temperature", asked.temperature, ours.temperature)
            _same("top_p", asked.top_p, ours.top_p)
        if asked.tools and self.rules.format is None:
            raise Refused(400, "tools: it is not known how this model writes tool calls; set agent.format")
        limit = self.rules.max_turns
        if limit is not None and self._begun + asked.n > limit:
            self._stop = StopReason.TURNS
            raise Refused(400, f"an episode has at most {limit} replies (agent.max_turns)", code="too_many_turns")

    async def _ask(self, asked: Asked) -> list[Choice]:
        messages = self._memory.inward(asked.messages)
        form = self.rules.format if asked.tools else None
        if form is not None and not form.native_tools:
            messages = with_system(messages, _instructions(form, asked.tools))
        shown = asked.tools if form is not None and form.native_tools else None
        branches = [asyncio.create_task(self._branch(asked, messages, shown)) for _ in range(asked.n)]
        try:
            choices = await asyncio.gather(*branches)
        except NoRoom as full:
            self._stop = StopReason.LENGTH
            raise Refused(400, str(full), code="context_length_exceeded") from full
        except InputError as mistake:  # the template does not take these messages
            raise Refused(400, str(mistake), param="messages") from mistake
        finally:
            for branch in branches:
                branch.cancel()
        self._conversation = (*asked.messages, _plain(choices[0].message))
        return choices

    async def _branch(self, asked: Asked, messages: Sequence[Mapping[str, Any]], shown: Any) -> Choice:
        form = self.rules.format if asked.may_call else None
        reply = await self.policy.ask(
            messages,
            tools=shown,
            stop=(*asked.stop, *(form.stop if form is not None else ())),
            max_tokens=asked.max_tokens,
            temperature=None if self.rules.sampling is not None else asked.temperature,
            top_p=None if self.rules.sampling is not None else asked.top_p,
        )
        turn = reply.turn
        assert turn is not None
        said = Said({"role": "assistant", "content": reply.text})
        if form is not None and reply.stop is not StopReason.LENGTH:
            parsed = form.parse(reply.text)
            said = Said(parsed.message, parsed.calls)
            self.policy.remember(parsed.message)
        self._memory.keep(said)
        return Choice(outward(said), turn, [self.policy.decode([token]) for token in turn.completion_ids])

    # -- its end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """No request is answered from now on; those under way are given up."""
        self.closed.set()
        for task in self._running:
            task.cancel()

    async def settled(self) -> None:
        """Until requests that were given up have let go of the policy."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def episode(self) -> Episode:
        turns = tuple(self.policy.turns)
        stop = self._stop or (turns[-1].stop if turns else None)
        seconds = time.monotonic() - self.began
        return Episode(self.task, turns, self._messages(), stop=stop, given=self.given, seconds=seconds)

    @property
    def used_up(self) -> bool:
        """Whether the last thing a client heard is that the episode may have no further reply."""
        return self._stop is not None

    def _messages(self) -> tuple[Mapping[str, Any], ...]:
        """The task's messages and what came after them in the last conversation; a client that wrote a prompt of its
        own has all of it there."""
        own = tuple(self.task.messages)
        begins_so = [_plain(message) for message in self._conversation[: len(own)]] == [_plain(m) for m in own]
        return (*own, *(self._conversation[len(own) :] if begins_so else self._conversation))


def _instructions(form: Format, tools: Any) -> str | None:
    """Schemas come from a client, in any shape."""
    try:
        return form.instructions(tools)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"{type(error).__name__}: {error!s:.100}"
        raise Refused(400, f"tools: their parameters are no JSON schema that can be shown ({what})") from error


def _same(name: str, asked: float | None, ours: float) -> None:
    if asked is not None and asked != ours:
        raise Refused(
            400,
            f"{name}={asked:g}, but this run samples with rollout.{name}={ours:g}: what is learned from must be drawn "
            f"as the learner assumes; leave it out, or set rollout.{name}",
            param=name,
        )


def _plain(message: Mapping[str, Any]) -> Message:
    """With a text for a content, which rewards read."""
    return {**message, "content": message.get("content") or ""}
