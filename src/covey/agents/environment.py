"""Environments of the user: a class with `reset` and `step` instead of a coroutine.

    class Guess:
        def reset(self, task):
            self.secret, self.left = int(task.answer), 5
            return [*task.messages, {"role": "user", "content": "Guess a number from 1 to 100."}]

        def step(self, reply):
            self.left -= 1
            if reply.strip() == str(self.secret):
                return covey.Done(reward=1.0)
            return covey.Done(reward=0.0) if self.left == 0 else "Wrong. Try again."

A step that gives the turn a reward returns `covey.Observation("Wrong.", reward=-0.1)`. Every episode has its own
environment, which is closed at the episode's end. The sum of an environment's rewards is the built-in reward `given`.
If an episode ends before the environment is done (turns or tokens used up), the environment's method `end(reason)`
returns its `Done`; without that method only turns have rewards, and an episode in which none received one is excluded.
With a worker pool each environment runs in a process of its own, where a hang or crash costs only its episode.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from covey.errors import InputError, NamedFailure, RunFailed, describe_error
from covey.images import ImageMistake, has_images, with_images
from covey.protocols import Done, NoRoom, Observation, Policy, check_turn_reward
from covey.types import Episode, Messages, RewardTable, StopReason, Task
from covey.workers import WorkerError, WorkerPool, WorkerSession, WorkerTimeout

Message = Mapping[str, Any]

FACTORY = "environment"  # the factory's name in the worker pool


class EnvironmentFailed(NamedFailure):
    """An environment raised, hung, or returned an invalid value. This is not the model's fault."""


# -- Where an environment runs -----------------------------------------------------------------------------------------


class Host(Protocol):
    """Runs one environment. Each call may take `seconds`, as far as the host can enforce it."""

    async def start(self, factory: Callable[[], Any], seconds: float) -> None: ...

    async def call(self, method: str, argument: Any, seconds: float) -> Any: ...

    async def close(self, seconds: float) -> None: ...

    def has(self, method: str) -> bool: ...


class InProcess:
    """Runs the environment in this process. Only `async` methods can be interrupted; others block the event loop."""

    def __init__(self) -> None:
        self.environment: Any = None

    async def start(self, factory: Callable[[], Any], seconds: float) -> None:
        self.environment = await _await(factory(), seconds)
        check_environment(factory, dir(self.environment))

    async def call(self, method: str, argument: Any, seconds: float) -> Any:
        return await _await(getattr(self.environment, method)(argument), seconds)

    def has(self, method: str) -> bool:
        return callable(getattr(self.environment, method, None))

    async def close(self, seconds: float) -> None:
        for name in ("aclose", "close"):
            if self.has(name):
                await _await(getattr(self.environment, name)(), seconds)
                return


