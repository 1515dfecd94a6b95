"""One episode under way: every request is answered by its policy, which keeps the turns.

Requests whose messages go on from an earlier reply go on from its tokens. Several may come at once, and one may ask for
several replies: each reply is a turn of the episode, and all of them are learned from.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError
from covey.gateway.openai_api import (
    Asked,
    Choice,
    Format,
    Memory,
    Message,
    Refused,
    Said,
    outward,
    read_messages,
    with_system,
)
from covey.protocols import NoRoom, Policy
from covey.storage import StorageFailed
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


# -- Who may come in: one admin's token, a key for each episode; and the attempts that wait for a program --------------
# An episode is open until its reward is posted, it is finished, the run ends it, or, without a run, nobody has asked
# for anything in it for a day when another one is opened. What became of it is remembered for
# a while, so that a late or a second post is told so and changes nothing.

GOLD = re.compile(  # columns that tell what is right, in the data sets that are around
    "answers?|canonical_solution|cases|ground_truth|outputs|reward_model|solutions?|test_list|tests?|tool_calls"
)
REMEMBERED = 10_000  # episodes that are over
SILENT = 24 * 3600.0  # seconds without a request after which an episode that no run has asked for is over
# In the environment: the admin's token, where it is not to be a new one each time.
TOKEN = "COVEY_TOKEN"  # noqa: S105 - the variable's name


@dataclass(frozen=True)
class Over:
    """An episode of the past, and who ended it."""

    id: str
    digest: bytes  # of its key
    by_client: bool  # its reward was posted, or it was finished; otherwise the run ended it


@dataclass(frozen=True)
class Admin:
    """The caller with the token."""


Caller = Admin | Live | Over
NewPolicy = Callable[[], Policy]
Closed = Callable[[Live], None]


class Book:
    """The episodes of one server. With `new_policy` anybody with the token opens episodes; otherwise a run offers its
    attempts. `on_closed` is called for each that is over."""

    def __init__(
        self, rules: Rules, *, new_policy: NewPolicy | None = None, on_closed: Closed | None = None, offers: bool = True
    ) -> None:
        self.rules = rules
        self.token = _token()
        self.new_policy = new_policy
        self.on_closed = on_closed or (lambda live: None)
        self.offers = offers  # whether programs may come for attempts
        self.last_taken = time.monotonic()
        self._live: dict[str, Live] = {}
        self._over: OrderedDict[str, Over] = OrderedDict()
        self._keys: dict[bytes, str] = {}  # digest of a key → id
        self._taken: set[str] = set()  # ids of attempts that somebody plays
        self._offered: deque[tuple[Live, asyncio.Event]] = deque()
        self._arrived = asyncio.Condition()
        self._closing = False

    @property
    def shown_token(self) -> str:
        """For who starts a server. One that is in the environment stays there."""
        return f"${TOKEN}" if os.environ.get(TOKEN) == self.token else self.token

    # -- opening and ending ------------------------------------------------------------------------------------------

    def open(self, policy: Policy, task: Task, *, metadata: Any = None, key: str | None = None) -> Live:
        ident = secrets.token_hex(8)
        live = Live(ident, key or f"ck-{secrets.token_urlsafe(24)}", policy, task, self.rules, metadata)
        self._live[ident] = live
        self._keys[_digest(live.key)] = ident
        return live

    def open_new(self, task: Task | None = None, *, metadata: Any = None, key: str | None = None) -> Live:
        """An episode that no run has asked for."""
        assert self.new_policy is not None
        self._end_silent()
        task = task or Task(secrets.token_hex(8), ())
        return self.open(self.new_policy(), task, metadata=metadata, key=key)

    def end(self, live: Live, *, by_client: bool = False, given: RewardTable | None = None) -> None:
        """Close an episode, once; a second time changes nothing. One that cannot be recorded takes no more requests,
        but stays: it can be closed again when there is room."""
        if live.id not in self._live:
            return
        live.given = given
        live.close()
        self.on_closed(live)
        del self._live[live.id]
        self._over[live.id] = Over(live.id, _digest(live.key), by_client)
        if len(self._over) > REMEMBERED:
            _, gone = self._over.popitem(last=False)
            del self._keys[gone.digest]
        self._taken.discard(live.id)
        self.last_taken = time.monotonic()  # whoever played it may come for the next

    def _end_silent(self) -> None:
        """Episodes that nobody has asked for anything in for so long: their clients are gone. A key of the client's own
        making is free again. Where a disk is full they wait for the next time, or for the server's end, which tells.
        """
        now = time.monotonic()
        for live in [live for live in self._live.values() if now - live.used > SILENT]:
            with suppress(StorageFailed):
                self.end(live)
                if live.key.startswith(f"{self.token}:"):
                    del self._keys[self._over.pop(live.id).digest]

    async def close(self) -> None:
        """End all episodes; who waits for an attempt waits no longer. What a disk refuses is told when all are over."""
        self._closing = True
        refused: StorageFailed | None = None
        for live in list(self._live.values()):
            try:
                self.end(live)
            except StorageFailed as error:
                refused = refused or error
        await self._notify()
        if refused is not None:
            raise refused

    # -- callers -----------------------------------------------------------------------------------------------------

    def caller(self, key: str) -> Caller:
        """Whose key it is. With `new_policy`, one that begins with the token opens an episode."""
        if hmac.compare_digest(_digest(key), _digest(self.token)):
            return Admin()
        ident = self._keys.get(_digest(key))  # by its digest: how long it takes says nothing about other keys
        if ident is not None:
            return self._live.get(ident) or self._over[ident]
        token, _, name = key.partition(":")
        if self.new_policy is not None and name and hmac.compare_digest(_digest(token), _digest(self.token)):
            return self.open_new(metadata={"name": name}, key=key)
        raise Refused(401, "this key opens nothing here: use the token that was printed, or an episode's key")

    def playing(self, caller: Caller) -> Live:
        """The episode that a caller plays."""
        if isinstance(caller, Live):
            return caller
        if isinstance(caller, Over):
            raise Refused(410, "this episode is over: nothing more can be asked in it", code="episode_over")
        if self.new_policy is None:
            raise Refused(403, "this is the admin's token: POST /episodes gives a key to play with")
        key = f"{self.token}:default"
        found = self.caller(key)
        return self.playing(found)

    def episode(self, caller: Caller, ident: str) -> Live:
        """An open episode that the caller may close: its own, or any with the token."""
        if not isinstance(caller, Admin) and ident in ("current", caller.id):
            ident = caller.id
        elif not isinstance(caller, Admin):
            raise Refused(403, "this key is for another episode")
        if ident in self._live:
            return self._live[ident]
        if ident not in self._over:
            raise Refused(404, f"there is no episode {ident!r:.40}")
        if self._over[ident].by_client:
            raise Refused(409, "this episode was closed before: nothing has changed", code="episode_closed")
        raise Refused(410, "this episode is over, its time had run out: nothing has changed", code="episode_over")

    # -- attempts that wait for a program ----------------------------------------------------------------------------

    async def offer(self, live: Live, patience: float) -> bool:
        """Wait until somebody comes for the attempt; False if nobody has come for any for so long. While somebody plays
        one, nobody else's is given up: a program may play them one after the other, each for as long as it takes."""
        taken = asyncio.Event()
        place = (live, taken)
        since = time.monotonic()
        self._offered.append(place)
        await self._notify()
        try:
            while not taken.is_set():
                now = time.monotonic()
                left = (now if self._taken else max(since, self.last_taken)) + patience - now
                if left <= 0:
                    return False
                with suppress(TimeoutError):
                    await asyncio.wait_for(taken.wait(), left)
            return True
        finally:
            if place in self._offered:
                self._offered.remove(place)

    async def take(self, wait: float) -> Live | None:
        """The attempt that has waited longest; None if there was none for so long."""
        try:
            async with asyncio.timeout(wait), self._arrived:
                await self._arrived.wait_for(lambda: self._offered or self._closing)
        except TimeoutError:
            return None
        if not self._offered:
            return None
        live, taken = self._offered.popleft()
        self._taken.add(live.id)
        self.last_taken = time.monotonic()
        taken.set()
        return live

    async def _notify(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()


def shown_task(task: Task, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What a program may know of a task: never its answer, a column that holds it, or a `hidden` one."""
    kept = {name: value for name, value in task.columns.items() if name not in hidden}
    columns = {name: value for name, value in kept.items() if not _tells(name, value, task.answer)}
    return {"id": task.id, "messages": [dict(message) for message in task.messages], "columns": columns}


def _tells(name: str, value: Any, answer: Any) -> bool:
    if GOLD.fullmatch(name) or (answer is not None and str(value).strip() == str(answer).strip()):
        return True
    if isinstance(value, Mapping):
        return any(_tells(str(inner), item, answer) for inner, item in value.items())
    return isinstance(value, list) and any(_tells("", item, answer) for item in value)


def read_task(body: Mapping[str, Any]) -> Task | None:
    """A task that a client brings: `{"task": {"id": ..., "messages": [...], ...}}`."""
    raw = body.get("task")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise Refused(400, 'task: must be an object, such as {"id": "t1", "messages": [...]}', param="task")
    messages = read_messages(raw["messages"]) if raw.get("messages") else ()
    columns = {name: value for name, value in raw.items() if name not in ("id", "messages", "answer")}
    return Task(str(raw.get("id") or secrets.token_hex(8)), messages, raw.get("answer"), columns)


def _token() -> str:
    token = os.environ.get(TOKEN)
    if token is None:
        return secrets.token_urlsafe(24)
    if len(token) < 16 or ":" in token:
        raise InputError(f"{TOKEN} must have at least 16 characters and no colon\n  leave it out to get a new one")
    return token


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
