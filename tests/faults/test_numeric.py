"""Non-finite and huge values: in advantages and losses, rewards, logits and gradients."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithms import ALGORITHMS, make
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.catalogue import LOSSES
from covey.algorithms.kl import Kl
from covey.config.schema import LearnerConfig
from covey.errors import EpisodeError
from covey.learner.learner import Learner, NonFiniteError
from covey.learner.logprobs import ChosenLogProb
from covey.protocols import LossTerm
from covey.rewards import RewardError, resolve_rewards
from covey.rollout.embedded.runner import draw
from covey.types import Completion, Sample, Samples, Sampling
from tests.algorithms.helpers import F64, PAIRED, outputs, random_batch, samples_of, total_loss, value_and_gradient
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.rewards.test_reward_set import TASK, attempt
from tests.rollout.test_collector import Scripted, collector, source

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
NAN, INF = math.nan, math.inf


def step_of(rewards: Sequence[float], groups: Sequence[int], **columns: Any) -> Samples:
    """A step with every input an algorithm may need: values, a greedy baseline, reference log-probs."""
    mask = [[1] * 3] * len(groups)
    greedy = torch.tensor([rewards[groups.index(group)] for group in sorted(set(groups))], dtype=F64)
    shape = (len(groups), 3)
    given = dict.fromkeys(("values_RT", "ref_logprobs_RT"), torch.zeros(shape, dtype=F64))
    columns = given | {"score_norms_RT": torch.ones(shape, dtype=F64)} | columns
    return samples_of(rewards, groups, mask=mask, baseline_rewards_G=greedy, **columns)


def advantages(algorithm: Algorithm, samples: Samples) -> Tensor:
    shaped, _ = algorithm.shape(samples)
    return algorithm.advantages(shaped).values


# -- rewards that do not differ ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "raft"])  # which compares with nothing
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e15, -1e15, 1e-300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_advantage_and_loss(name: str, reward: float, dtype: torch.dtype) -> None:
    """Advantages and loss are 0, not 0/0 and not rounding."""
    samples = step_of([reward] * 6, [0, 0, 0, 1, 1, 1], old_logprobs_RT=torch.full((6, 3), -1.0, dtype=dtype))
    algorithm = make(name)
    found = advantages(algorithm, samples)
    assert torch.equal(found, torch.zeros_like(found))
    logprobs, batch = random_batch(spread=0.0)
    batch = replace(batch, advantages_RT=torch.zeros_like(batch.advantages_RT), rewards_N=torch.full((7,), reward))
    value, gradient = value_and_gradient(lambda x: total_loss(algorithm, x, batch), logprobs)
    assert float(value) == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", ["grpo", "gdpo", "dgdo", "grpo_passk", "gspo", "dapo"])
def test_without_epsilon_a_constant_group_is_not_zero_by_zero(name: str) -> None:
    samples = step_of([0.5, 0.5, 1.0, 0.0], [0, 0, 1, 1])
    found = advantages(make(name, epsilon=0.0), samples)
    assert bool(found.isfinite().all())
    episode = found if found.dim() == 1 else found[:, 0]
    assert episode[0] == episode[1] == 0 and episode[2] > 0


def test_dgdo_without_epsilon_accepts_rewards_of_mean_zero() -> None:
    algorithm = make("dgdo", epsilon=0.0, warmup_steps=0, paper_exact=True)
    for _ in range(3):
        assert bool(advantages(algorithm, step_of([1.0, -1.0, 1.0, -1.0], [0, 0, 1, 1])).isfinite().all())
    assert all(math.isfinite(w) for w in algorithm.state_dict()["estimator"]["weights"].values())


@every_algorithm
def test_a_group_with_a_single_remaining_episode(name: str) -> None:
    """All others failed: there is nothing to compare it with, and other groups are not affected."""
    samples = step_of([1.0, 0.0, 1.0, 0.5], [0, 1, 1, 1])
    found = advantages(make(name), samples)
    assert bool(found.isfinite().all())
    needs = make(name).needs
    if needs.min_group_size > 1:
        alone = found[0] if found.dim() == 1 else found[0, 0]
        other = advantages(make(name), step_of([0.0, 1.0, 0.5], [0, 0, 0]))
        if name not in ("reinforce_plus_plus_baseline", "gdpo", "dgdo", "gpg"):  # these normalise over the whole step
            assert alone == 0 and torch.equal(found[1:], other)


@every_algorithm
@pytest.mark.parametrize("scale", [1e-30, 1e6, 1e15])
def test_rewards_of_any_size_give_finite_advantages(name: str, scale: float) -> None:
    old = torch.full((4, 3), -1.0, dtype=torch.float32)  # the precision of advantages in a run
    found = advantages(make(name), step_of([scale, 0.0, -scale, scale / 2], [0, 0, 1, 1], old_logprobs_RT=old))
    assert found.dtype == torch.float32 and bool(found.isfinite().all())


# -- answers without a token ---------------------------------------------------------------------------------------


@every_algorithm
@pytest.mark.parametrize("width", [0, 3])
def test_answers_without_a_single_token(name: str, width: int) -> None:
    mask = torch.zeros(4, width, dtype=torch.bool)
    nothing = torch.zeros(4, width, dtype=F64)
    samples = replace(
        step_of([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1]),
        **{"mask_RT": mask, "old_logprobs_RT": nothing, "values_RT": nothing, "ref_logprobs_RT": nothing}
        | {"score_norms_RT": nothing},
    )
    algorithm = make(name)
    assert bool(advantages(algorithm, samples).isfinite().all())
    logprobs, batch = random_batch()
    empty = replace(batch, mask_RT=torch.zeros_like(batch.mask_RT), length_N=torch.zeros_like(batch.length_N))
    value, gradient = value_and_gradient(lambda x: total_loss(algorithm, x, empty), logprobs)
    assert float(value) == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))
    assert all(math.isfinite(x) for x in algorithm.metrics(outputs(logprobs), empty).values())


@every_algorithm
def test_the_learner_accepts_empty_answers_among_others(name: str) -> None:
    """One answer without tokens, one with only the end token."""
    rows = rows_of(2, 3)
    rows[1] = replace(rows[1], response_ids=(), mask=(), logprobs=(), versions=())
    rows[4] = Sample(rows[4].prompt_ids, (2,), (True,), (-4.0,), (0,), 4)
    algorithm = make(name)
    if algorithm.needs.values:
        pytest.skip("a critic's values are tested by the losses above")
    learner = Learner(tiny_llama(), LearnerConfig(lr=1e-3), total_updates=2)
    metrics, _ = learner.update(batch_of(rows, 3, dtype=torch.float32), algorithm)
    assert math.isfinite(metrics["loss/total"]) and metrics["optim/skipped"] == 0
    nothing = [replace(row, response_ids=(), mask=(), logprobs=(), versions=()) for row in rows]
    metrics, _ = learner.update(batch_of(nothing, 3, dtype=torch.float32), algorithm)
    assert metrics["loss/total"] == 0.0 and metrics["optim/skipped"] == 0
    assert all(bool(p.isfinite().all()) for p in learner.model.parameters())


# -- policies that are far apart -----------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize(
    ("name", "loss"),
    [(n, None) for n in ALGORITHMS] + [("grpo", loss) for loss in LOSSES if loss not in PAIRED],
    ids=lambda x: x,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_that_overflow_exp(name: str, loss: str | None, apart: float, dtype: torch.dtype) -> None:
    """All tokens, or one of many: loss, gradient and metrics stay finite."""
    logprobs, batch = random_batch()
    batch = replace(
        batch,
        old_logprobs_RT=batch.old_logprobs_RT.to(dtype),
        advantages_RT=batch.advantages_RT.to(dtype),
        old_sum_N=batch.old_sum_N.to(dtype),
    )
    beside: dict[str, Any] = {} if name in PAIRED else {"kl_coef": 0.1, "kl_old_coef": 0.1}
    algorithm = make(name, **beside, **({} if loss is None else {"loss": loss}))
    one = torch.zeros_like(logprobs, dtype=torch.bool)
    one[0, 0] = True
    for where, sign in itertools.product((one, torch.ones_like(one)), (1, -1)):
        far = torch.where(where, logprobs + apart, logprobs).to(dtype)
        signed = replace(batch, advantages_RT=sign * batch.advantages_RT)
        value, gradient = value_and_gradient(lambda x, b=signed: total_loss(algorithm, x, b), far)
        assert math.isfinite(value) and bool(gradient.isfinite().all())
        assert all(math.isfinite(x) for x in algorithm.metrics(outputs(far), signed).values())


@pytest.mark.parametrize("apart", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("how", ["token", "sequence"])
def test_importance_weights_with_a_large_engine_mismatch(how: str, apart: float) -> None:
    old = torch.full((4, 3), -1.0)
    samples = step_of([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1], old_logprobs_RT=old, sampling_logprobs_RT=old - apart)
    found = make("grpo", correction=how).advantages(samples)
    assert bool(found.values.isfinite().all()) and all(math.isfinite(x) for x in found.metrics.values())


def test_one_non_finite_step_does_not_break_adaptive_kl() -> None:
    steered = Kl(kl_coef=0.1, kl_target=0.01)
    sound = step_of([1.0, 0.0], [0, 0], ref_logprobs_RT=torch.full((2, 3), -2.0))
    broken = replace(sound, ref_logprobs_RT=torch.full((2, 3), NAN))
    steered.shape(broken)
    assert steered.coef == 0.1
    steered.shape(sound)
    assert math.isfinite(steered.coef) and steered.coef != 0.1


# -- rewards that are no numbers -----------------------------------------------------------------------------------

NO_REWARDS = [
    *(
        NAN,
        INF,
        -INF,
        "1",
        "",
        b"1",
        [1.0],
        (1.0,),
        object(),
        ...,
        1j,
        Decimal("0.5"),
        10**400,
        -(10**400),
        1e39,
        -1e16,
    ),
    *({}, {"other": 1.0}, {"reward": NAN}, {"reward": "a"}, {"reward": 1.0, "extra": INF}, Fraction(10**400, 1)),
    *(np.float32("nan"), np.array([1.0, 2.0]), {1, 2}),
]


@pytest.mark.parametrize("value", NO_REWARDS, ids=lambda value: repr(value)[:20])
def test_an_invalid_reward_fails_one_episode_and_is_reported(value: Any) -> None:
    """Of two attempts, the one with a valid reward keeps it, scored alone or compared with others."""

    def odd(final_answer: str) -> Any:
        return value if final_answer == "bad" else 0.5

    rewards = resolve_rewards(odd, None, {})
    with pytest.raises(RewardError, match="reward odd on task t1: "):
        asyncio.run(rewards(TASK, attempt("bad")))
    bad, good = asyncio.run(rewards.group(TASK, [attempt("bad"), attempt("good")]))
    assert isinstance(bad, EpisodeError) and bad.cause == "reward"
    assert good == {"odd": 0.5}


@pytest.mark.parametrize("value", NO_REWARDS, ids=lambda value: repr(value)[:20])
def test_a_groupwise_reward_fails_only_the_attempt_with_an_invalid_score(value: Any) -> None:
    def ranks(episodes: Sequence[Any]) -> list[Any]:
        return [value if e.final_answer == "bad" else 0.5 for e in episodes]

    tables = asyncio.run(resolve_rewards(ranks, None, {}).group(TASK, [attempt("good"), attempt("bad"), attempt("x")]))
    assert [isinstance(table, EpisodeError) for table in tables] == [False, True, False]
    assert tables[0] == tables[2] == {"ranks": 0.5}


@pytest.mark.parametrize("value", [True, 1, 0.25, Fraction(1, 4), np.float32(0.5), np.int64(3), -1e15, None])
def test_valid_rewards(value: Any) -> None:
    found = asyncio.run(resolve_rewards(lambda final_answer: value, None, {})(TASK, attempt("x")))
    assert list(found.values()) == [None if value is None else float(value)]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_non_finite_rewards_leave_the_rest_of_a_step(bad: int) -> None:
    """One NaN, two, or a whole group: counted by cause, and a group that becomes too small is dropped."""
    calls = itertools.count()

    def odd(final_answer: str) -> float:
        return NAN if next(calls) < bad else 1.0

    collected = asyncio.run(source(collector(odd)).next())
    assert collected.failures == {"reward": bad} and "must be finite" in collected.examples["reward"]
    assert collected.dropped == (1 if bad > 1 else 0)
    assert all(e.rewards == {"odd": 1.0} for g in collected.groups for e in g.episodes)


# -- logits that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [NAN, INF])
@pytest.mark.parametrize("where", ["one", "all"])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(min_p=0.1, temperature=0.5)],
)
def test_non_finite_logits_give_a_token_with_a_non_finite_log_prob(
    broken: float, where: str, sampling: Sampling
) -> None:
    """Such a row does not affect the next one."""
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    sound, _ = draw(logits, [sampling] * 3, [0] * 3)
    spoiled = logits.clone()
    spoiled[1, 7 if where == "one" else slice(None)] = broken
    ids, logprobs = draw(spoiled, [sampling] * 3, [0] * 3)
    assert bool(((ids >= 0) & (ids < 512)).all())
    assert not math.isfinite(logprobs[1])
    assert ids[0] == sound[0] and ids[2] == sound[2] and bool(logprobs[[0, 2]].isfinite().all())


def test_a_distribution_of_one_token() -> None:
    """All other tokens have probability 0: log-prob, entropy and gradient are 0."""
    logits = torch.full((1, 512), -1e4)
    logits[0, 5] = 1e4
    for sampling in (Sampling(), Sampling(top_k=1), Sampling(top_p=0.1), Sampling(temperature=0)):
        token, logprob = draw(logits, [sampling], [0])
        assert int(token) == 5 and float(logprob) == 0.0
    x = logits.clone().requires_grad_()
    chosen, entropy = ChosenLogProb.apply(x, torch.tensor([5]), True)
    (chosen + entropy).backward()
    assert float(chosen.detach()) == float(entropy.detach()) == 0.0
    assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x.grad))


class Spoiled(Scripted):
    """An engine whose model overflows for some requests."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        found = await super().generate(token_ids, sampling)
        self.bad -= 1
        return replace(found, logprobs=(NAN,) * len(found.logprobs)) if self.bad >= 0 else found


