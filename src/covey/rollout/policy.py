"""What an agent talks to: an engine, with this episode's sampling settings and random stream, that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from covey.protocols import RolloutEngine
from covey.rollout.streams import stream_seed
from covey.types import Completion, Messages, Sampling, StopReason, Turn


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


def render(tokenizer: ChatTokenizer, messages: Messages) -> tuple[int, ...]:
    """Messages → prompt ids, ready for the assistant's answer."""
    text = tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False)  # type: ignore[operator]
    return tuple(encoded["input_ids"])


class EpisodePolicy:
    """One episode's view of the engine. Each turn draws from its own stream and is kept, ids and log-probs."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        stream: tuple[object, ...],
        deadline: asyncio.Timeout | None = None,
        first_prompts: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`first_prompts`: those that other attempts have rendered; all attempts at a task begin with the same."""
        self.engine = engine
        self.first_prompts = {} if first_prompts is None else first_prompts
        self.deadline = deadline
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.stream = stream
        self.turns: list[Turn] = []

    def render(self, messages: Messages) -> tuple[int, ...]:
        if self.turns:
            return render(self.tokenizer, messages)
        key = repr(messages)
        if key not in self.first_prompts:
            self.first_prompts[key] = render(self.tokenizer, messages)
        return self.first_prompts[key]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def generate(self, token_ids: Sequence[int]) -> Completion:
        sampling = replace(self.sampling, seed=stream_seed(*self.stream, len(self.turns)))
        with self._clock_stopped():
            done = await self.engine.generate(token_ids, sampling)
        self.turns.append(Turn(tuple(token_ids), done.token_ids, done.logprobs, done.versions, done.stop))
        return done

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Waiting for the model is not the episode's fault: its place in the queue depends on the others."""
        loop = asyncio.get_running_loop()
        when = self.deadline.when() if self.deadline is not None else None
        if self.deadline is None or when is None:
            yield
            return
        left = when - loop.time()
        self.deadline.reschedule(None)
        yield
        self.deadline.reschedule(loop.time() + left)

    async def chat(self, messages: Messages) -> str:
        """The reply to messages, as text; a stop string that ended it is cut off."""
        done = await self.generate(self.render(messages))
        text = self.decode(done.token_ids)
        if done.stop is StopReason.STOP:
            ends = [at for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
            text = text[: min(ends)] if ends else text
        return text
