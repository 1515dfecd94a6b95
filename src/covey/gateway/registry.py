"""The open episodes of the gateway, and their registry.

An `OpenEpisode` answers requests with its policy, which keeps the turns. A request whose messages continue an earlier
reply continues from that reply's tokens. Requests may arrive concurrently, and one may request several replies: each
reply is a turn of the episode, and all of them are trained on.

The `Registry` checks keys: one admin token, and a key for each episode. An episode is open until a client posts its
reward or finishes it, or the run ends it. Without a run, it is also closed after a day without a request, when the next
episode is opened. Closed episodes are remembered for a while, so that a late or repeated post gets a clear error and
changes nothing. In training, the registry also holds the queue of attempts that wait for a client.
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
    ChatRequest,
    Choice,
    Message,
    RequestRefused,
    as_sent_back,
    read_messages,
    to_openai,
    to_openai_content,
    to_template,
)
from covey.images import has_images, is_image, load
from covey.protocols import NoRoom, Policy
from covey.replies import with_system
from covey.storage import StorageFailed
from covey.tool_calls import Format, Parsed, ReplyMemory
from covey.types import Episode, Messages, RewardTable, Sampling, StopReason, Task

# Columns that hold the solution in common data sets.
SOLUTION_COLUMNS = re.compile(
    "answers?|canonical_solution|cases|ground_truth|outputs|reward_model|solutions?|test_list|tests?|tool_calls"
)
MAX_CLOSED = 10_000  # closed episodes that are remembered
IDLE_SECONDS = 24 * 3600.0  # an episode outside of a run is closed after this time without a request
# Environment variable with the admin token; without it every server makes a new one.
TOKEN = "COVEY_TOKEN"  # noqa: S105 - the variable's name


@dataclass(frozen=True)
class EpisodeRules:
    """Settings of all episodes of a server. `sampling`: that of the run, which requests may not change; None: a request
    chooses."""

    model: str
    format: Format | None = None
    sampling: Sampling | None = None
    max_turns: int | None = None
    hidden: frozenset[str] = frozenset()  # columns of a task that clients do not see


class OpenEpisode:
    def __init__(
        self, id: str, key: str, policy: Policy, task: Task, rules: EpisodeRules, metadata: Any = None
    ) -> None:
        self.id = id
        self.key = key
        self.policy = policy
        self.task = task
        self.rules = rules
        self.metadata = metadata
        self.rewards: RewardTable | None = None  # posted by the client
        self.error: Exception | None = None  # of the engine
        self.closed = asyncio.Event()
        self.opened_at = self.last_request_at = time.monotonic()
        self._replies = ReplyMemory(rules.format)
        self._running: set[asyncio.Task[list[Choice]]] = set()
        self._stop: StopReason | None = None
        self._conversation: tuple[Mapping[str, Any], ...] = ()
        self._requested_replies = 0

    # -- Requests ----------------------------------------------------------------------------------------------------

    def start(self, request: ChatRequest) -> asyncio.Task[list[Choice]]:
        """Sample the replies to a request. The task is cancelled when the episode is closed."""
        if self.closed.is_set():  # while the body was being received
            raise _episode_over()
        self._check(request)
        self._stop = None  # the client goes on after a refusal
        self.last_request_at = time.monotonic()
        self._requested_replies += request.n
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _check(self, request: ChatRequest) -> None:
        if self.rules.sampling is not None:
            _require_same("temperature", request.temperature, self.rules.sampling.temperature)
            _require_same("top_p", request.top_p, self.rules.sampling.top_p)
        if request.tools and self.rules.format is None:
            raise RequestRefused(400, "tools: it is not known how this model writes tool calls; set agent.format")
        limit = self.rules.max_turns
        if limit is not None and self._requested_replies + request.n > limit:
            self._stop = StopReason.TURNS
            raise RequestRefused(
                400, f"an episode has at most {limit} replies (agent.max_turns)", code="too_many_turns"
            )

    async def _answer(self, request: ChatRequest) -> list[Choice]:
        samples: list[asyncio.Task[Choice]] = []
        try:
            return await self._choices(request, samples)
        finally:
            for sample in samples:
                sample.cancel()
            made = [one for one in samples if one.done() and not one.cancelled() and one.exception() is None]
            self._requested_replies -= request.n - len(made)  # those of a refused request do not count

    async def _choices(self, request: ChatRequest, samples: list[asyncio.Task[Choice]]) -> list[Choice]:
        messages: Messages = to_template(self._replies, request.messages)
        format = self.rules.format if request.tools else None
        native = format is not None and format.native_tools
        if format is not None and not native:
            messages = with_system(messages, _instructions(format, request.tools))
        tools = request.tools if native else None
        samples += [asyncio.create_task(self._sample(request, messages, tools)) for _ in range(request.n)]
        try:
            choices = await asyncio.gather(*samples)
        except NoRoom as full:
            self._stop = StopReason.LENGTH
            raise RequestRefused(400, str(full), code="context_length_exceeded") from full
        except InputError as mistake:  # the template refuses these messages
            raise RequestRefused(400, str(mistake), param="messages") from mistake
        self._conversation = (*request.messages, _with_text(choices[0].message))
        return choices

    async def _sample(self, request: ChatRequest, messages: Sequence[Mapping[str, Any]], tools: Any) -> Choice:
        format = self.rules.format if request.may_call else None
        fixed = self.rules.sampling is not None
        reply = await self.policy.ask(
            messages,
            tools=tools,
            stop=(*request.stop, *(format.stop if format is not None else ())),
            max_tokens=request.max_tokens,
            temperature=None if fixed else request.temperature,
            top_p=None if fixed else request.top_p,
        )
        turn = reply.turn
        assert turn is not None
        parsed = Parsed({"role": "assistant", "content": reply.text})
        if format is not None and reply.stop is not StopReason.LENGTH:
            parsed = format.parse(reply.text)
            self.policy.remember(parsed.message)
        self._replies.add(parsed, as_sent_back(parsed))
        return Choice(to_openai(parsed), turn, [self.policy.decode([token]) for token in turn.completion_ids])

    def record_turn(self, reward: Any, state: Any) -> None:
        """Set the reward of the last reply, and the state in which it was requested."""
        try:
            self.policy.record_turn(reward=reward, state=state)
        except ValueError as error:
            raise RequestRefused(400, str(error), param="reward") from error

    # -- Closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse further requests and cancel those in progress."""
        self.closed.set()
        for task in self._running:
            task.cancel()

    async def wait_until_idle(self) -> None:
        """Wait until cancelled requests no longer use the policy."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def to_episode(self) -> Episode:
        turns = tuple(self.policy.turns)
        stop = self._stop or (turns[-1].stop if turns else None)
        seconds = time.monotonic() - self.opened_at
        return Episode(self.task, turns, self._messages(), stop=stop, given=self.rewards, seconds=seconds)

    @property
    def limit_reached(self) -> bool:
        """Whether the last request was refused because the episode may have no further reply."""
        return self._stop is not None

    def _messages(self) -> tuple[Mapping[str, Any], ...]:
        """The task's messages and the last conversation. A conversation that begins with the task's messages only adds
        the rest; one with the client's own prompt is kept whole."""
        own = tuple(self.task.messages)
        starts_with_task = [_with_text(message) for message in self._conversation[: len(own)]] == [
            _with_text(message) for message in own
        ]
        return (*own, *(self._conversation[len(own) :] if starts_with_task else self._conversation))


