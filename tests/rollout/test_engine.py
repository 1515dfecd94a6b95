"""The embedded engine against transformers' own forward pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from covey.rollout.embedded import attention, runner
from covey.types import Completion, Sampling, StopReason
from tests.conftest import tiny_llama
from tests.learner.test_forward import LENGTH_ROPES, family, length_rope_model
from tests.rollout.plain import Request, alone, answers, assert_as_alone, engine_for, letters, passes

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15], [5, 6, 7], [3], [20] * 30]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_of_ragged_prompts_are_those_of_each_row_alone(temperature: float) -> None:
    model = tiny_llama()
    requests = [(p, Sampling(temperature=temperature, max_tokens=12, seed=s)) for s, p in enumerate(PROMPTS)]
    for (prompt, _), done in zip(requests, answers(engine_for(model), requests), strict=True):
        expected = alone(model, prompt, done.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


def test_a_common_beginning_is_computed_once() -> None:
    model = tiny_llama()
    beginning = list(range(30, 42))
    prompts = [[*beginning, 5], [*beginning, 6, 7, 8, 9], beginning, [*beginning, 6, 7]]
    requests = [(p, Sampling(max_tokens=12, seed=s)) for s, p in enumerate(prompts)]
    with passes(model) as seen:
        done = answers(engine_for(model), requests)
    # The last token of a prompt is decoded: the first has 12 to compute, the second 3 more, the others nothing.
    assert seen[:3] == [(1, 12), (1, 3), (4, 1)]
    assert all(tokens == 1 for _, tokens in seen[2:])
    assert_as_alone(model, requests, done)


def test_a_groups_prompt_is_computed_once() -> None:
    model = tiny_llama()
    requests = [(PROMPTS[1], Sampling(max_tokens=12, seed=s)) for s in range(5)]
    with passes(model) as seen:
        done = answers(engine_for(model), requests)
    assert seen[:2] == [(1, 6), (5, 1)]
    assert all(tokens == 1 for _, tokens in seen[1:])
    assert len({one.token_ids for one in done}) == 5
    assert_as_alone(model, requests, done)


def test_greedy_follows_the_argmax_and_has_logprob_zero() -> None:
    model = tiny_llama()
    (done,) = answers(engine_for(model, eos_ids=[]), [(PROMPTS[1], Sampling(temperature=0.0, max_tokens=8))])
    ids = list(PROMPTS[1])
    for token in done.token_ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
    assert done.logprobs == (0.0,) * 8
    assert done.stop is StopReason.LENGTH


def test_a_request_draws_the_same_ids_whatever_else_is_in_the_batch() -> None:
    model = tiny_llama()
    requests = [(p, Sampling(max_tokens=20, seed=100 + s)) for s, p in enumerate(PROMPTS * 4)]
    together = answers(engine_for(model), requests)
    flips = 0
    for request, expected in zip(requests, together, strict=True):
        (single,) = answers(engine_for(model), [request])
        flips += single.token_ids != expected.token_ids
    # Other shapes round differently; a draw that falls between two roundings may flip. None is expected in 20 rows.
    assert flips <= 1, f"{flips} of {len(requests)} rows flipped"


def test_other_seeds_draw_other_ids_and_the_same_seed_the_same() -> None:
    model = tiny_llama()
    a, b, again = answers(engine_for(model), [(PROMPTS[0], Sampling(max_tokens=20, seed=s)) for s in (1, 2, 1)])
    assert a.token_ids == again.token_ids
    assert a.token_ids != b.token_ids


def test_small_batches_give_what_one_large_batch_gives() -> None:
    model = tiny_llama()
    requests = [(p, Sampling(max_tokens=10, seed=s)) for s, p in enumerate(PROMPTS * 3)]
    few, all_at_once = answers(engine_for(model, max_sequences=2), requests), answers(engine_for(model), requests)
    same = [(a, b) for a, b in zip(few, all_at_once, strict=True) if a.token_ids == b.token_ids]
    assert len(same) >= len(requests) - 1  # a draw that falls between two roundings may flip
    for a, b in same:
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert_as_alone(model, requests, few)


def test_end_token_is_kept_and_ends_the_answer() -> None:
    model = tiny_llama()
    (free,) = answers(engine_for(model, eos_ids=[]), [(PROMPTS[0], Sampling(max_tokens=10, seed=3))])
    end = free.token_ids[4]
    first = free.token_ids.index(end)
    (done,) = answers(engine_for(model, eos_ids=[end]), [(PROMPTS[0], Sampling(max_tokens=10, seed=3))])
    assert done.token_ids == free.token_ids[: first + 1]
    assert done.stop is StopReason.EOS


def test_stop_string_across_tokens_ends_the_answer() -> None:
    model = tiny_llama()
    (free,) = answers(engine_for(model, eos_ids=[]), [(PROMPTS[0], Sampling(max_tokens=10, seed=3))])
    stop = letters(free.token_ids[3:5])
    end = next(n for n in range(1, 11) if stop in letters(free.token_ids[:n]))
    (done,) = answers(engine_for(model, eos_ids=[]), [(PROMPTS[0], Sampling(max_tokens=10, seed=3, stop=(stop,)))])
    assert done.token_ids == free.token_ids[:end]
    assert done.stop is StopReason.STOP


@pytest.mark.parametrize("paged", [False, True])
def test_each_token_has_the_version_that_drew_it(paged: bool) -> None:
    """New weights are published while requests are in progress. All enter with the first step, so the n-th step draws
    everybody's n-th token."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True)
    requests = [(p, Sampling(max_tokens=12 + 5 * s, seed=s)) for s, p in enumerate(PROMPTS)]
    drawing: list[int] = []  # the version of each step
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: drawing.append(engine.version) if inputs[0].shape[1] == 1 else None
    )

    async def all_at_once() -> list[Completion]:
        await engine.publish(model, 3)
        asked = [asyncio.create_task(engine.generate(*request)) for request in requests]
        for version, tokens in ((4, 20), (5, 60), (6, 90)):
            while engine.generated_tokens < tokens:
                await asyncio.sleep(0)
            await engine.publish(model, version)
        return list(await asyncio.gather(*asked))

    done = asyncio.run(all_at_once())
    hook.remove()
    assert set(drawing) == {3, 4, 5, 6}
    for one, (_, sampling) in zip(done, requests, strict=True):
        assert one.versions == tuple(drawing[: sampling.max_tokens])
    assert_as_alone(model, requests, done)  # the weights were the same ones all the time


