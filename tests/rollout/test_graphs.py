"""The engine on a GPU: small blocks, captured steps, several tokens between two reads of the host."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from covey.rollout.embedded import gpu_batch
from covey.rollout.embedded.runner import truncate
from covey.types import Completion, Sampling, StopReason
from tests.conftest import tiny_llama
from tests.learner.test_forward import family
from tests.rollout.conftest import MakeEngine
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for, letters
from tests.rollout.triton_support import DEVICE, needs_triton

pytestmark = needs_triton


def as_on_a_cpu(model: Any, requests: list[Request], done: list[Completion], **options: Any) -> None:
    """The same tokens as the plain path draws. A number that falls between two roundings may flip one answer."""
    expected = answers(engine_for(model.cpu(), **options), requests)
    model.to(DEVICE)
    differ = [number for number, (a, b) in enumerate(zip(done, expected, strict=True)) if a.token_ids != b.token_ids]
    allowed = int(DEVICE.type == "cuda" and len(done) > 2)
    assert len(differ) <= allowed, f"requests {differ} of {len(done)} drew other tokens"
    assert all(a.stop is b.stop for n, (a, b) in enumerate(zip(done, expected, strict=True)) if n not in differ)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_log_probs_are_those_of_each_row_alone_at_several_sizes_of_the_batch(rows: int, on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    requests = [
        ([n + 3, *range(20, 20 + 9 * n % 13)], Sampling(max_tokens=3 + 7 * n % 19, seed=n, temperature=1 + n % 2 / 2))
        for n in range(rows)
    ]
    done = answers(on_gpu(model), requests)
    assert_as_alone(model, requests, done)
    as_on_a_cpu(model, requests, done)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_products_are_the_same_and_see_updates(name: str, on_gpu: MakeEngine) -> None:
    model = family(name).to(DEVICE)
    requests = [([*range(20, 30 + n)], Sampling(max_tokens=10, seed=n)) for n in range(3)]
    engine = on_gpu(model)
    assert_as_alone(model, requests, answers(engine, requests))
    names = list(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    asyncio.run(engine.publish(model, version=1))
    assert_as_alone(model, requests, answers(engine, requests))
    first = model.model.layers[0]
    assert first.self_attn.fused_weight.data_ptr() == first.self_attn.q_proj.weight.data_ptr()
    assert list(model.state_dict()) == names
    assert "forward" not in vars(first.self_attn) and "forward" not in vars(first.mlp)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_sliding_windows(name: str, on_gpu: MakeEngine) -> None:
    model = family(name).to(DEVICE)
    requests = [([*range(20, 30 + n)], Sampling(max_tokens=10, seed=n)) for n in range(3)]
    assert_as_alone(model, requests, answers(on_gpu(model), requests))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: compiled layers, captured")
def test_compiled_layers_compute_the_same_and_the_learners_are_left_as_they_were(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    before = [layer.forward for layer in model.model.layers]
    requests = [([n + 3, 9, 10], Sampling(max_tokens=20, seed=n)) for n in range(5)]
    assert_as_alone(model, requests, answers(on_gpu(model, compiled=True), requests))
    assert [layer.forward for layer in model.model.layers] == before


def test_rows_leave_at_different_times_and_others_take_their_place(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    requests = [([n + 3, 9, 10], Sampling(max_tokens=25, seed=n)) for n in range(7)]
    ends = [2, 11]
    done = answers(on_gpu(model, eos_ids=ends, max_sequences=4), requests)
    assert {one.stop for one in done} == {StopReason.EOS, StopReason.LENGTH}
    assert len({len(one.token_ids) for one in done}) > 3
    assert_as_alone(model, requests, done)
    as_on_a_cpu(model, requests, done, eos_ids=ends)


def test_greedy_follows_the_argmax_and_has_logprob_zero(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    requests = [([9, 10, 11], Sampling(temperature=0.0, max_tokens=12)), ([5, 6], Sampling(max_tokens=12))]
    greedy, sampled = answers(on_gpu(model, eos_ids=[]), requests)
    ids = [9, 10, 11]
    for token in greedy.token_ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids], device=DEVICE)).logits[0, -1].argmax())
        ids.append(token)
    assert greedy.logprobs == (0.0,) * 12
    assert_as_alone(model, requests[1:], [sampled])


@torch.no_grad()
def test_rows_with_top_p_draw_from_what_is_left_and_do_not_disturb_the_others(on_gpu: MakeEngine) -> None:
    """While such a row is there all go one token at a time; when it has left, several. No numbers get mixed up."""
    model = tiny_llama().to(DEVICE)
    few = Sampling(max_tokens=5, seed=7, top_p=0.5)
    requests = [([5, 6, 7], few), ([9, 10, 11], Sampling(max_tokens=24, seed=1))]
    done = answers(on_gpu(model, eos_ids=[]), requests)
    assert_as_alone(model, requests[1:], done[1:])
    ids = torch.tensor([[5, 6, 7, *done[0].token_ids]], device=DEVICE)
    logprobs = truncate(torch.log_softmax(model(ids).logits[0, 2:-1].cpu(), -1), [few] * 5)
    expected = logprobs.gather(-1, ids[0, 3:, None].cpu())[:, 0]
    torch.testing.assert_close(torch.tensor(done[0].logprobs), expected, atol=1e-4, rtol=0)
    as_on_a_cpu(model, requests, done, eos_ids=[])


def test_a_row_with_top_p_that_comes_later_does_not_disturb_the_others(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[])
    first: Request = ([9, 10, 11], Sampling(max_tokens=40, seed=1))
    short: Request = ([7, 8, 9], Sampling(max_tokens=3, seed=5))
    later: Request = ([5, 6, 7], Sampling(max_tokens=5, seed=7, top_p=0.5))

    async def agent() -> Completion:
        await engine.generate(*short)
        return await engine.generate(*later)

    async def both() -> list[Completion]:
        return list(await asyncio.gather(engine.generate(*first), agent()))

    as_on_a_cpu(model, [first, later], asyncio.run(both()), eos_ids=[])


def test_a_stop_string_cuts_what_was_drawn_beyond_it(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    plain = [([n + 3, 6, 7], Sampling(max_tokens=16, seed=n)) for n in range(3)]
    free = answers(on_gpu(model, eos_ids=[]), plain)
    stop = letters(free[0].token_ids[9:11])
    end = next(n for n in range(1, 17) if stop in letters(free[0].token_ids[:n]))
    requests = [(plain[0][0], Sampling(max_tokens=16, seed=0, stop=(stop,))), *plain[1:]]
    done = answers(on_gpu(model, eos_ids=[]), requests)
    assert done[0].token_ids == free[0].token_ids[:end]
    assert done[0].stop is StopReason.STOP
    assert_as_alone(model, requests, done)


def test_a_prompt_of_one_token_can_be_the_first(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    requests: list[Request] = [([5], Sampling(max_tokens=10))]
    assert_as_alone(model, requests, answers(on_gpu(model, eos_ids=[]), requests))


def test_steps_past_the_end_of_a_completion_change_no_other_row(on_gpu: MakeEngine) -> None:
    """The first ends where the cache's sequences end, in the middle of eight steps that the second wants."""
    model = tiny_llama().to(DEVICE)
    requests = [([*range(3, 57)], Sampling(max_tokens=10, seed=0)), ([5, 6, 7], Sampling(max_tokens=61, seed=1))]
    assert_as_alone(model, requests, answers(on_gpu(model, eos_ids=[]), requests))