def _episode_over() -> RequestRefused:
    return RequestRefused(410, "this episode is over: it accepts no further requests", code="episode_over")


def _instructions(format: Format, tools: Any) -> str | None:
    """The tools in words. A client may send schemas of any shape."""
    try:
        return format.instructions(tools)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error!s:.100}"
        raise RequestRefused(
            400, f"tools: their parameters are not a JSON schema that can be shown ({reason})"
        ) from error


def _require_same(name: str, requested: float | None, setting: float) -> None:
    if requested is not None and requested != setting:
        raise RequestRefused(
            400,
            f"{name}={requested:g}, but this run samples with rollout.{name}={setting:g}: training needs tokens drawn "
            f"from the distribution that the learner assumes; leave {name} out, or set rollout.{name}",
            param=name,
        )


def _with_text(message: Mapping[str, Any]) -> Message:
    """A message whose content is a string, as rewards expect it, or a list with images."""
    content: Any = message.get("content") or ""
    if has_images(content):
        content = [{**part, "image": load(part["image"])} if is_image(part) else part for part in content]
    return {**message, "content": content}


# -- The registry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClosedEpisode:
    id: str
    key_digest: bytes
    by_client: bool  # the client posted a reward or finished it; otherwise the run ended it


@dataclass(frozen=True)
class Admin:
    """The caller with the admin token."""


