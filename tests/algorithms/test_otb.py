"""The optimal token baseline: by hand, against a plain loop, and its gradient's variance by enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.functional import advantages
from tests.algorithms.helpers import F64, same, samples_of, tensor


def test_the_baseline_of_each_position_by_hand() -> None:
    """Rewards 1 and 0. W: ½, 1, 2 and 1, 3. B = ½/(½ + 1) = ⅓, then 1/(1 + 3) = ¼; then the first goes on alone."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    norms = tensor([0.5, 0.5, 1.0], [1.0, 2.0, 9.0])
    found = advantages("otb", tensor(1, 0), [0, 0], mask=mask, score_norms=norms)
    same(found, [[2 / 3, 3 / 4, 1], [-1 / 3, -1 / 4, 0]])


def test_equal_norms_give_the_mean_of_those_that_are_still_running() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    found = advantages("otb", tensor(1, 0, 2), [0] * 3, mask=mask, score_norms=torch.ones(3, 3, dtype=F64))
    same(found, [[0, 0.5, 0.5], [-1, -0.5, -0.5], [1, 0, 0]])


def test_groups_without_signal_and_answers_alone() -> None:
    mask, norms = torch.ones(4, 2), torch.rand(4, 2, dtype=F64)
    mask[0, 1] = 0  # so that the second goes on alone
    with pytest.warns(UserWarning, match="1 groups have a single answer"):
        found = advantages("otb", tensor(0.1, 0.1, 0.1, 5), [0, 0, 0, 1], mask=mask, score_norms=norms)
    assert not found.any()


def by_loop(rewards: Tensor, groups: list[int], mask: Tensor, episode: list[int], norms: Tensor) -> Tensor:
    """Each episode's sampled tokens in order, across rows; then position by position."""
    paths: list[list[tuple[int, int]]] = [[] for _ in groups]
    for r, t in mask.nonzero().tolist():
        paths[episode[r]].append((r, t))
    energy = [list(itertools.accumulate(float(norms[place]) for place in path)) for path in paths]
    found = torch.zeros(mask.shape, dtype=F64)
    for i, path in enumerate(paths):
        for step, place in enumerate(path):
            running = [j for j in range(len(groups)) if groups[j] == groups[i] and len(paths[j]) > step]
            total = sum(energy[j][step] for j in running)
            baseline = sum(energy[j][step] * float(rewards[j]) for j in running) / total if len(running) > 1 else 0.0
            found[place] = rewards[i] - baseline
    return found


def test_across_turns_and_forked_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 6, generator=rng) < 0.6
    episode, groups = [3, 0, 1, 0, 2, 4, 3, 1], [0, 0, 0, 1, 1]
    norms, rewards = torch.rand(8, 6, generator=rng, dtype=F64), torch.rand(5, generator=rng, dtype=F64)
    samples = samples_of(rewards.tolist(), groups, mask=mask.tolist(), episode=episode, score_norms_RT=norms)
    found = make("otb").advantages(samples)
    same(found.values, by_loop(rewards, groups, mask, episode, norms))
    assert found.metrics["otb/score_norm"] == pytest.approx(float(norms[mask].mean()))


def test_no_other_baseline_has_less_variance() -> None:
    """One token, actions drawn from a softmax: with B = Σ p w R / Σ p w, E‖(R − B) ∂ log π/∂ logits‖² is smallest."""
    policy, reward = torch.softmax(tensor(0.3, -0.5, 0.9), -1), tensor(1.0, 0.2, -0.4)
    score = torch.eye(3, dtype=F64) - policy
    norm = (score**2).sum(-1)
    same(norm, 1 - 2 * policy + (policy**2).sum())
    counts = torch.tensor([2, 5, 3])  # a group whose frequencies play the probabilities
    drawn = torch.arange(3).repeat_interleave(counts)
    found = advantages("otb", reward[drawn], [0] * 10, mask=torch.ones(10, 1), score_norms=norm[drawn][:, None])
    baseline = float((reward[drawn] - found[:, 0]).mean())

    def second_moment(b: float) -> float:
        return float(((reward[drawn] - b) ** 2 * norm[drawn]).sum())

    assert all(second_moment(baseline) < second_moment(baseline + shift) for shift in (-0.1, -1e-3, 1e-3, 0.1))


def test_what_it_needs() -> None:
    with pytest.raises(ValueError, match="otb needs score_norms="):
        advantages("otb", tensor(1, 0), [0, 0])
