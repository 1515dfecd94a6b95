"""Conversations: the next turn of an episode continues from the cached turns before it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from covey.rollout.embedded import gpu_batch
from covey.types import Completion, Sampling
from tests.conftest import tiny_llama
from tests.learner.test_forward import family
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for, greedy


@contextmanager
def prefilled(engine: Any) -> Iterator[list[int]]:
    """Tokens of prompts that go through the model while this lasts, one entry for each row of each pass."""
    seen: list[int] = []
    runner = engine._batch.runner
    fill = runner._prefill

    def counted(rows: Any, starts: Any, lengths: list[int]) -> None:
        seen.extend(lengths)
        fill(rows, starts, lengths)

    runner._prefill = counted
    yield seen
    runner._prefill = fill


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("seed", range(3))
def test_ragged_conversations(name: str, paged: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of several turns in a batch with fewer rows than episodes; some rewrite their history, some wait
    before they continue. Every token is that of a plain forward pass over the whole conversation."""
    monkeypatch.setattr(gpu_batch, "BLOCK", 4)
    model = family(name)
    rng = random.Random(seed)
    engine = engine_for(model, eos_ids=[2, 11], paged=paged, eager=True, max_sequences=5)
    requests: list[Request] = []
    done: list[Completion] = []

    async def episode(number: int) -> None:
        says = random.Random(f"{seed} {number}")
        prompt = [*range(20, 20 + says.choice((0, 10, 12))), *says.choices(range(3, 60), k=says.randint(1, 6))]
        for turn in range(says.randint(1, 4)):
            sampling = Sampling(temperature=says.choice((0.0, 1.0)), max_tokens=says.randint(1, 12), seed=turn)
            found = await engine.generate(prompt, sampling)
            requests.append((prompt, sampling))
            done.append(found)
            prompt = [*prompt, *found.token_ids, *says.choices(range(3, 60), k=says.randint(1, 6))]
            if says.random() < 0.2:
                prompt = [*prompt[:-9], 7, 7, 7]
            for _ in range(says.choice((0, 0, 40))):
                await asyncio.sleep(0)

    async def all_at_once() -> None:
        await asyncio.gather(*map(episode, range(rng.randint(6, 9))))

    asyncio.run(all_at_once())
    assert len(requests) > 10
    drawn = [n for n, (_, sampling) in enumerate(requests) if sampling.temperature]
    assert_as_alone(model, [requests[n] for n in drawn], [done[n] for n in drawn])
    for n in set(range(len(requests))) - set(drawn):
        assert done[n].token_ids == greedy(model, requests[n][0], len(done[n].token_ids))


def test_a_next_turn_computes_only_what_is_new() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    prompts = [[n + 3, *range(9, 20 + n)] for n in range(4)]
    first = answers(engine, [(prompt, Sampling(max_tokens=5 + n, seed=n)) for n, prompt in enumerate(prompts)])
    turns: list[Request] = [
        ([*prompt, *one.token_ids, *range(30, 33 + n)], Sampling(max_tokens=4, seed=n))
        for n, (prompt, one) in enumerate(zip(prompts, first, strict=True))
    ]
    with prefilled(engine) as seen:
        second = answers(engine, turns)
    # The last token of an answer was not fed, and the last of a prompt is decoded: one more, one less than came new.
    assert sorted(seen) == [3, 4, 5, 6]
    assert_as_alone(model, turns, second)


def test_two_answers_to_one_beginning_part_there() -> None:
    """The first attempt continues in the row, the other copies the common prefix."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    prompt = [*range(3, 40)]
    (one,) = answers(engine, [(prompt, Sampling(max_tokens=12))])
    turns: list[Request] = [([*prompt, *one.token_ids, 5, n], Sampling(max_tokens=4)) for n in (6, 7)]
    turns.append(([*prompt[:30], 9, 9, 9], Sampling(max_tokens=4)))
    with prefilled(engine) as seen:
        done = answers(engine, turns)
    # 37 + 11 were fed. The first computes the 12th and the 5; the second finds both in its row; 30 are the third's.
    assert sorted(seen) == [2, 2]
    assert_as_alone(model, turns, done)


def test_a_rewritten_history_is_computed_from_where_it_differs() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    prompt = [*range(3, 40)]
    (one,) = answers(engine, [(prompt, Sampling(max_tokens=12))])
    rewritten: Request = ([*prompt, *one.token_ids[:4], 61, 5, 6, 7], Sampling(max_tokens=4))
    assert one.token_ids[4] != 61
    with prefilled(engine) as seen:
        done = answers(engine, [rewritten])
    assert seen == [3]
    assert_as_alone(model, [rewritten], done)


def test_nothing_is_kept_when_the_weights_change() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    prompt = [*range(3, 40)]
    (one,) = answers(engine, [(prompt, Sampling(max_tokens=12))])
    asyncio.run(engine.publish(model, version=1))
    turn: Request = ([*prompt, *one.token_ids, 5, 6], Sampling(max_tokens=4))
    with prefilled(engine) as seen:
        answers(engine, [turn])
    assert seen == [len(turn[0]) - 1]


@pytest.mark.parametrize("rows", [64, 20])
def test_groups_compute_each_prompt_once_and_their_common_beginning_once(rows: int) -> None:
    """64 answers to 8 questions with one system prompt, also where they do not fit into the batch at once."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], max_sequences=rows)
    system = [*range(3, 33)]
    questions = [[*system, 40 + n, *range(50, 52 + n)] for n in range(8)]
    requests: list[Request] = [(questions[n // 8], Sampling(max_tokens=6 + n % 3, seed=n)) for n in range(64)]
    with prefilled(engine) as seen:
        done = answers(engine, requests)
    assert sum(seen) == len(system) + sum(len(q) - len(system) - 1 for q in questions)
    assert_as_alone(model, requests, done)
