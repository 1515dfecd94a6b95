"""Helpers for tests of the engine: plain forward passes as reference, and the shapes of passes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded import EmbeddedEngine
from covey.types import Completion, Sampling

Request = tuple[list[int], Sampling]


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i % 58) for i in ids)


def engine_for(model: Any, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, eos_ids=options.pop("eos_ids", [2]), decode=letters, **options)


def answers(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
    async def all_at_once() -> list[Completion]:
        return list(await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in requests)))

    return asyncio.run(all_at_once())


@torch.no_grad()
def alone(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of a completion, by one plain forward pass over the whole row."""
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *completion]], device=device)
    logprobs = torch.log_softmax(model(ids).logits[0].float().cpu() / temperature, -1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]


def assert_as_alone(
    model: Any, requests: Sequence[Request], done: Sequence[Completion], tolerance: float = 1e-4
) -> None:
    """Every sampled token has the log-prob that a plain forward pass gives it."""
    for (prompt, sampling), one in zip(requests, done, strict=True):
        expected = alone(model, prompt, one.token_ids, sampling.temperature)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=tolerance, rtol=0)


@contextmanager
def passes(model: Any) -> Iterator[list[tuple[int, int]]]:
    """The shapes (rows, tokens of each) of all forward passes while this lasts."""
    seen: list[tuple[int, int]] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append((inputs[0].shape[0], inputs[0].shape[1]))
    )
    try:
        yield seen
    finally:
        hook.remove()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The likeliest tokens, by plain forward passes over everything before each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])
