"""What must change no loss: the order of answers and rows, padding, how an episode is cut into rows, micro-batches, and
whatever lies where nothing was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import LOSSES, make
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.functional import policy_loss
from covey.algorithms.ops import make_batch
from covey.types import Batch
from tests.algorithms.helpers import F64, NAN, PAIRED, outputs, random_batch, same, total_loss, value_and_gradient

ALL_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Every loss as it comes, with two KLs beside it where it may have them; and one with every aggregation.
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in LOSSES]
CASES += [("ppo_clip", {"aggregation": how}) for how in ALL_AGGREGATIONS]
CASES += [("gspo", {"aggregation": "token-mean"}), ("gvpo", {"reference": "old", "clip_weight": 0.3})]
CASES += [("clip_cov", {"clip_cov_ratio": 0.2, "clip_cov_low": 0.1}), ("kl_cov", {"kl_cov_ratio": 0.2})]
IDS = ["-".join([name, *map(str, options.values())]) for name, options in CASES]

every_loss = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


def built(name: str, options: dict[str, Any]) -> Algorithm:
    if name in PAIRED:
        return make(name, **options)
    return make("grpo", loss=name, kl_coef=0.1, kl_old_coef=0.2, **options)


def called(
    name: str, options: dict[str, Any], columns: Sequence[Tensor], groups: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """The functional form of the same, and its gradient in the log-probs."""
    logprobs, old, advantages, mask, ref = columns
    beside = {} if name in PAIRED else {"kl_coef": 0.1, "kl_old_coef": 0.2}
    return value_and_gradient(
        lambda x: policy_loss(
            name, x, old, advantages, mask, groups=groups, ref_logprobs=ref, **(beside | options | more)
        )[0],
        logprobs,
    )


def one_row_each(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Log-probs, old ones, advantages, mask and reference of eight answers, and their groups."""
    rng = torch.Generator().manual_seed(seed)
    old = -1.5 + 0.5 * torch.randn(8, 6, generator=rng, dtype=F64)
    near = [old + 0.3 * torch.randn(8, 6, generator=rng, dtype=F64) for _ in range(2)]
    mask = torch.arange(6) < torch.randint(1, 7, (8, 1), generator=rng)
    mask[0] = torch.tensor([1, 1, 0, 0, 1, 1])
    advantages = torch.randn(8, generator=rng, dtype=F64)
    return [near[0], old, advantages, mask, near[1]], torch.tensor([0, 1, 0, 1, 2, 2, 0, 2])