def test_one_request_after_another_finds_nothing_of_the_one_before(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same shape, so that it takes the place of the other: in the buffers, and here in Python's memory too."""
    from covey.rollout.embedded import graphs

    monkeypatch.setattr(graphs, "id", lambda _: 0, raising=False)
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[])
    requests = [([n + 3, 9, 10 + n], Sampling(max_tokens=12, seed=n)) for n in range(2)]
    assert_as_alone(model, requests, [answers(engine, [request])[0] for request in requests])


def test_a_cache_too_small_for_all_serves_all(on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_batch, "BLOCK", 16)
    model = tiny_llama().to(DEVICE)
    requests = [([n + 3, *range(20, 33)], Sampling(max_tokens=30, seed=n)) for n in range(3)]
    done = answers(on_gpu(model, eos_ids=[], blocks=5), requests)
    assert_as_alone(model, requests, done)
    as_on_a_cpu(model, requests, done, eos_ids=[])


def test_a_request_larger_than_the_gpu_is_rejected_with_the_settings_to_change(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    with pytest.raises(ValueError, match=r"3 \+ 200 tokens.*rollout\.max_tokens.*rollout\.memory"):
        answers(on_gpu(model, blocks=2), [([3, 4, 5], Sampling(max_tokens=200))])


def test_a_next_turn_reads_its_beginning_from_the_cache_until_the_weights_change(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.rollout.embedded.graphs import GraphRunner, Span

    monkeypatch.setattr(gpu_batch, "BLOCK", 16)
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[])
    first: Request = ([*range(20, 40)], Sampling(max_tokens=20))
    (one,) = answers(engine, [first, ([5] * 60, Sampling(max_tokens=4))])[:1]
    second: Request = ([*first[0], *one.token_ids, 8, 9], Sampling(max_tokens=10, seed=1))
    prefilled: list[int] = []
    prefill = GraphRunner.prefill

    def count(self: GraphRunner, spans: Sequence[Span]) -> None:
        prefilled.extend(end - start for _, start, end in spans)
        prefill(self, spans)

    monkeypatch.setattr(GraphRunner, "prefill", count)
    done = answers(engine, [second])
    assert prefilled == [42 - 39 - 1]  # 39 were fed: two blocks of 16, and 7 tokens of a third
    assert_as_alone(model, [second], done)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.publish(model, version=1))
    assert_as_alone(model, [second], answers(engine, [second]))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU: graphs are captured")