def test_the_version_of_a_step_is_that_of_its_beginning() -> None:
    """Who publishes waits until the step at hand is over."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    started, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        started.set()
        assert go_on.wait(timeout=10)

    hook = model.get_input_embeddings().register_forward_pre_hook(wait)

    async def in_the_middle() -> tuple[Completion, bool]:
        asked = asyncio.create_task(engine.generate([5], Sampling(max_tokens=2)))
        while not started.is_set():
            await asyncio.sleep(0)
        publishing = asyncio.create_task(engine.publish(model, version=1))
        for _ in range(20):
            await asyncio.sleep(0)
        early = publishing.done()
        go_on.set()
        return await asked, early

    done, early = asyncio.run(in_the_middle())
    hook.remove()
    assert not early
    assert done.versions == (0, 1)


def test_an_engine_that_is_paused_again_at_once_stays_paused() -> None:
    """Where the next groups are there already, the learner has the weights again before the engine has woken up."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])

    async def run() -> tuple[int, int, Completion]:
        asking = asyncio.create_task(engine.generate(PROMPTS[1], Sampling(max_tokens=12, seed=0)))
        while not engine.generated_tokens:
            await asyncio.sleep(0)
        await engine.pause()
        await asyncio.sleep(0.05)  # it sleeps
        await engine.resume()
        await engine.pause()
        before = engine.generated_tokens
        await asyncio.sleep(0.2)
        after = engine.generated_tokens
        await engine.resume()
        return before, after, await asking

    before, after, done = asyncio.run(run())
    assert 0 < before == after < len(done.token_ids) == 12
    assert_as_alone(model, [(PROMPTS[1], Sampling(max_tokens=12, seed=0))], [done])


def test_an_empty_prompt_is_rejected() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        answers(engine_for(tiny_llama()), [([], Sampling())])


# -- continuous batching --------------------------------------------------------------------------------------------


def in_order_of_finishing(engine: Any, requests: Sequence[Request]) -> list[int]:
    order: list[int] = []

    async def ask(number: int) -> None:
        await engine.generate(*requests[number])
        order.append(number)

    async def all_at_once() -> None:
        await asyncio.gather(*map(ask, range(len(requests))))

    asyncio.run(all_at_once())
    return order


