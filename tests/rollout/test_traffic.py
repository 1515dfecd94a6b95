"""The engine under random traffic, with weights that really change: every log-prob against plain forward passes.

Requests arrive at any time, alone, in groups, with common beginnings and as next turns of an episode; some callers give
up; the cache is too small for all, so sequences are sent back and computed again; an update pauses the engine, changes
the weights and publishes them while answers are in progress.

The reference replays each answer with transformers' own cache: keys and values that were computed when the sequence was
admitted come from the weights of that moment, later ones from the weights that drew the next token. `make test-gpu`
runs the same on a GPU.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from covey.rollout.embedded import EmbeddedEngine, gpu_batch
from covey.rollout.embedded.runner import draw
from covey.rollout.embedded.scheduler import RequestState, Scheduler
from covey.types import Completion, Sampling
from tests.learner.test_forward import family
from tests.rollout.conftest import MakeEngine
from tests.rollout.plain import engine_for
from tests.rollout.triton_support import CAN_RUN_TRITON, DEVICE

ON_GPU = DEVICE.type == "cuda"
TOLERANCE = 3e-4 if ON_GPU else 1e-4
KINDS = [
    pytest.param("rows", marks=pytest.mark.skipif(ON_GPU, reason="a CPU's way of keeping the cache")),
    "blocks",
    pytest.param("graphs", marks=pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs Triton")),
    pytest.param("compiled", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
]


class Traffic:
    def __init__(self, engine: EmbeddedEngine, model: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.model = model
        self.rng = random.Random(seed)
        self.versions = [copy.deepcopy(model)]
        self.admitted: dict[int, list[tuple[int, int]]] = {}  # seed of a request → tokens it had drawn, version
        self.done: list[tuple[tuple[int, ...], Sampling, Completion]] = []
        self.seeds = 0
        enter = Scheduler._enter

        def note(scheduler: Scheduler, request: RequestState, *rest: Any, **named: Any) -> None:
            self.admitted.setdefault(request.sampling.seed, []).append((len(request.ids), engine.version))
            enter(scheduler, request, *rest, **named)

        monkeypatch.setattr(Scheduler, "_enter", note)

    async def run(self, episodes: int, updates: int) -> None:
        playing = [asyncio.create_task(self._episode()) for _ in range(episodes)]
        for task in self.rng.sample(playing, episodes // 8):
            asyncio.get_running_loop().call_later(self.rng.random() * 0.2, task.cancel)
        updating = asyncio.create_task(self._updates(updates))
        await asyncio.gather(*playing, return_exceptions=True)
        for task in playing:
            if not task.cancelled():
                task.result()
        updating.cancel()

    async def _episode(self) -> None:
        """A group of attempts at one prompt, some with a second turn."""
        rng = self.rng
        await asyncio.sleep(rng.random() * 0.3)
        beginning = range(20, 20 + rng.choice((0, 5, 16, 19)))
        prompt = [*beginning, *(rng.randint(3, 40) for _ in range(rng.randint(1, 12)))]
        await asyncio.gather(*(self._attempt(prompt) for _ in range(rng.choice((1, 1, 2, 4)))))

    async def _attempt(self, prompt: Sequence[int]) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2))):
            self.seeds += 1
            sampling = Sampling(max_tokens=rng.randint(1, 26), seed=self.seeds, temperature=rng.choice((1.0, 0.7)))
            one = await self.engine.generate(prompt, sampling)
            self.done.append((tuple(prompt), sampling, one))
            prompt = [*prompt, *one.token_ids, rng.randint(3, 40), 7]

    async def _updates(self, count: int) -> None:
        for version in range(1, count + 1):
            target = self.engine.generated_tokens + self.rng.randint(20, 60)
            while self.engine.generated_tokens < target:
                await asyncio.sleep(0.001)
            await self.engine.pause()
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.05 * weight.std(correction=0))
            self.versions.append(copy.deepcopy(self.model))
            await self.engine.publish(self.model, version)
            await self.engine.resume()

    def check(self) -> None:
        other = total = 0
        for prompt, sampling, one in self.done:
            logits = self._replayed(prompt, sampling, one)
            expected = torch.log_softmax(logits / sampling.temperature, -1)
            chosen = expected.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(one.logprobs), chosen, atol=TOLERANCE, rtol=0)
            ids, _ = draw(logits, [sampling] * len(logits), range(len(logits)))
            other, total = other + int((ids != torch.tensor(one.token_ids)).sum()), total + len(ids)
        assert other <= max(1, total // 200), f"{other} of {total} tokens are not those that their numbers draw"

    @torch.no_grad()
    def _replayed(self, prompt: tuple[int, ...], sampling: Sampling, one: Completion) -> Tensor:
        """Logits before each sampled token, [T, V]."""
        tokens, admitted = [*prompt, *one.token_ids], self.admitted[sampling.seed]
        found: list[Tensor] = []
        for (begin, version), (end, _) in zip(admitted, [*admitted[1:], (len(one.token_ids), 0)], strict=True):
            cache = DynamicCache(config=self.model.config)
            fed = len(prompt) + begin - 1
            self._feed(version, tokens[:fed], cache)
            drawn = range(begin, end)
            for drawing, group in groupby(drawn, key=lambda place: one.versions[place]):
                count = len(list(group))
                found.append(self._feed(drawing, tokens[fed : fed + count], cache))
                fed += count
        return torch.cat(found)

    def _feed(self, version: int, ids: Sequence[int], cache: DynamicCache) -> Tensor:
        if not ids:
            return torch.empty(0, self.model.config.vocab_size)
        out = self.versions[version](torch.tensor([ids], device=DEVICE), past_key_values=cache, use_cache=True)
        logits: Tensor = out.logits[0].float().cpu()
        return logits


def traffic(
    kind: str,
    name: str,
    seed: int,
    on_gpu: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    eos_ids: Sequence[int] = (2, 11),
    blocks: int = 12,
) -> Traffic:
    model = family(name).to(DEVICE)
    options: dict[str, Any] = {"eos_ids": eos_ids, "max_sequences": 5}
    if kind == "rows":
        engine = engine_for(model, **options)
    else:
        monkeypatch.setattr(gpu_batch, "BLOCK", 16)
        options |= {"blocks": blocks, "eager": kind == "blocks", "compiled": kind == "compiled"}
        engine = on_gpu(model, **options)
    return Traffic(engine, model, seed, monkeypatch)


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("qwen3", 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_log_prob_is_that_of_the_weights_of_its_time(
    kind: str, name: str, seed: int, on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = traffic(kind, name, seed, on_gpu, monkeypatch)
    interpreted = kind == "graphs" and not ON_GPU  # a hundred times slower
    asyncio.run(asked.run(episodes=4 if interpreted else 16, updates=6))
    asked.check()
    crossed = [one for *_, one in asked.done if len(set(one.versions)) > 1]
    assert interpreted or (len(asked.versions) > 3 and crossed), "no answer was in progress while weights changed"


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_weights_leave_nothing_behind(
    kind: str, on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fail while weights are NaN. After finite ones are published, none fails, wherever it is in the cache."""
    asked = traffic(kind, "llama", 0, on_gpu, monkeypatch, eos_ids=[], blocks=30)
    engine, model = asked.engine, asked.model
    prompts = [[*range(3, 30 + n)] for n in range(4)]

    async def answers(seed: int, max_tokens: int) -> list[Completion]:
        settings = [Sampling(max_tokens=max_tokens, seed=seed + n) for n in range(len(prompts))]
        done = list(await asyncio.gather(*map(engine.generate, prompts, settings)))
        for prompt, sampling, one in zip(prompts, settings, done, strict=True):
            asked.done.append((tuple(prompt), sampling, one))
        return done

    async def three_times() -> list[int]:
        finite = []
        sound = copy.deepcopy(model.state_dict())
        for version, max_tokens in enumerate((12, 30, 12)):
            if version == 1:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.fill_(math.nan)
            else:
                model.load_state_dict(sound)
            await engine.publish(model, version)
            asked.versions.append(copy.deepcopy(model))
            done = await answers(100 * version, max_tokens)
            finite.append(sum(all(map(math.isfinite, one.logprobs)) for one in done))
            if version == 1:
                asked.done = asked.done[: -len(done)]
        return finite

    asked.versions.clear()
    assert asyncio.run(three_times()) == [4, 0, 4]
    asked.check()


@pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs Triton: only launched steps are read later")
@pytest.mark.parametrize("ahead", [True, False])
def test_a_prompt_that_entered_before_an_update(
    ahead: bool, on_gpu: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It enters while steps of another request are launched and unread. If its own first steps are launched too, they
    are read before the weights change. Otherwise its prompt is computed again, with the weights of its first token."""
    asked = traffic("graphs", "llama", 0, on_gpu, monkeypatch, eos_ids=[], blocks=30)
    engine, model = asked.engine, asked.model
    first, late = Sampling(max_tokens=60, seed=1), Sampling(max_tokens=16, seed=2)
    reserve = Scheduler.reserve_if_free
    if not ahead:
        monkeypatch.setattr(
            Scheduler, "reserve_if_free", lambda self, steps: 2 not in asked.admitted and reserve(self, steps)
        )

    async def run() -> Completion:
        prompts = [[*range(3, 43)], [*range(5, 45)]]  # a cache with room for both requests below
        await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=24, seed=9)) for prompt in prompts))
        before = engine.generated_tokens
        asking = asyncio.create_task(engine.generate([3, 4, 5], first))
        while engine.generated_tokens == before:
            await asyncio.sleep(0)
        entering = asyncio.create_task(engine.generate([*range(20, 40)], late))
        while 2 not in asked.admitted:
            await asyncio.sleep(0)
        await engine.pause()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.3)
        asked.versions.append(copy.deepcopy(model))
        await engine.publish(model, 1)
        await engine.resume()
        one = await entering
        asked.done += [(tuple(range(20, 40)), late, one), ((3, 4, 5), first, await asking)]
        return one

    one = asyncio.run(run())
    assert one.versions[0] == (0 if ahead else 1) and one.versions[-1] == 1
    assert asked.admitted[2] == ([(0, 0)] if ahead else [(0, 0), (0, 1)])
    asked.check()
