"""What an agent talks to: an engine, with this episode's sampling settings and random stream, that remembers.

An agent asks with messages. Where they go on from something it asked before, the prompt goes on from those tokens, so
one row of tokens is trained on however many turns an episode has.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from covey.errors import EpisodeError
from covey.protocols import NoRoom, Reply, RolloutEngine
from covey.rollout.rendering import CONTEXT_USED_UP, Renderer, Said, Tools
from covey.streams import stream_seed
from covey.types import Completion, Messages, Sampling, StopReason, Turn

CONTEXT = "model.context_length"
LONG = 2**16  # characters of messages and tools that are not rendered on the event loop


class NotFinite(EpisodeError):
    """A reply whose log-probs are no numbers: nothing can be learned from it, and its tokens mean nothing."""

    cause = "nonfinite"


class EpisodePolicy:
    """One episode's view of the engine. Each turn draws from its own stream and is kept, ids and log-probs."""

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        sampling: Sampling,
        stream: tuple[object, ...],
        *,
        deadline: asyncio.Timeout | None = None,
        first_prompts: dict[str, tuple[int, ...]] | None = None,
        max_response_tokens: int | None = None,
    ) -> None:
        """`first_prompts`: those that other attempts have rendered; all attempts at a task begin with the same."""
        self.engine = engine
        self.renderer = renderer
        self.sampling = sampling
        self.stream = stream
        self.deadline = deadline
        self.first_prompts = {} if first_prompts is None else first_prompts
        self.max_response_tokens = max_response_tokens
        self._turns: dict[int, Turn] = {}
        self._granted: dict[int, int] = {}  # tokens that replies under way may have
        self._said: list[Said] = []
        self._asked = 0  # turns begun: several may be sampled at once, each from its own stream
        self._rendering = asyncio.Lock()
        self._rendered: tuple[Any, tuple[int, ...]] | None = None  # the last long messages, and their prompt
        self._waiting = 0  # how many reasons there are for the clock to stand still
        self._left = 0.0  # seconds of the episode when it was stopped
        self.cut_by: str | None = None  # the limit that ended the last reply, or left no room for one (Episode.cut_by)

    @property
    def turns(self) -> list[Turn]:
        """In the order in which they were asked for."""
        return [self._turns[number] for number in sorted(self._turns)]

    def render(self, messages: Messages, tools: Tools = None) -> tuple[int, ...]:
        """Prompt ids of messages; what was asked or sampled before keeps its ids."""
        for said in sorted(self._said, key=lambda said: -len(said.messages)):
            if said.opens(messages, tools):
                ids = self.renderer.next_prompt(said, messages[len(said.messages) + 1 :])
                return self.renderer.prompt(messages, tools) if ids is None else ids
        if self._turns:
            return self.renderer.prompt(messages, tools)
        key = repr((messages, tools))
        if key not in self.first_prompts:
            self.first_prompts[key] = self.renderer.prompt(messages, tools)
        return self.first_prompts[key]

    async def _prompt(self, messages: Messages, tools: Tools) -> tuple[int, ...]:
        """As `render`, but where there is much to render it is done in a thread, while the event loop serves others.
        Replies to the same messages that are asked for together share one rendering."""
        if sum(len(str(message)) for message in messages) + len(str(tools)) < LONG:
            return self.render(messages, tools)
        asked = (tuple(messages), tools)
        async with self._rendering:
            if self._rendered is None or self._rendered[0] != asked:
                self._rendered = (asked, await asyncio.to_thread(self.render, *asked))
            return self._rendered[1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.renderer.decode(token_ids)

    def cut(self, text: str, tokens: int) -> str:
        return self.renderer.cut(text, tokens)

    def plain(self, text: str) -> str:
        return self.renderer.plain(text)

    async def generate(self, token_ids: Sequence[int], **how: Any) -> Completion:
        turn = await self._turn(token_ids, **how)
        return Completion(turn.completion_ids, turn.logprobs, turn.versions, turn.stop)

    async def _turn(
        self,
        token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Turn:
        number, (setting, room) = self._asked, self._room(len(token_ids))
        limit = min(room, max_tokens or room)
        sampling = replace(
            self.sampling,
            seed=stream_seed(*self.stream, number),
            stop=(*self.sampling.stop, *stop),
            max_tokens=limit,
            temperature=self.sampling.temperature if temperature is None else temperature,
            top_p=self.sampling.top_p if top_p is None else top_p,
        )
        self._asked += 1
        self._granted[number] = limit
        try:
            with self.waiting():
                done = await self.engine.generate(token_ids, sampling)
        finally:
            del self._granted[number]
        if not all(map(math.isfinite, done.logprobs)):
            raise NotFinite(
                "the model's log-probs are not finite: its weights or activations have overflowed, or are NaN"
            )
        turn = Turn(tuple(token_ids), done.token_ids, done.logprobs, done.versions, done.stop, trained=trained)
        self._turns[number] = turn
        if turn.stop is StopReason.LENGTH:
            self.cut_by = setting if limit == room else "request"
        return turn

    def _room(self, prompt_tokens: int) -> tuple[str, int]:
        """The tightest token limit of the next reply: its setting and what is left of it. Raises `NoRoom` at 0."""
        left = {"rollout.max_tokens": self.sampling.max_tokens}
        if self.max_response_tokens is not None:
            used = sum(len(turn.completion_ids) for turn in self._turns.values()) + sum(self._granted.values())
            left["agent.max_response_tokens"] = self.max_response_tokens - used
        if self.renderer.context_length is not None:
            left[CONTEXT] = self.renderer.context_length - prompt_tokens
        setting, tokens = min(left.items(), key=lambda pair: pair[1])
        if tokens < 1:
            self.cut_by = setting
            raise NoRoom(CONTEXT_USED_UP if setting == CONTEXT else f"no room for a reply: {setting} is used up")
        return setting, tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Waiting for the model, or for a place to run, is not the episode's fault: it depends on the others."""
        if self.deadline is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._left = (self.deadline.when() or loop.time()) - loop.time()
            self.deadline.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                with suppress(RuntimeError):  # the episode was ended meanwhile
                    self.deadline.reschedule(loop.time() + self._left)

    async def ask(
        self,
        messages: Messages,
        *,
        tools: Tools = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        temperature: float | None = None,
        top_p: float | None = None,
    ) -> Reply:
        """The reply to messages; a stop string that ended it is cut off its text."""
        try:
            prompt = await self._prompt(messages, tools)
        except NoRoom:  # longer than the context
            self.cut_by = CONTEXT
            raise
        turn = await self._turn(
            prompt, stop=stop, max_tokens=max_tokens, trained=trained, temperature=temperature, top_p=top_p
        )
        text = self.renderer.reply_text(turn.completion_ids)
        if turn.stop is StopReason.STOP:
            ends = [at for end in (*self.sampling.stop, *stop) if (at := text.find(end)) >= 0]
            text = text[: min(ends)] if ends else text
        message = {"role": "assistant", "content": text}
        self._said.append(Said(tuple(messages), tools, prompt, turn.completion_ids, turn.stop, message))
        return Reply(text, turn.stop, turn)

    def remember(self, message: Mapping[str, Any]) -> None:
        """How the last reply is written among the messages of later turns, where that is not its text alone."""
        self._said[-1] = replace(self._said[-1], message=message)

    async def chat(self, messages: Messages) -> str:
        """The reply to messages, as text."""
        return (await self.ask(messages)).text