def test_who_waits_enters_as_soon_as_somebody_leaves() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], max_sequences=2)
    lengths = [4, 12, 5, 2]
    requests = [([n + 3, 9, 10], Sampling(max_tokens=length)) for n, length in enumerate(lengths)]
    with passes(model) as seen:
        order = in_order_of_finishing(engine, requests)
    # The long one takes 12 steps; beside it the others, one after the other, take 4 + 5 + 2.
    assert order == [0, 2, 3, 1]
    assert [rows for rows, tokens in seen if tokens == 1] == [2] * 11 + [1]


def test_as_many_decode_together_as_may() -> None:
    model = tiny_llama()
    requests = [([n + 3, 9, 10], Sampling(max_tokens=5)) for n in range(9)]
    with passes(model) as seen:
        answers(engine_for(model, eos_ids=[], max_sequences=6), requests)
    assert [rows for rows, tokens in seen if tokens == 1] == [6] * 5 + [3] * 5


def test_an_agents_next_question_joins_the_running_batch() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    requests: list[Request] = []
    done: list[Completion] = []

    async def ask(ids: list[int], length: int) -> Completion:
        sampling = Sampling(max_tokens=length, seed=len(requests))
        found = await engine.generate(ids, sampling)
        requests.append((ids, sampling))
        done.append(found)
        return found

    async def agent() -> None:
        prompt = [5, 6, 7]
        for _ in range(3):
            prompt = [*prompt, *(await ask(prompt, 4)).token_ids, 8, 9]

    async def all_at_once() -> None:
        await asyncio.gather(ask([9, 10, 11], 20), agent())

    with passes(model) as seen:
        asyncio.run(all_at_once())
    decoding = [rows for rows, tokens in seen if tokens == 1]
    assert decoding == [2] * 12 + [1] * 8
    assert [one.stop for one in done] == [StopReason.LENGTH] * 4
    assert_as_alone(model, requests, done)


def test_requests_that_come_one_by_one_are_soon_decoded_together() -> None:
    """The first finds an empty engine, and a cache is made for it alone; the others do not stand in line behind it."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    requests = [([n + 3, 9, 10], Sampling(max_tokens=30, seed=n)) for n in range(12)]

    async def staggered() -> list[Completion]:
        tasks = []
        with passes(model) as seen:
            for number, request in enumerate(requests):
                tasks.append(asyncio.create_task(engine.generate(*request)))
                while len(seen) < 2 * number + 1:
                    await asyncio.sleep(0)
            return list(await asyncio.gather(*tasks))

    with passes(model) as seen:
        done = asyncio.run(staggered())
    assert sum(tokens == 1 for _, tokens in seen) < 12 * 30 / 3
    assert_as_alone(model, requests, done)


def test_a_request_that_comes_while_others_are_let_in_is_neither_lost_nor_in_the_way() -> None:
    """Callers add to the queue on the event loop's thread, steps read it on another."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])

    class Slow(Sampling):
        """Somebody else asks just when this request's length is read."""

        asked = False

        def __getattribute__(self, name: str) -> Any:
            elsewhere = threading.current_thread() is not threading.main_thread()
            if name == "max_tokens" and elsewhere and not Slow.asked:
                Slow.asked = True
                asyncio.run_coroutine_threadsafe(second_asks(), loop).result(timeout=10)
            return super().__getattribute__(name)

    async def second_asks() -> None:
        tasks.append(asyncio.create_task(engine.generate([9, 10, 11], Sampling(max_tokens=3))))
        await asyncio.sleep(0)

    async def both() -> list[Completion]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        tasks.append(asyncio.create_task(engine.generate([5, 6, 7], Slow(max_tokens=3))))
        first = await tasks[0]
        return [first, await asyncio.wait_for(tasks[1], timeout=10)]

    loop: Any = None
    tasks: list[asyncio.Task[Completion]] = []
    assert [len(one.token_ids) for one in asyncio.run(both())] == [3, 3]


def test_a_request_longer_than_the_cache_waits_and_is_served() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    long: Request = ([*range(3, 60)] * 2, Sampling(max_tokens=10, seed=1))
    short: Request = ([5, 6, 7], Sampling(max_tokens=20))

    async def later() -> Completion:
        await engine.generate([9, 10], Sampling(max_tokens=2))
        return await engine.generate(*long)

    async def both() -> list[Completion]:
        return list(await asyncio.gather(engine.generate(*short), later()))

    assert_as_alone(model, [short, long], asyncio.run(both()))
    assert_as_alone(model, [short], answers(engine, [short]))