def norm(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The constant of dr_grpo, which is otherwise the width of what is passed."""
    fixed = "seq-mean-token-sum-norm" in (dict(LOSSES[name].defaults) | options).values()
    return {"norm_length": 6} if fixed else {}


@every_loss
def test_the_order_of_the_answers_does_not_matter(name: str, options: dict[str, Any]) -> None:
    columns, groups = one_row_each()
    before, gradient = called(name, options, columns, groups)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    found, moved = called(name, options, [column[order] for column in columns], groups[order])
    same(found, before)
    same(moved, gradient[order])


@every_loss
def test_padding_does_not_matter(name: str, options: dict[str, Any]) -> None:
    columns, groups = one_row_each()
    before, gradient = called(name, options, columns, groups, **norm(name, options))
    wider = [c if c.dim() == 1 else torch.cat([c, torch.zeros(8, 3, dtype=c.dtype)], 1) for c in columns]
    found, padded = called(name, options, wider, groups, **norm(name, options))
    same(found, before)
    same(padded, torch.cat([gradient, torch.zeros(8, 3, dtype=F64)], 1))


@every_loss
def test_how_an_episode_is_cut_into_rows_does_not_matter(name: str, options: dict[str, Any]) -> None:
    """Every answer once as one row, and once as two: its first three tokens and the rest."""
    (logprobs, old, advantages, mask, ref), groups = one_row_each()
    algorithm = built(name, options)

    def batch(repeats: int) -> Batch:
        front = torch.arange(6) < 3
        cut = torch.cat([mask & front, mask & ~front]) if repeats == 2 else mask
        return make_batch(
            rows=(),
            group_N=groups,
            rewards_N=advantages,
            episode_R=torch.arange(8).repeat(repeats),
            mask_RT=cut,
            old_logprobs_RT=old.repeat(repeats, 1),
            ref_logprobs_RT=ref.repeat(repeats, 1),
            advantages_RT=advantages.repeat(repeats)[:, None].expand(8 * repeats, 6),
            max_tokens=6,
        )

    whole = value_and_gradient(lambda x: total_loss(algorithm, x, batch(1)), logprobs)
    cut = value_and_gradient(lambda x: total_loss(algorithm, x.repeat(2, 1), batch(2)), logprobs)
    same(cut[0], whole[0])
    same(cut[1], whole[1])


def summed(algorithm: Algorithm, logprobs: Tensor, batch: Batch, parts: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([total_loss(algorithm, logprobs[list(part)], batch.take(part)) for part in parts]).sum()


@every_loss
def test_micro_batches_add_up_to_the_whole(name: str, options: dict[str, Any]) -> None:
    """Cut anywhere, also through episodes and groups: what they share then comes from a first pass."""
    logprobs, batch = random_batch()
    algorithm = built(name, options)
    whole = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    told = algorithm.first_pass(outputs(logprobs), batch)
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7, 8]], [[8, 0], [5, 2, 7], [1], [6, 3, 4]], [[i] for i in range(9)]):
        found = value_and_gradient(partial(summed, algorithm, batch=told, parts=parts), logprobs)
        same(found[0], whole[0])
        same(found[1], whole[1])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gvpo", [[0, 2, 4], [1, 3, 5, 8], [6, 7]]),  # whole groups
        ("online_dpo", [[0, 2, 4], [1, 3, 5, 8], [6, 7]]),
        ("gspo", [[0, 4, 3], [2, 1, 8], [5], [6, 7]]),  # whole episodes
        ("gmpo", [[0, 4, 3], [2, 1, 8], [5], [6, 7]]),
        ("vespo", [[0, 4, 3], [2, 1, 8], [5], [6, 7]]),
        ("ppo_clip", [[0, 1], [2, 3, 4, 5], [6, 7, 8]]),
    ],
)
def test_without_a_first_pass_micro_batches_hold_what_belongs_together(name: str, parts: list[list[int]]) -> None:
    logprobs, batch = random_batch()
    algorithm = built(name, {})
    whole = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    found = value_and_gradient(lambda x: summed(algorithm, x, batch, parts), logprobs)
    same(found[0], whole[0])
    same(found[1], whole[1])


def test_metrics_of_a_micro_batch_use_what_belongs_together() -> None:
    """GSPO's clip fractions of a part with half an episode are those of its tokens in the whole."""
    logprobs, batch = random_batch()
    algorithm = make("gspo")
    told = algorithm.first_pass(outputs(logprobs), batch)
    whole = algorithm.metrics(outputs(logprobs), batch)
    for key in ("policy/clip_low", "policy/clip_high"):
        parts = [
            algorithm.metrics(outputs(logprobs[[i]]), told.take([i]))[key] * int(batch.mask_RT[i].sum())
            for i in range(9)
        ]
        assert sum(parts) / int(batch.mask_RT.sum()) == pytest.approx(whole[key])


GARBAGE = (NAN, float("inf"), float("-inf"), 1e30)
COLUMNS = ("logprobs", "old_logprobs_RT", "ref_logprobs_RT", "advantages_RT")


def with_garbage(column: str, garbage: float) -> tuple[Tensor, Batch]:
    """The random batch, with garbage in one column wherever nothing was sampled."""
    logprobs, batch = random_batch()
    dirty = {name: getattr(batch, name).masked_fill(~batch.mask_RT, garbage) for name in COLUMNS[1:] if name == column}
    _, batch = random_batch(**dirty)
    return logprobs.masked_fill(~batch.mask_RT, garbage) if column == "logprobs" else logprobs, batch


@pytest.mark.parametrize("column", COLUMNS)
@every_loss
def test_what_was_not_sampled_never_leaks(name: str, options: dict[str, Any], column: str) -> None:
    """Neither into the loss, nor, as 0 · NaN, into the gradient of any log-prob."""
    algorithm = built(name, options)
    logprobs, batch = random_batch()
    clean = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    metrics = algorithm.metrics(outputs(logprobs), batch)
    for garbage in GARBAGE:
        at, dirty = with_garbage(column, garbage)
        found = value_and_gradient(partial(total_loss, algorithm, batch=dirty), at)
        same(found[0], clean[0])
        same(found[1][batch.mask_RT], clean[1][batch.mask_RT])
        assert algorithm.metrics(outputs(at), dirty) == pytest.approx(metrics)
        assert found[1][~batch.mask_RT].tolist() == [0.0] * int((~batch.mask_RT).sum())