def test_graphs_are_captured_while_another_thread_copies_weights_from_the_gpu(on_gpu: MakeEngine) -> None:
    """As the main thread does when it saves a checkpoint while the engine samples."""
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[])
    stop, errors = threading.Event(), []

    def save() -> None:
        while not stop.is_set():
            try:
                for weight in model.state_dict().values():
                    assert bool(weight.clone().cpu().isfinite().all())
            except Exception as error:
                errors.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    try:
        requests = [([n + 3, 9, 10], Sampling(max_tokens=2 + 4 * n, seed=n)) for n in range(12)]
        assert_as_alone(model, requests, answers(engine, requests))
    finally:
        stop.set()
        saving.join()
    assert errors == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_prompts_of_all_lengths_entering_while_others_decode(
    name: str, on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a chunk, shorter than a tile, with common beginnings; groups with a partly filled block."""
    from covey.rollout.embedded import graphs

    monkeypatch.setattr(gpu_batch, "BLOCK", 16)
    monkeypatch.setattr(graphs, "CHUNKS", (32, 64))
    model = family(name).to(DEVICE)
    engine = on_gpu(model, eos_ids=[], max_sequences=6)
    prompts = [[5, 6], [*range(3, 53)], [*range(3, 53), 7], [*range(3, 40)], [*range(30, 58)] * 3, [*range(3, 20)]]
    requests = [
        (prompt, Sampling(max_tokens=4 + 3 * n, seed=2 * n + copy))
        for n, prompt in enumerate(prompts)
        for copy in range(1 + n % 2)
    ]

    async def one_after_the_other() -> list[Completion]:
        asked = []
        for prompt, sampling in requests:
            asked.append(asyncio.create_task(engine.generate(prompt, sampling)))
            target = engine.generated_tokens + 1
            while engine.generated_tokens < target and not asked[-1].done():
                await asyncio.sleep(0)
        return list(await asyncio.gather(*asked))

    done = asyncio.run(one_after_the_other())
    assert_as_alone(model, requests, done)
    as_on_a_cpu(model, requests, done, eos_ids=[])


def test_requests_enter_and_leave_without_a_gap_between_runs(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests are running, the next run is launched before the last one is read."""
    from covey.rollout.embedded.graphs import DecodeRun, GraphRunner

    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[], max_sequences=8)
    unread, events = 0, []
    launch, read = GraphRunner.launch, DecodeRun.read

    def launching(self: GraphRunner, *args: Any, **named: Any) -> DecodeRun:
        nonlocal unread
        unread += 1
        return launch(self, *args, **named)

    def reading(self: DecodeRun) -> Any:
        nonlocal unread
        unread -= 1
        events.append(unread)
        return read(self)

    monkeypatch.setattr(GraphRunner, "launch", launching)
    monkeypatch.setattr(DecodeRun, "read", reading)

    async def agent(number: int) -> None:
        for turn in range(3):
            await engine.generate([number + 3, turn + 9, 10], Sampling(max_tokens=6 + number, seed=number))
            await asyncio.sleep(0)

    async def agents() -> None:
        long = asyncio.create_task(engine.generate([4, 5], Sampling(max_tokens=120)))
        await asyncio.gather(*(agent(number) for number in range(7)))
        await long

    asyncio.run(agents())
    assert events[-1] == 0 and set(events[:-1]) == {1}  # nothing is left to launch only at the very end