def test_holes_in_the_batch_are_not_computed_and_closed_without_changing_anything() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])
    lengths = [3, 2, 3, 3, 20, 6, 5, 20]
    requests = [([n + 3, *range(9, 12 + n)], Sampling(max_tokens=length, seed=n)) for n, length in enumerate(lengths)]
    places: list[list[int]] = []

    def look(*_: Any) -> None:
        places.append([row for request in engine._batch.scheduler.running for row in request.blocks])

    hook = model.get_input_embeddings().register_forward_pre_hook(look)
    with passes(model) as seen:
        done = answers(engine, requests)
    hook.remove()
    decoding = [(rows, sorted(held)) for (rows, tokens), held in zip(seen, places, strict=True) if tokens == 1]
    assert [rows for rows, _ in decoding] == [8, 8, 7, 4, 4, 3] + [2] * 14
    # The rows 4 to 7 are half of the rows, which will do; three of eight are too few, and move to the front; then two
    # of three are enough again.
    assert [held for _, held in decoding[3:7]] == [[4, 5, 6, 7], [4, 5, 6, 7], [0, 1, 2], [0, 2]]
    assert_as_alone(model, requests, done)


def test_a_caller_that_gives_up_frees_its_row() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], max_sequences=1)

    async def impatient() -> Completion:
        first = asyncio.create_task(engine.generate([5, 6, 7], Sampling(max_tokens=400)))
        second = asyncio.create_task(engine.generate([9, 10, 11], Sampling(max_tokens=5)))
        while engine.generated_tokens < 5:
            await asyncio.sleep(0)
        first.cancel()
        found = await second
        assert first.cancelled()
        return found

    with passes(model) as seen:
        done = asyncio.run(impatient())
    assert len(seen) < 100
    assert_as_alone(model, [([9, 10, 11], Sampling(max_tokens=5))], [done])


