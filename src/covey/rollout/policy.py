"""`EpisodePolicy`: an agent's interface to the engine. It adds the sampling settings and the random stream of one
episode, and records the turns.

An agent passes messages. If they extend an earlier conversation of the episode, the prompt extends its tokens, so an
episode of many turns is trained on as one row.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from covey.errors import EpisodeError, InputError
from covey.images import has_images, keep_last, with_images
from covey.protocols import NoRoom, Reply, RolloutEngine, check_turn_reward
from covey.rollout.rendering import CONTEXT_USED_UP, PastReply, Renderer, Tools
from covey.streams import stream_seed
from covey.types import Completion, ImageSpan, Messages, Prompt, Sampling, StopReason, Turn

if TYPE_CHECKING:
    from covey.rollout.opponents import Opponents

CONTEXT = "model.context_length"
LONGEST_STATE = 80  # characters of a state that are kept as they are; the rest becomes a hash
LONG = 2**16  # characters: longer messages and tools are rendered in a thread


def state_key(state: Any) -> str:
    """A state as a text of limited length: a text itself, other values as JSON."""
    text = state if isinstance(state, str) else _json(state)
    if len(text) <= LONGEST_STATE:
        return text
    return f"{text[:LONGEST_STATE]}… {blake2b(text.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


def _json(state: Any) -> str:
    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):  # numbers and arrays of NumPy and torch
            return value.tolist()
        raise TypeError(type(value).__name__)

    try:
        return json.dumps(state, sort_keys=True, default=plain)
    except (TypeError, ValueError, RecursionError) as error:  # also keys of different types, and cycles
        raise ValueError(f"the state of a turn must be a text or JSON, got {state!r:.60} ({error})") from error


class NotFinite(EpisodeError):
    """A reply with non-finite log-probs: its tokens are meaningless and cannot be trained on."""

    cause = "nonfinite"


class EpisodePolicy:
    """One episode's view of the engine. Each turn samples from a stream of its own and is recorded."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        sampling: Sampling,
        stream: tuple[object, ...],
        *,
        deadline: asyncio.Timeout | None = None,
        first_prompts: dict[str, Prompt] | None = None,
        max_response_tokens: int | None = None,
        keep_images: int | None = None,
        opponents: Opponents | None = None,
    ) -> None:
        """`first_prompts`: prompts rendered by other attempts; all attempts at a task start with the same.
        `keep_images`: only the last images of a conversation are shown. `opponents`: past policies that play some
        roles."""
        self.engine = engine
        self.renderer = renderer
        self.sampling = sampling
        self.stream = stream
        self.deadline = deadline
        self.first_prompts = {} if first_prompts is None else first_prompts
        self.max_response_tokens = max_response_tokens
        self.keep_images = keep_images
        self.opponents = opponents
        self._turns: dict[int, Turn] = {}
        self._reserved: dict[int, int] = {}  # token limits of the replies in progress
        self._replies: list[PastReply] = []
        self._started = 0  # turns: several may be sampled concurrently, each from its own stream
        self._rendering = asyncio.Lock()
        self._rendered: tuple[Any, Prompt] | None = None  # the last long messages and their prompt
        self._waiting = 0  # callers of `waiting`, which stops the clock
        self._remaining = 0.0  # seconds of the episode when the clock was stopped
        self.cut_by: str | None = None  # limit that ended or prevented the last reply (Episode.cut_by)

    @property
    def turns(self) -> list[Turn]:
        """The recorded turns, in the order in which they were requested."""
        return [self._turns[number] for number in sorted(self._turns)]

    @property
    def sees_images(self) -> bool:
        return self.renderer.vision is not None

    def render(self, messages: Messages, tools: Tools = None) -> tuple[int, ...]:
        """Prompt ids of messages. Earlier prompts and sampled tokens keep their ids."""
        prompt = self._render(self._readable(messages), tools)
        if prompt.images:
            raise InputError("policy.render gives ids without their images\n  use policy.ask")
        return prompt.ids

    def _readable(self, messages: Messages) -> Messages:
        """The messages with their images as `Image` or `ImageFile`, only the last `keep_images` of them."""
        if not any(has_images(message.get("content")) for message in messages):
            return messages
        messages = with_images(messages)
        return messages if self.keep_images is None else keep_last(messages, self.keep_images)

    def _render(self, messages: Messages, tools: Tools) -> Prompt:
        for reply in sorted(self._replies, key=lambda reply: -len(reply.messages)):
            if reply.is_continued_by(messages, tools):
                prompt = self.renderer.next_prompt(reply, messages[len(reply.messages) + 1 :])
                return self.renderer.render(messages, tools) if prompt is None else prompt
        if self._turns:
            return self.renderer.render(messages, tools)
        key = repr((messages, tools))
        if key not in self.first_prompts:
            self.first_prompts[key] = self.renderer.render(messages, tools)
        return self.first_prompts[key]

    async def _prompt(self, messages: Messages, tools: Tools) -> Prompt:
        """Like `_render`, but long messages are rendered in a thread, so that the event loop is not blocked. Concurrent
        requests with the same messages share one rendering."""
        if sum(len(str(message)) for message in messages) + len(str(tools)) < LONG:
            return self._render(messages, tools)
        key = (tuple(messages), tools)
        async with self._rendering:
            if self._rendered is None or self._rendered[0] != key:
                self._rendered = (key, await asyncio.to_thread(self._render, *key))
            return self._rendered[1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.renderer.decode(token_ids)

    def cut(self, text: str, tokens: int) -> str:
        return self.renderer.cut(text, tokens)

    async def generate(self, token_ids: Sequence[int], **settings: Any) -> Completion:
        turn = await self._turn(token_ids, **settings)
        return Completion(turn.completion_ids, turn.logprobs, turn.versions, turn.stop)

    async def _turn(
        self,
        token_ids: Sequence[int],
        *,
        images: tuple[ImageSpan, ...] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        role: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Turn:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        number, (setting, available) = self._started, self._tightest_limit(len(token_ids))
        limit = available if max_tokens is None else min(available, max_tokens)
        sampling = replace(
            self.sampling,
            seed=stream_seed(*self.stream, number),
            stop=(*self.sampling.stop, *stop),
            max_tokens=limit,
            temperature=self.sampling.temperature if temperature is None else temperature,
            top_p=self.sampling.top_p if top_p is None else top_p,
        )
        engine = self.engine
        if self.opponents is not None and role in self.opponents.roles:
            engine, trained = self.opponents.engine, False
        self._started += 1
        self._reserved[number] = limit
        try:
            with self.waiting():
                # Only some engines take images.
                done = await engine.generate(token_ids, sampling, *((images,) if images else ()))
        finally:
            del self._reserved[number]
        if not all(map(math.isfinite, done.logprobs)):
            raise NotFinite(
                "the model's log-probs are not finite: its weights or activations have overflowed, or are NaN"
            )
        turn = Turn(
            tuple(token_ids),
            done.token_ids,
            done.logprobs,
            done.versions,
            done.stop,
            trained=trained,
            images=images,
            role=role,
        )
        self._turns[number] = turn
        if turn.stop is StopReason.LENGTH:
            self.cut_by = setting if limit == available else "request"
        return turn

    def _tightest_limit(self, prompt_tokens: int) -> tuple[str, int]:
        """The setting with the tightest limit for the next reply, and the tokens it allows. Raises `NoRoom` if it
        allows none."""
        allowed = {"rollout.max_tokens": self.sampling.max_tokens}
        if self.max_response_tokens is not None:
            used = sum(len(turn.completion_ids) for turn in self._turns.values()) + sum(self._reserved.values())
            allowed["agent.max_response_tokens"] = self.max_response_tokens - used
        if self.renderer.context_length is not None:
            allowed[CONTEXT] = self.renderer.context_length - prompt_tokens
        setting, tokens = min(allowed.items(), key=lambda pair: pair[1])
        if tokens < 1:
            self.cut_by = setting
            raise NoRoom(CONTEXT_USED_UP if setting == CONTEXT else f"no room for a reply: {setting} is used up")
        return setting, tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop the episode's clock, because waiting times for the engine or a worker depend on other episodes."""
        if self.deadline is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._remaining = (self.deadline.when() or loop.time()) - loop.time()
            self.deadline.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                with suppress(RuntimeError):  # the episode has ended meanwhile
                    self.deadline.reschedule(loop.time() + self._remaining)

    async def ask(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        role: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Reply:
        """The reply to messages. A stop string that ended it is removed from its text."""
        messages = self._readable(messages)
        try:
            prompt = await self._prompt(messages, tools)
        except NoRoom:  # longer than the context
            self.cut_by = CONTEXT
            raise
        turn = await self._turn(
            prompt.ids,
            images=prompt.images,
            stop=stop,
            max_tokens=max_tokens,
            trained=trained,
            role=role,
            temperature=temperature,
            top_p=top_p,
        )
        text = self.renderer.reply_text(turn.completion_ids)
        if turn.stop is StopReason.STOP:
            ends = [at for end in (*self.sampling.stop, *stop) if (at := text.find(end)) >= 0]
            text = text[: min(ends)] if ends else text
        message = {"role": "assistant", "content": text}
        sampled = (turn.completion_ids, turn.stop, message, prompt.images)
        self._replies.append(PastReply(tuple(messages), tools, prompt.ids, *sampled))
        return Reply(text, turn.stop, turn)

    def remember(self, message: Mapping[str, Any]) -> None:
        """Set the message that represents the last reply in later turns, if it is not just its text."""
        self._replies[-1] = replace(self._replies[-1], message=message)

    def record_turn(self, *, reward: float | None = None, state: Any = None) -> None:
        """Set the reward of the last turn and the state in which it was sampled, where they are not None."""
        check_turn_reward(reward)
        if not self._turns:
            raise ValueError("there is no turn yet: ask the policy for a reply before you give it a reward")
        number = max(self._turns)
        turn = self._turns[number]
        self._turns[number] = replace(
            turn,
            reward=turn.reward if reward is None else float(reward),
            state=turn.state if state is None else state_key(state),
        )

    async def chat(self, messages: Messages) -> str:
        """The reply to messages, as text."""
        return (await self.ask(messages)).text
