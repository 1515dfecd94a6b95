"""What an agent talks to: an engine, with this episode's sampling settings and random stream, that remembers."""

from __future__ import annotations

from collections.abc import Sequence
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
        self, engine: RolloutEngine, tokenizer: ChatTokenizer, sampling: Sampling, stream: tuple[object, ...]
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.stream = stream
        self.turns: list[Turn] = []

    def render(self, messages: Messages) -> tuple[int, ...]:
        return render(self.tokenizer, messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    async def generate(self, token_ids: Sequence[int]) -> Completion:
        seed = stream_seed(*self.stream, len(self.turns))
        done = await self.engine.generate(token_ids, replace(self.sampling, seed=seed))
        self.turns.append(Turn(tuple(token_ids), done.token_ids, done.logprobs, done.versions, done.stop))
        return done

    async def chat(self, messages: Messages) -> str:
        """The reply to messages, as text; a stop string that ended it is cut off."""
        done = await self.generate(self.render(messages))
        text = self.decode(done.token_ids)
        if done.stop is StopReason.STOP:
            ends = [at for stop in self.sampling.stop if (at := text.find(stop)) >= 0]
            text = text[: min(ends)] if ends else text
        return text
