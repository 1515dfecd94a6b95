"""Sequences in many small blocks, driven by hand on a CPU: every sampled token against a plain forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from covey.rollout.embedded import runner as runner_module
from covey.rollout.embedded.allocation import BlockManager
from covey.rollout.embedded.attention import engine_attention
from covey.rollout.embedded.cache import Decode, KvCache, PagedDecode, Prefill, RowCache
from covey.rollout.embedded.runner import Runner, draw
from covey.rollout.embedded.scheduler import RequestState, Scheduler
from covey.types import Sampling
from tests.conftest import tiny_llama
from tests.learner.test_forward import family
from tests.rollout.plain import alone, passes


@dataclass
class Drive:
    """Scheduler and runner without the engine around them."""

    model: Any
    blocks: int
    size: int
    max_rows: int = 8
    found: int = 0  # tokens taken over from the cache
    followers: int = 0
    sent_back: int = 0
    done: list[RequestState] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers = self.model.config.num_hidden_layers
        self.scheduler = Scheduler(BlockManager(self.blocks, self.size), self.max_rows)
        self.runner = Runner(self.model, KvCache(self.blocks, self.size, layers))

    def ask(self, prompt: Sequence[int], max_tokens: int, seed: int = 0, **sampling: Any) -> RequestState:
        request = RequestState(tuple(prompt), Sampling(max_tokens=max_tokens, seed=seed, **sampling))
        self.scheduler.add(request)
        self.done.append(request)
        return request

    @torch.no_grad()
    def step(self) -> None:
        scheduler = self.scheduler
        entries = scheduler.admit()
        self.found += sum(entry.shared for entry in entries)
        self.followers += sum(len(entry.members) - 1 for entry in entries)
        self.runner.prefill(entries)
        before = len(scheduler.running)
        scheduler.reserve(1)
        self.sent_back += before - len(scheduler.running)
        rows = list(scheduler.running)
        logits_BV = self.runner.decode(rows)
        ids, logprobs = draw(logits_BV, [r.sampling for r in rows], [len(r.ids) for r in rows])
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.cached += 1
            if row.remaining == 0:
                scheduler.finish(row)

    def run(self) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            self.step()

    def check(self) -> None:
        for row in self.done:
            assert len(row.ids) == row.sampling.max_tokens
            expected = alone(self.model, row.prompt, row.ids, row.sampling.temperature)
            torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=1e-4, rtol=0)
        assert self.scheduler.blocks.available == self.blocks


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_ragged_prompts_with_common_beginnings_and_groups(name: str, size: int) -> None:
    drive = Drive(family(name), blocks=1600 // size, size=size)
    beginning = [*range(20, 36)]
    prompts = [[*beginning, 5], [*beginning, 6, 7, 8, 9], [3], [9, 10], beginning, [*beginning, 5, 7], [*beginning, 5]]
    for number, prompt in enumerate(prompts):
        drive.ask(prompt, max_tokens=5 + 3 * number % 7, seed=number)
    drive.run()
    drive.check()
    assert drive.followers == 1
    # The second and the sixth find the beginning of 16 tokens; the fifth, which is just that, all but its last block.
    assert drive.found == 16 + 16 + {1: 15, 4: 12, 16: 0}[size]


def test_an_episodes_next_turn_computes_only_what_is_new() -> None:
    model = tiny_llama()
    drive = Drive(model, blocks=40, size=4)
    first = drive.ask(range(20, 30), max_tokens=7)
    drive.run()
    second = [*first.prompt, *first.ids, 5, 6, 7]  # 20 tokens, of which 16 were fed: four full blocks
    drive.ask(second, max_tokens=6, seed=1)
    with passes(model) as seen:
        drive.run()
    assert drive.found == 16
    assert seen == [(1, 3)] + [(1, 1)] * 6
    drive.check()


def test_who_needs_a_block_that_another_is_about_to_fill_waits_for_it() -> None:
    """Both enter at once, and the second takes over blocks that the first computes in the same call."""
    model = tiny_llama()
    drive = Drive(model, blocks=40, size=4)
    drive.ask(range(20, 30), max_tokens=4)
    drive.ask([*range(20, 28), 5, 6, 7], max_tokens=4, seed=1)
    with passes(model) as seen:
        drive.run()
    assert seen == [(1, 9), (1, 2)] + [(2, 1)] * 4
    assert drive.found == 8
    drive.check()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_preempted_request_continues_where_it_was(name: str) -> None:
    drive = Drive(family(name), blocks=7, size=4)
    for number in range(3):
        drive.ask([number + 3, *range(10, 14)], max_tokens=15, seed=number)
    drive.run()
    assert drive.sent_back > 0
    drive.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_in_a_small_cache(seed: int) -> None:
    rng = random.Random(seed)
    drive = Drive(tiny_llama(), blocks=rng.randint(9, 12), size=rng.choice((2, 3)), max_rows=5)
    for number in range(14):
        prompt = [*range(20, 20 + rng.randint(0, 8)), *rng.choices((5, 6), k=rng.randint(1, 3))]
        for attempt in range(rng.choice((1, 1, 3))):
            room = drive.blocks * drive.size - len(prompt)
            drive.ask(
                prompt, min(room, rng.randint(1, 14)), seed=10 * number + attempt, temperature=rng.choice((0.7, 1))
            )
        for _ in range(rng.randint(0, 3)):
            if drive.scheduler.waiting or drive.scheduler.running:
                drive.step()
    drive.run()
    assert drive.found and drive.followers and drive.sent_back
    drive.check()


def test_chunks_of_a_prompt_meet_in_the_middle_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PREFILL_TOKENS", 7)
    model = tiny_llama()
    drive = Drive(model, blocks=60, size=4)
    drive.ask(range(3, 40), max_tokens=4)
    drive.ask([*range(3, 21), 5, 5, 5], max_tokens=4, seed=1)
    drive.ask([50, 51, 52], max_tokens=4, seed=2)
    with passes(model) as seen:
        drive.run()
    assert max(rows * tokens for rows, tokens in seen) <= 7
    drive.check()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 1, 5])
def test_blocks_anywhere_attend_as_one_long_block(window: int | None) -> None:
    """The same keys and values in shuffled blocks of 4 and in one row of 32: prefill and decode agree."""
    torch.manual_seed(0)
    rows, heads, kv, dim, size, count = 3, 4, 2, 8, 4, 8
    paged, flat = KvCache(30, size, 1), RowCache()
    flat.grow(rows + 2, size * count)
    row = torch.tensor([0, 2, 4])  # with holes between them
    table = torch.randperm(30)[: rows * count].view(rows, count)
    start, length = torch.tensor([0, 5, 17]), torch.tensor([6, 3, 1])
    for begin, size_B in ((torch.zeros(3, dtype=torch.int64), start), (start, length)):
        width = int(size_B.max())
        q, k, v = (torch.randn(rows, n, width, dim) for n in (heads, kv, kv))
        found = [
            Prefill(cache, places, begin, size_B, width).attend(0, q, k, v, 0.3, window)
            for cache, places in ((paged, table), (flat, row[:, None]))
        ]
        valid = torch.arange(width) < size_B[:, None]
        torch.testing.assert_close(found[0][valid], found[1][valid])
    for more in range(3):
        position = start + length + more
        q, k, v = (torch.randn(rows, n, 1, dim) for n in (heads, kv, kv))
        a = PagedDecode(paged, table, position).attend(0, q, k, v, 0.3, window)
        b = Decode(flat, row, position).attend(0, q, k, v, 0.3, window)
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_a_copied_block_holds_the_same_in_every_layer() -> None:
    model = tiny_llama()
    cache = KvCache(4, 4, 2)
    ids = torch.tensor([[5, 6, 7]])
    step = Prefill(cache, torch.tensor([[1]]), torch.tensor([0]), torch.tensor([3]), 3)
    with engine_attention(model, step):
        model(input_ids=ids, position_ids=step.position_BQ, use_cache=False)
    assert cache.keys is not None and cache.values is not None
    cache.copy([(1, 3), (1, 0)], columns=2)
    cache.copy([])
    for slab in (cache.keys, cache.values):
        assert slab[:, 1, :, :3].abs().amin() > 0
        for target in (0, 3):
            assert torch.equal(slab[:, target, :, :2], slab[:, 1, :, :2])
            assert not slab[:, target, :, 2:].any()