def test_an_overflow_fails_only_its_own_episode() -> None:
    made = replace(collector(lambda final_answer: 1.0), engine=Spoiled(1))
    collected = asyncio.run(source(made).next())
    assert collected.failures == {"nonfinite": 1} and "overflowed" in collected.examples["nonfinite"]
    everything = replace(made, engine=Spoiled(10**9))
    with pytest.raises(RuntimeError, match=r"(?s)No training tasks completed.*nonfinite.*model.dtype=float32"):
        asyncio.run(source(everything).next())


# -- gradients that are no numbers ---------------------------------------------------------------------------------


class Poisoned:
    """An algorithm whose loss is finite and whose gradient is NaN."""

    couples = "nothing"

    def __init__(self, times: int) -> None:
        self.left, self.sound = times, make("grpo")
        self.needs = self.sound.needs

    def loss(self, out: Any, batch: Any) -> dict[str, LossTerm]:
        self.left -= 1
        terms = self.sound.loss(out, batch)
        if self.left < 0:
            return terms
        zero = (out.logprobs.sum() * 0).abs().sqrt()  # 0, with the gradient 0 · ∞
        return {"policy": LossTerm(terms["policy"].sum + zero, "episodes")}

    def metrics(self, out: Any, batch: Any) -> dict[str, float]:
        return {}