def test_requests_of_a_loop_that_was_closed_do_not_come_back() -> None:
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[])

    async def impatient() -> None:
        await asyncio.wait_for(engine.generate([5, 6, 7], Sampling(max_tokens=400)), timeout=0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    before = engine.generated_tokens
    request = ([9, 10, 11], Sampling(max_tokens=5))
    assert_as_alone(model, [request], answers(engine, [request]))
    assert engine.generated_tokens - before <= 5 + 1  # at most a step was under way


# -- how it is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_a_prompt_in_several_chunks_is_the_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family(name)
    prompts = [list(range(3, 40)), [*range(3, 20), 5, 6], [9, 10], [3], list(range(3, 31))]
    requests = [(p, Sampling(max_tokens=6, seed=s)) for s, p in enumerate(prompts)]
    whole = answers(engine_for(model), requests)
    monkeypatch.setattr(runner, "PREFILL_TOKENS", 8)
    with passes(model) as seen:
        chunked = answers(engine_for(model), requests)
    assert max(rows * tokens for rows, tokens in seen) <= 8
    assert [one.token_ids for one in chunked] == [one.token_ids for one in whole]
    assert_as_alone(model, requests, chunked)


@pytest.mark.parametrize("name", [*LENGTH_ROPES, "gpt2"])
def test_padding_has_no_positions_beyond_the_longest_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would change the rotary frequencies of all rows, or be beyond the table of positions."""
    sizes = {"n_positions": 16, "max_position_embeddings": 16}
    model = length_rope_model(name) if name in LENGTH_ROPES else family(name, **sizes)
    monkeypatch.setattr(runner, "PREFILL_TOKENS", 12)
    requests = [([*p], Sampling(max_tokens=2, seed=s)) for s, p in enumerate((range(3, 17), range(20, 27)))]
    with passes(model) as seen:
        done = answers(engine_for(model, eos_ids=[]), requests)
    assert (2, 6) in seen  # the last token of the first prompt beside all of the second
    assert_as_alone(model, requests, done)


@pytest.mark.parametrize("kind", LENGTH_ROPES)
def test_answers_end_where_the_frequencies_would_change(kind: str) -> None:
    model = length_rope_model(kind)
    requests = [([5, 6, 7], Sampling(max_tokens=30, seed=1)), ([9, 10], Sampling(max_tokens=4, seed=2))]
    done = answers(engine_for(model, eos_ids=[], context_length=40), requests)
    assert [len(one.token_ids) for one in done] == [13, 4]
    assert_as_alone(model, requests, done)


def two_turns(model: Any) -> list[Completion]:
    """Six agents that ask twice; answers end anywhere."""
    engine = engine_for(model, eos_ids=[2, 11, 12], max_sequences=4)

    async def agent(number: int) -> list[Completion]:
        prompt = [3 + number, *range(20, 25 + number)]
        first = await engine.generate(prompt, Sampling(max_tokens=25, seed=2 * number))
        second = await engine.generate([*prompt, *first.token_ids, 8], Sampling(max_tokens=25, seed=2 * number + 1))
        return [first, second]

    async def all_at_once() -> list[Completion]:
        return [one for both in await asyncio.gather(*map(agent, range(6))) for one in both]

    return asyncio.run(all_at_once())


def test_the_same_run_twice_is_the_same_to_the_last_bit() -> None:
    first, again = two_turns(tiny_llama()), two_turns(tiny_llama())
    assert len({len(one.token_ids) for one in first}) > 3
    assert first == again


def test_the_learners_attention_comes_back() -> None:
    model = tiny_llama()
    before = model.config._attn_implementation
    during: set[str] = set()
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: during.add(model.config._attn_implementation)
    )
    plain = alone(model, PROMPTS[1], [4, 5, 6])
    hook.remove()
    assert during == {before}
    during.clear()
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: during.add(model.config._attn_implementation)
    )
    answers(engine_for(model), [(PROMPTS[1], Sampling(max_tokens=3))])
    hook.remove()
    assert during == {attention.NAME}
    assert model.config._attn_implementation == before
    assert torch.equal(alone(model, PROMPTS[1], [4, 5, 6]), plain)


def test_an_error_in_the_model_reaches_every_caller_and_the_engine_works_again() -> None:
    model = tiny_llama().train()
    engine = engine_for(model, eos_ids=[], max_sequences=2)
    before = model.config._attn_implementation
    calls = 0

    def break_once(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of luck")

    hook = model.model.layers[1].register_forward_pre_hook(break_once)
    requests = [([n + 3, 9, 10], Sampling(max_tokens=8, seed=n)) for n in range(5)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests), return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert [str(error) for error in found] == ["out of luck"] * 5
    assert model.config._attn_implementation == before
    assert model.training
    assert_as_alone(model, requests, answers(engine, requests))
    hook.remove()


def test_a_token_that_does_not_exist_fails_and_ends_no_more_than_its_batch() -> None:
    model = tiny_llama()
    engine = engine_for(model)
    with pytest.raises(IndexError):
        answers(engine, [([10**6], Sampling(max_tokens=2)), ([10**6], Sampling(max_tokens=2))])
    request = ([5, 6, 7], Sampling(max_tokens=4))
    assert_as_alone(model, [request], answers(engine, [request]))


def test_new_weights_are_used_at_once() -> None:
    """The same questions again: nothing that the old weights computed is found."""
    model = tiny_llama()
    engine = engine_for(model)
    requests = [(p, Sampling(max_tokens=6, seed=s)) for s, p in enumerate(PROMPTS)]
    answers(engine, requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.publish(model, version=1))
    assert_as_alone(model, requests, answers(engine, requests))


@pytest.mark.parametrize("paged", [False, True])
def test_only_requests_in_progress_use_keys_and_values_of_old_weights(paged: bool) -> None:
    """A request that arrives after a change of weights shares no prefix with one in progress: it computes
    everything."""
    model = tiny_llama()
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True)
    prompt = [*range(3, 60), *range(3, 30)]
    late: Request = (prompt, Sampling(max_tokens=6, seed=1))

    async def both() -> tuple[Completion, Completion]:
        first = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=60)))
        while engine.generated_tokens < 4:
            await asyncio.sleep(0)
        await engine.publish(model, version=1)
        second = await engine.generate(*late)
        return await first, second

    with passes(model) as seen:
        first, second = asyncio.run(both())
    assert [tokens for _, tokens in seen if tokens > 1] == [len(prompt) - 1] * 2
    assert set(first.versions) == {0, 1} and set(second.versions) == {1}
    assert_as_alone(model, [late], [second])