class InWorker:
    """Runs the environment in its own worker, which is killed if a call takes too long."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.session: WorkerSession | None = None
        self.methods: frozenset[str] = frozenset()

    async def start(self, factory: Callable[[], Any], seconds: float) -> None:
        self.session = await self.pool.session()
        try:
            await self.session.make(FACTORY, seconds=seconds)
            self.methods = frozenset(await self.session.method("__dir__", seconds=seconds))
            check_environment(factory, self.methods)
        except BaseException:
            await self.session.close()
            raise

    async def call(self, method: str, argument: Any, seconds: float) -> Any:
        assert self.session is not None
        return await self.session.method(method, argument, seconds=seconds)

    def has(self, method: str) -> bool:
        return method in self.methods

    async def close(self, seconds: float) -> None:
        assert self.session is not None
        await self.session.close()


def check_environment(factory: Callable[[], Any], methods: Collection[str]) -> None:
    """Check what a factory returned. This is only known after calling it."""
    missing = [method for method in ("reset", "step") if method not in methods]
    if missing:
        name = getattr(factory, "__name__", factory)
        raise InputError(f"agent {name} makes an object without {' and '.join(missing)}: not an environment")


async def _await(value: Any, seconds: float) -> Any:
    if not inspect.isawaitable(value):
        return value
    async with asyncio.timeout(seconds):
        return await value


# -- The agent ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnvironmentAgent:
    """Plays an environment: each reply goes to `step`, whose messages are shown to the model, until it is done."""

    factory: Callable[[], Any]
    max_turns: int
    seconds: float = 10.0  # for one call of reset or step
    host: Callable[[], Host] = InProcess
    train_roles: Sequence[str] = ()  # roles whose turns are trained on; empty: all

    reward: ClassVar[str] = "given"  # the reward if the user names none

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the pool for `in_workers` must have."""
        return {FACTORY: self.factory}

    def in_workers(self, pool: WorkerPool) -> EnvironmentAgent:
        """A copy that runs every environment in its own worker."""
        return replace(self, host=partial(InWorker, pool))

    def opening(self, task: Task) -> tuple[Messages, None]:
        """The task's messages. What an environment adds is only known after its reset."""
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        async with self._open(policy) as environment:
            first = _observation("reset", await environment.call("reset", task))
            opening = _messages("reset", first.content) or list(task.messages)
            messages: list[Message] = []  # after the opening
            first = replace(first, content=opening)
            stop, done = await self._play(policy, environment, first, messages)
            if done is None and environment.host.has("end"):
                done = await environment.call("end", stop.value)
                if not isinstance(done, Done):
                    raise EnvironmentFailed("environment", f"end must return covey.Done(reward=...); got {done!r:.80}")
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *without_task(opening, task.messages), *messages),
            stop=stop,
            given=None if done is None else _rewards(done),
        )

    async def _play(
        self, policy: Policy, environment: OpenEnvironment, seen: Observation, messages: list[Message]
    ) -> tuple[StopReason, Done | None]:
        """Play from the first observation, adding to `messages`. Each role has a conversation of its own."""
        conversations: dict[str | None, list[Message]] = {seen.role: list(seen.content)}
        for _ in range(self.max_turns):
            conversation = conversations[seen.role]
            trained = not self.train_roles or seen.role in self.train_roles
            try:
                reply = await policy.ask(conversation, trained=trained, role=seen.role)
            except NoRoom:
                return StopReason.LENGTH, None
            try:
                policy.record_turn(state=seen.state)
            except ValueError as error:  # it is not JSON
                raise EnvironmentFailed("environment", str(error)) from error
            message = {"role": "assistant", "content": reply.text}
            conversation.append(message)
            messages.append(message if seen.role is None else message | {"name": seen.role})
            if reply.stop is StopReason.LENGTH:
                return reply.stop, None
            result = await environment.call("step", reply.text)
            if isinstance(result, Done):
                messages += _readable("step", result.messages)
                return reply.stop, result
            seen = _observation("step", result)
            policy.record_turn(reward=seen.reward)
            shown = _messages("step", seen.content)
            conversations.setdefault(seen.role, []).extend(shown)
            messages += shown
        return StopReason.TURNS, None

    @asynccontextmanager
    async def _open(self, policy: Policy) -> AsyncIterator[OpenEnvironment]:
        """A new environment, closed at the end in any case. Waiting for a worker is not counted as the episode's
        time."""
        environment = OpenEnvironment(self.host(), getattr(self.factory, "__name__", "environment"), self.seconds)
        with policy.waiting():
            await environment.guard("__init__", environment.host.start(self.factory, self.seconds))
        try:
            yield environment
        finally:
            await environment.guard("close", environment.host.close(self.seconds))


@dataclass(frozen=True)
class OpenEnvironment:
    """The environment of one episode. Its errors are failures of this episode only."""

    host: Host
    name: str
    seconds: float

    async def call(self, method: str, argument: Any) -> Any:
        return await self.guard(method, self.host.call(method, argument, self.seconds))

    async def guard(self, method: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (TimeoutError, WorkerTimeout):
            text = f"{self.name}.{method} took longer than agent.tool_seconds={self.seconds:g}"
            raise EnvironmentFailed("environment_timeout", text) from None
        except (EnvironmentFailed, InputError, RunFailed):
            raise
        except WorkerError as error:  # the environment's own exception, or the death of its worker
            raise EnvironmentFailed("environment", f"{self.name}.{method}: {error}") from error
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed("environment", f"{self.name}.{method}: {describe_error(error)}") from error


def _observation(method: str, value: Any) -> Observation:
    if not isinstance(value, Observation):
        return Observation(value)
    try:
        check_turn_reward(value.reward)
    except ValueError as error:
        raise EnvironmentFailed("environment", f"{method}: {error}") from error
    if method == "reset" and value.reward is not None:
        raise EnvironmentFailed("environment", "reset returned a reward, but no turn has been played yet")
    return value


def _messages(method: str, value: Any) -> list[Message]:
    """The messages that an environment returned. A string is a user message."""
    if value is None and method == "reset":
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or not messages or not all(map(_is_message, messages)):
        done = ", covey.Observation(messages, reward=...) or covey.Done(reward=...)" if method == "step" else ""
        raise EnvironmentFailed("environment", f"{method} must return messages or a text{done}; got {value!r:.80}")
    return _readable(method, messages)


def _readable(method: str, messages: Messages) -> list[Message]:
    """The messages with their images as `Image` or `ImageFile`."""
    if not any(has_images(message.get("content")) for message in messages):
        return list(messages)
    try:
        return list(with_images(messages))
    except ImageMistake as error:
        raise EnvironmentFailed("environment", f"{method}: {error}") from error


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def without_task(messages: Messages, task: Messages) -> Messages:
    """Messages without the task's own at their beginning, if they begin with them."""
    return messages[len(task) :] if list(messages[: len(task)]) == list(task) else messages


def _rewards(done: Done) -> RewardTable | None:
    if done.reward is None or isinstance(done.reward, Mapping):
        return done.reward
    return {"reward": float(done.reward)}