def test_a_non_finite_gradient_changes_nothing_and_is_counted() -> None:
    model = tiny_llama()
    learner = Learner(model, LearnerConfig(lr=1e-2, max_skipped=3), total_updates=10)
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    learner.update(batch, make("grpo"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: tensor.clone() for name, tensor in learner.optimizer.tensors().items()}
    poisoned: Any = Poisoned(times=2)
    metrics, _ = learner.update(batch, poisoned)
    assert math.isfinite(metrics["loss/total"]) and math.isnan(metrics["grad/norm"]) and metrics["optim/skipped"] == 1
    learner.update(batch, poisoned)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(t, moments[name]) for name, t in learner.optimizer.tensors().items())
    assert learner.update(batch, poisoned)[0]["optim/skipped"] == 2 and learner.skipped_in_a_row == 0


def test_float16_that_always_overflows_ends_the_run() -> None:
    """Overflows are expected while the loss scale is searched, but not once it is below 1."""
    learner = Learner(tiny_llama(dtype=torch.float16), LearnerConfig(max_skipped=3), total_updates=10)
    batch = batch_of(rows_of(1, 2), 2, dtype=torch.float32)
    poisoned: Any = Poisoned(times=10**9)
    learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": 8.0})
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        for _ in range(10):  # 8 → 1/2 takes four halvings, which are expected
            learner.update(batch, poisoned)
    assert learner.skipped == 3 + 3


@every_algorithm
def test_every_algorithm_skips_an_update_with_nan_log_probs(name: str) -> None:
    algorithm = make(name)
    if algorithm.needs.values:
        pytest.skip("needs a critic: its loss is the same")
    learner = Learner(tiny_llama(), LearnerConfig(), total_updates=2)
    batch = batch_of(rows_of(2, 2), 2, dtype=torch.float32)
    spoiled = batch.old_logprobs_RT.clone()
    spoiled[0, 0] = NAN
    broken = replace(
        batch,
        old_logprobs_RT=spoiled,
        old_sum_N=batch.old_sum_N * NAN,
        ref_sum_N=None if batch.ref_sum_N is None else batch.ref_sum_N * NAN,
        advantages_RT=batch.advantages_RT * NAN,
    )
    before = [p.detach().clone() for p in learner.model.parameters()]
    metrics, _ = learner.update(broken, algorithm)
    assert metrics["optim/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
