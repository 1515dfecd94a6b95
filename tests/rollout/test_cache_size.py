"""The size of the cache, its growth, and requests that do not fit."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from covey.memory import cache_tokens, grown_size
from covey.rollout.embedded import cpu_batch, gpu_batch
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.cpu_batch import RowBatch
from covey.rollout.embedded.gpu_batch import PagedBatch
from covey.types import Completion, Sampling, StopReason
from tests.conftest import tiny_llama
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for, passes

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15], [5, 6, 7], [3], [20] * 30]


def outcomes(engine: Any, requests: Sequence[Request]) -> list[Any]:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests), return_exceptions=True)

    return asyncio.run(all_at_once())


@pytest.mark.parametrize("paged", [False, True])
def test_a_request_that_does_not_fit_into_memory_fails_alone(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu_batch, gpu_batch):
        monkeypatch.setattr(module, "cache_tokens", lambda *_: 256)
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True)
    fit: list[Request] = [([5, 6, n], Sampling(max_tokens=12, seed=n)) for n in range(3, 6)]
    huge: Request = ([9, 10, 11], Sampling(max_tokens=254))
    just: Request = ([9, 10, 11], Sampling(max_tokens=253))
    assert isinstance(outcomes(engine, [huge])[0], ValueError)  # nobody has made a cache yet
    for _ in range(2):  # in a new cache, and in one that is there
        found = outcomes(engine, [fit[0], huge, fit[1], huge, fit[2]])
        assert [type(one) for one in found] == [Completion, ValueError, Completion, ValueError, Completion]
        assert str(found[1]).startswith("a request of 3 + 254 tokens does not fit into a cache of 256")
        assert_as_alone(model, fit, found[::2])
    batch = engine._batch
    assert (batch.size if isinstance(batch, PagedBatch) else batch.cache.size) == 64
    assert_as_alone(model, [just], answers(engine, [just]))


def test_memory_of_a_token() -> None:
    """2 · layers · key heads · head size · bytes for each token."""
    token = 2 * 2 * 2 * 8 * 4
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cache_tokens(tiny_llama(), 0.25) == int(memory * 0.25) // token
    assert cache_tokens(tiny_llama(dtype=torch.bfloat16), 0.25) == int(memory * 0.25) // (token // 2)


@pytest.mark.parametrize("paged", [False, True])
def test_a_completion_ends_where_the_context_ends(paged: bool) -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True, context_length=40)
    requests = [([*range(3, 33)], Sampling(max_tokens=50)), ([5, 6], Sampling(max_tokens=20))]
    long, short, none = outcomes(engine, [*requests, ([5] * 40, Sampling(max_tokens=1))])
    assert (len(long.token_ids), long.stop) == (10, StopReason.LENGTH)
    assert len(short.token_ids) == 20
    assert isinstance(none, ValueError) and "40 tokens leaves no room" in str(none)
    assert_as_alone(model, requests, [long, short])


def test_a_cache_grows_by_half_up_to_its_limit() -> None:
    assert [grown_size(0, 7, None), grown_size(10, 10, None), grown_size(10, 11, None), grown_size(10, 30, None)] == [
        7,
        10,
        15,
        30,
    ]
    assert [grown_size(10, 11, 12), grown_size(10, 14, 12), grown_size(10, 12, 12)] == [12, 14, 12]
    assert [grown_size(64, 60, 400, 64), grown_size(128, 130, 400, 64), grown_size(320, 330, 400, 64)] == [64, 192, 448]


@pytest.mark.parametrize("paged", [False, True])
def test_a_conversation_that_grows_by_a_few_tokens_seldom_makes_a_larger_cache(
    paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_batch, "BLOCK", 16)
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True, context_length=450)
    sizes: list[int] = []
    prompt = [*range(3, 60)]
    for turn in range(70):
        (done,) = answers(engine, [(prompt, Sampling(max_tokens=5, seed=turn))])
        prompt += done.token_ids
        size = engine._batch.size if isinstance(engine._batch, PagedBatch) else engine._batch.cache.size
        sizes += [size] if not sizes or sizes[-1] != size else []
    assert len(prompt) == 57 + 5 * 70
    assert sizes == ([64, 96, 144, 224, 336, 464] if paged else [64, 128, 192, 320, 512])


def test_the_cache_has_as_many_rows_as_may_decode_together_and_each_is_as_long_as_the_longest() -> None:
    """2 · layers · key heads · head size · bytes for each token, of at most max_sequences rows."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], max_sequences=6)
    requests = [([n + 3] * (2 + n), Sampling(max_tokens=70)) for n in range(20)]
    answers(engine, requests)
    token = 2 * 2 * 2 * 8 * 4
    batch = engine._batch
    assert isinstance(batch, RowBatch)
    slabs = batch.cache.slabs
    assert sum(slab.nbytes for pair in slabs.values() for slab in pair) == token * 6 * 128  # 21 + 70 tokens, to 64s
    for n in range(5):
        answers(engine, requests[n : n + 9])
    assert sum(slab.nbytes for pair in slabs.values() for slab in pair) == token * 6 * 128


def test_what_an_engine_did_before_does_not_change_a_bit() -> None:
    """Other requests made its cache larger; new weights made it forget them."""
    model = tiny_llama()
    requests = [(p, Sampling(max_tokens=20 + 3 * s, seed=s)) for s, p in enumerate(PROMPTS)]
    fresh = answers(engine_for(model), requests)
    used = engine_for(model)
    answers(used, [([n + 3, *range(9, 60)], Sampling(max_tokens=100, seed=n)) for n in range(9)])
    asyncio.run(used.publish(model, version=0))
    assert answers(used, requests) == fresh


def test_a_cache_that_grows_keeps_what_is_in_it() -> None:
    """Longer and more requests arrive while others decode: none waits, nothing is recomputed."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    first: list[Request] = [([n + 3, 9, 10], Sampling(max_tokens=40, seed=n)) for n in range(2)]
    late: list[Request] = [([*range(3, 60), n], Sampling(max_tokens=20, seed=n)) for n in range(5)]

    async def staggered() -> list[Completion]:
        asked = [asyncio.create_task(engine.generate(*request)) for request in first]
        while engine.generated_tokens < 20:
            await asyncio.sleep(0)
        asked += [asyncio.create_task(engine.generate(*request)) for request in late]
        return list(await asyncio.gather(*asked))

    with passes(model) as seen:
        done = asyncio.run(staggered())
    assert_as_alone(model, [*first, *late], done)
    decoding = [rows for rows, tokens in seen if tokens == 1 and rows > 1]
    assert decoding.count(7) == 20
    assert len(decoding) == 40


def test_a_paged_cache_is_gone_before_a_larger_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=True, eager=True)
    alive: weakref.WeakSet[KvCache] = weakref.WeakSet()

    class Watched(KvCache):
        def __init__(self, *settings: int) -> None:
            gc.collect()
            assert not alive
            super().__init__(*settings)
            alive.add(self)

    monkeypatch.setattr(gpu_batch, "KvCache", Watched)
    answers(engine, [([5, 6, 7], Sampling(max_tokens=5))])
    answers(engine, [([5] * 100, Sampling(max_tokens=5))])
    assert [cache.blocks * cache.size for cache in alive] == [128]