Caller = Admin | OpenEpisode | ClosedEpisode
NewPolicy = Callable[[], Policy]
OnClosed = Callable[[OpenEpisode], None]


class Registry:
    """The episodes of one server. With `new_policy`, anyone with the token opens episodes (covey serve); otherwise a
    run offers its attempts. `on_closed` is called for each closed episode."""

    def __init__(
        self,
        rules: EpisodeRules,
        *,
        new_policy: NewPolicy | None = None,
        on_closed: OnClosed | None = None,
        offers: bool = True,
    ) -> None:
        self.rules = rules
        self.token = _token()
        self.new_policy = new_policy
        self.on_closed = on_closed or (lambda episode: None)
        self.offers = offers  # whether clients may take attempts
        self.last_taken_at = time.monotonic()
        self._open: dict[str, OpenEpisode] = {}
        self._closed: OrderedDict[str, ClosedEpisode] = OrderedDict()
        self._keys: dict[bytes, str] = {}  # digest of a key → id
        self._taken: set[str] = set()  # ids of open attempts that a client has taken
        self._offered: deque[tuple[OpenEpisode, asyncio.Event]] = deque()
        self._changed = asyncio.Condition()
        self._closing = False

    @property
    def shown_token(self) -> str:
        """The token for the start-up message. One from the environment is shown as the name of its variable."""
        return f"${TOKEN}" if os.environ.get(TOKEN) == self.token else self.token

    # -- Opening and closing -----------------------------------------------------------------------------------------

    def open(self, policy: Policy, task: Task, *, metadata: Any = None, key: str | None = None) -> OpenEpisode:
        ident = secrets.token_hex(8)
        episode = OpenEpisode(ident, key or f"ck-{secrets.token_urlsafe(24)}", policy, task, self.rules, metadata)
        self._open[ident] = episode
        self._keys[_digest(episode.key)] = ident
        return episode

    def open_new(self, task: Task | None = None, *, metadata: Any = None, key: str | None = None) -> OpenEpisode:
        """Open an episode that belongs to no run."""
        assert self.new_policy is not None
        self._close_idle()
        task = task or Task(secrets.token_hex(8), ())
        return self.open(self.new_policy(), task, metadata=metadata, key=key)

    def end(self, episode: OpenEpisode, *, by_client: bool = False, rewards: RewardTable | None = None) -> None:
        """Close an episode; closing it again changes nothing. If `on_closed` cannot record it, the episode takes no
        more requests but stays registered, so that a later call can record it."""
        if episode.id not in self._open:
            return
        if rewards is not None and "reward" not in rewards:
            rewards = {**rewards, "reward": sum(value or 0.0 for value in rewards.values())}
        episode.rewards = rewards
        episode.close()
        self.on_closed(episode)
        del self._open[episode.id]
        self._closed[episode.id] = ClosedEpisode(episode.id, _digest(episode.key), by_client)
        if len(self._closed) > MAX_CLOSED:
            _, oldest = self._closed.popitem(last=False)
            del self._keys[oldest.key_digest]
        self._taken.discard(episode.id)
        self.last_taken_at = time.monotonic()  # its client may take the next attempt now

    def _close_idle(self) -> None:
        """Close episodes whose clients have been silent for IDLE_SECONDS, and free the keys that clients chose. If the
        disk is full they stay open; the next call, or closing the server, tries again."""
        now = time.monotonic()
        for episode in [one for one in self._open.values() if now - one.last_request_at > IDLE_SECONDS]:
            with suppress(StorageFailed):
                self.end(episode)
                if episode.key.startswith(f"{self.token}:"):
                    del self._keys[self._closed.pop(episode.id).key_digest]

    async def close(self) -> None:
        """End all episodes and wake the clients that wait for an attempt. Raises the first storage error at the end."""
        self._closing = True
        failure: StorageFailed | None = None
        for episode in list(self._open.values()):
            try:
                self.end(episode)
            except StorageFailed as error:
                failure = failure or error
        await self._notify()
        if failure is not None:
            raise failure

    # -- Callers -----------------------------------------------------------------------------------------------------

    def caller(self, key: str) -> Caller:
        """The caller that a key belongs to. With `new_policy`, a new key TOKEN:NAME opens an episode."""
        if hmac.compare_digest(_digest(key), _digest(self.token)):
            return Admin()
        ident = self._keys.get(_digest(key))  # looked up by digest: the time it takes reveals nothing about other keys
        if ident is not None:
            return self._open.get(ident) or self._closed[ident]
        token, _, name = key.partition(":")
        if self.new_policy is not None and name and hmac.compare_digest(_digest(token), _digest(self.token)):
            return self.open_new(metadata={"name": name}, key=key)
        raise RequestRefused(401, "unknown key: use the token that was printed, or an episode's key")

    def episode_of(self, caller: Caller) -> OpenEpisode:
        """The episode in which a caller may chat."""
        if isinstance(caller, OpenEpisode):
            return caller
        if isinstance(caller, ClosedEpisode):
            raise _episode_over()
        if self.new_policy is None:
            raise RequestRefused(403, "this is the admin's token: POST /episodes returns the key of an episode")
        return self.episode_of(self.caller(f"{self.token}:default"))

    def find(self, caller: Caller, ident: str) -> OpenEpisode:
        """An open episode that the caller may close: its own, or any with the token."""
        if not isinstance(caller, Admin):
            if ident not in ("current", caller.id):
                raise RequestRefused(403, "this key is for another episode")
            ident = caller.id
        if ident in self._open:
            return self._open[ident]
        if ident not in self._closed:
            raise RequestRefused(404, f"there is no episode {ident!r:.40}")
        if self._closed[ident].by_client:
            raise RequestRefused(409, "this episode was closed before: nothing has changed", code="episode_closed")
        raise RequestRefused(410, "this episode is over, its time ran out: nothing has changed", code="episode_over")

    # -- Attempts that wait for a client -----------------------------------------------------------------------------

    async def offer(self, episode: OpenEpisode, patience: float) -> bool:
        """Wait until a client takes the attempt. False if no client has taken any attempt for `patience` seconds. The
        timer does not run while some attempt is being played: one client may play all of them, one after another."""
        taken = asyncio.Event()
        entry = (episode, taken)
        offered_at = time.monotonic()
        self._offered.append(entry)
        await self._notify()
        try:
            while not taken.is_set():
                now = time.monotonic()
                seconds = (now if self._taken else max(offered_at, self.last_taken_at)) + patience - now
                if seconds <= 0:
                    return False
                with suppress(TimeoutError):
                    await asyncio.wait_for(taken.wait(), seconds)
            return True
        finally:
            if entry in self._offered:
                self._offered.remove(entry)

    async def take(self, wait: float) -> OpenEpisode | None:
        """The attempt that has waited longest; None if there is none within `wait` seconds."""
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: self._offered or self._closing)
        except TimeoutError:
            return None
        if not self._offered:
            return None
        episode, taken = self._offered.popleft()
        self._taken.add(episode.id)
        self.last_taken_at = time.monotonic()
        taken.set()
        return episode

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


# -- Tasks as clients see and send them --------------------------------------------------------------------------------


def public_task(task: Task, hidden: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A task without its answer, without columns that hold the solution, and without `hidden` columns."""
    columns = {
        name: value
        for name, value in task.columns.items()
        if name not in hidden and not _reveals_answer(name, value, task.answer)
    }
    messages = [{**message, "content": to_openai_content(message.get("content"))} for message in task.messages]
    return {"id": task.id, "messages": messages, "columns": columns}


def _reveals_answer(name: str, value: Any, answer: Any) -> bool:
    if SOLUTION_COLUMNS.fullmatch(name) or (answer is not None and str(value).strip() == str(answer).strip()):
        return True
    if isinstance(value, Mapping):
        return any(_reveals_answer(str(inner), item, answer) for inner, item in value.items())
    return isinstance(value, list) and any(_reveals_answer("", item, answer) for item in value)


def read_task(body: Mapping[str, Any]) -> Task | None:
    """The task of a request: `{"task": {"id": ..., "messages": [...], ...}}`."""
    raw = body.get("task")
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise RequestRefused(400, 'task: must be an object, such as {"id": "t1", "messages": [...]}', param="task")
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