def test_a_pause_reads_what_is_launched_so_no_token_is_sampled_twice(on_gpu: MakeEngine) -> None:
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[])
    requests: list[Request] = [([n + 3, 9, 10], Sampling(max_tokens=40, seed=n)) for n in range(3)]

    async def with_pauses() -> tuple[list[Completion], list[int]]:
        asked = [asyncio.create_task(engine.generate(*request)) for request in requests]
        steps = []
        for target in (10, 60):
            while engine.generated_tokens < target:
                await asyncio.sleep(0)
            await engine.pause()
            steps.append(engine.generated_tokens)
            run = engine._batch._run  # type: ignore[union-attr]
            assert run is None
            await engine.resume()
        return list(await asyncio.gather(*asked)), steps

    done, _ = asyncio.run(with_pauses())
    assert_as_alone(model, requests, done)
    as_on_a_cpu(model, requests, done, eos_ids=[])


def test_sizes_of_decode_steps() -> None:
    from covey.rollout.embedded.graphs import batch_sizes, quarters

    assert batch_sizes(100) == [8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert batch_sizes(3) == [3]
    assert quarters(batch_sizes(256)) == [16, 64, 256]
    assert quarters(batch_sizes(100)) == [24, 100]


def test_sizes_in_between_are_captured_once_they_were_used_often(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.rollout.embedded import graphs

    monkeypatch.setattr(graphs, "FEWEST", 1)
    monkeypatch.setattr(graphs, "WORTH", 40)
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[], max_sequences=8)

    def ask(count: int, tokens: int) -> set[int]:
        requests = [([n + 3, 9, 10], Sampling(max_tokens=tokens, seed=n)) for n in range(count)]
        assert_as_alone(model, requests, answers(engine, requests))
        return {size for kind, size in engine._batch._graphs.captured if kind == "draw"}

    assert ask(8, 16) == {8}
    assert ask(3, 16) == {8}  # of 2 and 8, each a quarter of the next, the one that is large enough
    assert ask(2, 16) == {8, 2}
    assert ask(3, 40) == {8, 2, 3}


def test_prompts_that_wait_are_computed_before_results_are_delivered(
    on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has work while the event loop runs the agents that got their replies."""
    from covey.rollout.embedded.graphs import GraphRunner

    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[], max_sequences=2)
    events: list[str] = []
    prefill, deliver = GraphRunner.prefill, engine._deliver
    monkeypatch.setattr(GraphRunner, "prefill", lambda *args: (events.append("prefill"), prefill(*args))[1])
    monkeypatch.setattr(engine, "_deliver", lambda request: (events.append("deliver"), deliver(request))[1])
    requests = [([n + 3, *range(20, 30)], Sampling(max_tokens=8, seed=n)) for n in range(6)]
    assert_as_alone(model, requests, answers(engine, requests))
    rest = events[events.index("deliver") - 1 :]
    assert rest == ["prefill", "deliver", "deliver", "prefill", "deliver", "deliver", "deliver", "deliver"]


def test_prompts_are_launched_while_others_are_admitted(on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.rollout.embedded import graphs
    from covey.rollout.embedded.scheduler import Scheduler

    monkeypatch.setattr(graphs, "CHUNKS", (32, 64))
    model = tiny_llama().to(DEVICE)
    engine = on_gpu(model, eos_ids=[], max_sequences=8)
    warm = [([3, 4, 5], Sampling(max_tokens=2, seed=n)) for n in range(8)]
    answers(engine, warm)
    events: list[str] = []
    prefill, admitted = graphs.GraphRunner.prefill, Scheduler._admit_leader
    monkeypatch.setattr(graphs.GraphRunner, "prefill", lambda *args: (events.append("prefill"), prefill(*args))[1])
    monkeypatch.setattr(Scheduler, "_admit_leader", lambda *args: (events.append("admit"), admitted(*args))[1])
    requests = [([n + 3, *range(20, 50)], Sampling(max_tokens=4, seed=n)) for n in range(4)]
    assert_as_alone(model, requests, answers(engine, requests))
    assert events == ["admit", "admit", "admit", "prefill", "admit", "prefill"]  # two prompts fill a pass
