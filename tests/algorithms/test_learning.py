"""Every algorithm and every loss learns: a policy of three tokens, each with logits of its own, from its samples to its
reward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.algorithms import ALGORITHMS, make
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.ops import make_batch
from covey.types import Samples
from tests.algorithms.helpers import EXCHANGEABLE, F64, outputs, samples_of, total_loss

GROUPS, SIZE, LENGTH, WORDS = 4, 8, 3, 5


def rewards_of(tokens_NT: Tensor) -> Tensor:
    """The share of tokens that are the right word, 0, 1, 2 by place."""
    return (tokens_NT == torch.arange(LENGTH)).double().mean(-1)


def sampled(logits_TV: Tensor, start_TV: Tensor, random: torch.Generator) -> tuple[Tensor, Samples]:
    """The tokens of a step, with all that any algorithm may need."""
    count = GROUPS * SIZE
    policy_TV = logits_TV.detach().log_softmax(-1)
    tokens_NT = torch.multinomial(policy_TV.exp(), count, replacement=True, generator=random).T

    def scored(log_TV: Tensor) -> Tensor:
        return log_TV.expand(count, LENGTH, WORDS).gather(-1, tokens_NT[..., None])[..., 0]

    old_NT = scored(policy_TV)
    samples = samples_of(
        rewards_of(tokens_NT).tolist(),
        torch.arange(count) // SIZE,
        mask=torch.ones(count, LENGTH).tolist(),
        old_logprobs_RT=old_NT,
        ref_logprobs_RT=scored(start_TV.log_softmax(-1)),
        values_RT=torch.zeros(count, LENGTH, dtype=F64),
        score_norms_RT=1 - 2 * old_NT.exp() + (policy_TV.exp() ** 2).sum(-1),
        baseline_rewards_G=rewards_of(policy_TV.argmax(-1)[None]).expand(GROUPS),
        max_tokens=LENGTH,
    )
    return tokens_NT, samples


def train(algorithm: Algorithm, steps: int = 40, updates: int = 2) -> float:
    """The mean reward of the last steps; at the start it is 1/5."""
    random = torch.Generator().manual_seed(0)
    logits_TV = torch.zeros(LENGTH, WORDS, dtype=F64, requires_grad=True)
    start_TV, optimiser, rewards = logits_TV.detach().clone(), torch.optim.Adam([logits_TV], lr=0.05), []
    for _ in range(steps):
        tokens_NT, samples = sampled(logits_TV, start_TV, random)
        samples, _ = algorithm.shape(samples)
        values = algorithm.advantages(samples).values
        batch = make_batch(
            rows=(),
            group_N=samples.group_N,
            rewards_N=samples.total_reward(),
            episode_R=samples.episode_R,
            mask_RT=samples.mask_RT,
            old_logprobs_RT=samples.old_logprobs_RT,
            ref_logprobs_RT=samples.ref_logprobs_RT,
            advantages_RT=values if values.dim() == 2 else values[:, None].expand(tokens_NT.shape),
            max_tokens=LENGTH,
        )
        for epoch in range(1 if algorithm.objective.on_policy_only else updates):
            log_NTV = logits_TV.log_softmax(-1).expand(len(tokens_NT), LENGTH, WORDS)
            logprobs = log_NTV.gather(-1, tokens_NT[..., None])[..., 0]
            optimiser.zero_grad()
            total_loss(algorithm, logprobs, replace(batch, epoch=epoch)).backward()
            optimiser.step()
        rewards.append(float(rewards_of(tokens_NT).mean()))
    assert outputs(logits_TV).logprobs.isfinite().all()
    assert rewards[0] < 0.4
    return sum(rewards[-5:]) / 5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns(name: str) -> None:
    options = {"gvpo": {"reference": "old"}, "gspo": {"clip_low": 0.2, "clip_high": 0.2}}.get(name, {})
    assert train(make(name, **options)) > 0.6


@pytest.mark.parametrize("loss", EXCHANGEABLE)
def test_every_loss_learns(loss: str) -> None:
    options = {"clip_low": 0.2, "clip_high": 0.2} if loss in ("gspo", "luspo") else {}
    assert train(make("rloo", loss=loss, **options)) > 0.6
