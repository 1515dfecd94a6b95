"""Environments of your own: a class with `reset` and `step` instead of a coroutine.

    class Guess:
        def reset(self, task):
            self.secret, self.left = int(task.answer), 5
            return [*task.messages, {"role": "user", "content": "Guess a number from 1 to 100."}]

        def step(self, reply):
            self.left -= 1
            if reply.strip() == str(self.secret):
                return covey.Done(reward=1.0)
            return covey.Done(reward=0.0) if self.left == 0 else "Wrong. Try again."

Every episode has an environment of its own, which is closed with it. Its reward is the built-in reward `given`. An
episode that ends before the environment is done (turns, tokens) is scored by its method `end(reason)`, if it has one,
which returns `Done`; otherwise nobody says what it is worth, and it is left out. With a pool of workers an environment
lives in a process of its own, where it may hang or crash without harm to others.
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
from covey.protocols import Done, NoRoom, Policy
from covey.types import Episode, Messages, RewardTable, StopReason, Task
from covey.workers import WorkerError, WorkerPool, WorkerSession, WorkerTimeout

Message = Mapping[str, Any]

WORKERS = "environment"  # what workers call the factory


class EnvironmentFailed(NamedFailure):
    """An environment raised, hung, or returned what it must not. The model is not to blame."""


class Seat(Protocol):
    """Where an environment lives. Each call has `seconds`, where there is a way to keep it to that."""

    async def start(self, factory: Callable[[], Any], seconds: float) -> None: ...

    async def call(self, method: str, argument: Any, seconds: float) -> Any: ...

    async def close(self, seconds: float) -> None: ...

    def has(self, method: str) -> bool: ...


class Inline:
    """In this process. What is `async` is kept to its time; what is not holds everything up while it runs."""

    def __init__(self) -> None:
        self.environment: Any = None

    async def start(self, factory: Callable[[], Any], seconds: float) -> None:
        self.environment = await _result(factory(), seconds)
        check_environment(factory, dir(self.environment))

    async def call(self, method: str, argument: Any, seconds: float) -> Any:
        return await _result(getattr(self.environment, method)(argument), seconds)

    def has(self, method: str) -> bool:
        return callable(getattr(self.environment, method, None))

    async def close(self, seconds: float) -> None:
        for name in ("aclose", "close"):
            if self.has(name):
                await _result(getattr(self.environment, name)(), seconds)
                return


class InWorker:
    """In a worker of its own, which is killed if a call takes too long."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.session: WorkerSession | None = None
        self.methods: frozenset[str] = frozenset()

    async def start(self, factory: Callable[[], Any], seconds: float) -> None:
        self.session = await self.pool.session()
        try:
            await self.session.make(WORKERS, seconds=seconds)
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
    """Whether a factory makes environments; known only once it has made one."""
    missing = [method for method in ("reset", "step") if method not in methods]
    if missing:
        name = getattr(factory, "__name__", factory)
        raise InputError(f"agent {name} makes something that has no {' and no '.join(missing)}: no environment")


async def _result(value: Any, seconds: float) -> Any:
    if not inspect.isawaitable(value):
        return value
    async with asyncio.timeout(seconds):
        return await value


@dataclass(frozen=True)
class EnvironmentAgent:
    """Plays an environment: each reply goes to `step`, what comes back is shown, until it is done."""

    factory: Callable[[], Any]
    max_turns: int
    seconds: float = 10.0  # one reset or step may take this long
    seat: Callable[[], Seat] = Inline

    reward: ClassVar[str] = "given"  # what scores its episodes when the user names no reward

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What a pool of workers must have for `in_workers`."""
        return {WORKERS: self.factory}

    def in_workers(self, pool: WorkerPool) -> EnvironmentAgent:
        """The same with every environment in a worker of its own."""
        return replace(self, seat=partial(InWorker, pool))

    def opening(self, task: Task) -> tuple[Messages, None]:
        """The task's own messages: an environment says what it adds when it is reset."""
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        async with self._world(policy) as world:
            opening = _messages("reset", await world.ask("reset", task)) or list(task.messages)
            said: list[Message] = []
            stop, done = await self._play(policy, world, opening, said)
            if done is None and world.seat.has("end"):
                done = await world.ask("end", stop.value)
                if not isinstance(done, Done):
                    raise EnvironmentFailed("environment", f"end must return covey.Done(reward=...); got {done!r:.80}")
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *beyond(opening, task.messages), *said),
            stop=stop,
            given=None if done is None else _table(done),
        )

    async def _play(
        self, policy: Policy, world: World, opening: Messages, said: list[Message]
    ) -> tuple[StopReason, Done | None]:
        for _ in range(self.max_turns):
            try:
                reply = await policy.ask([*opening, *said])
            except NoRoom:
                return StopReason.LENGTH, None
            said.append({"role": "assistant", "content": reply.text})
            if reply.stop is StopReason.LENGTH:
                return reply.stop, None
            answer = await world.ask("step", reply.text)
            if isinstance(answer, Done):
                said += answer.messages
                return reply.stop, answer
            said += _messages("step", answer)
        return StopReason.TURNS, None

    @asynccontextmanager
    async def _world(self, policy: Policy) -> AsyncIterator[World]:
        """A fresh environment, closed at the end whatever happens. Waiting for a place is not the episode's time."""
        world = World(self.seat(), getattr(self.factory, "__name__", "environment"), self.seconds)
        with policy.waiting():
            await world.guard("__init__", world.seat.start(self.factory, self.seconds))
        try:
            yield world
        finally:
            await world.guard("close", world.seat.close(self.seconds))


@dataclass(frozen=True)
class World:
    """An episode's environment. What it does wrong is a failure of this episode alone."""

    seat: Seat
    name: str
    seconds: float

    async def ask(self, method: str, argument: Any) -> Any:
        return await self.guard(method, self.seat.call(method, argument, self.seconds))

    async def guard(self, what: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (TimeoutError, WorkerTimeout):
            text = f"{self.name}.{what} took longer than agent.tool_seconds={self.seconds:g}"
            raise EnvironmentFailed("environment_timeout", text) from None
        except (EnvironmentFailed, InputError, RunFailed):
            raise
        except WorkerError as error:  # its own exception, or its end
            raise EnvironmentFailed("environment", f"{self.name}.{what}: {error}") from error
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed("environment", f"{self.name}.{what}: {describe_error(error)}") from error


def _messages(method: str, value: Any) -> list[Message]:
    """What an environment returned, as messages: a text is the user's."""
    if value is None and method == "reset":
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    found = [value] if isinstance(value, Mapping) else value
    if not isinstance(found, Sequence) or not found or not all(_is_message(message) for message in found):
        ends = ", or covey.Done(reward=...)" if method == "step" else ""
        raise EnvironmentFailed("environment", f"{method} must return messages or a text{ends}; got {value!r:.80}")
    return list(found)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value


def beyond(opening: Messages, own: Messages) -> Messages:
    """Messages without the task's own, where they begin with them."""
    return opening[len(own) :] if list(opening[: len(own)]) == list(own) else opening


def _table(done: Done) -> RewardTable | None:
    if done.reward is None or isinstance(done.reward, Mapping):
        return done.reward
    return {"reward": float(done.reward)}
