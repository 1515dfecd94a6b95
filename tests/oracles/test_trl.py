"""Against TRL: its trainers' own methods, called on trainers that hold only what the methods read.

TRL has no critic, so nothing here has values. Its groups have equal sizes and lie side by side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.correction import Correction
from covey.algorithms.functional import advantages, policy_loss
from tests.oracles.cases import SEEDS, Case, case, gradient, samples, side_by_side
from tests.oracles.conftest import Ledger

REASON = "TRL is not installed here: make oracles"
grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason=REASON)
rloo = pytest.importorskip("trl.trainer.rloo_trainer", reason=REASON)
gmpo = pytest.importorskip("trl.experimental.gmpo", reason=REASON)
online_dpo = pytest.importorskip("trl.experimental.online_dpo", reason=REASON)
accelerate = pytest.importorskip("accelerate", reason=REASON)

GROUP = 4


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """TRL makes tensors of Python numbers: in float64 here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def trainer(kind: Any, **settings: Any) -> Any:
    """A trainer that was never initialised: no model, no data, one process."""
    made = kind.__new__(kind)
    arguments = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing_kwargs": None,
        "per_device_train_batch_size": 8,
    }
    plain = {
        "accelerator": accelerate.Accelerator(cpu=True),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(**(arguments | settings.pop("args", {}))),
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "environment_factories": None,
        "environments": None,
        "epsilon_high": 0.2,
        "epsilon_low": 0.2,
        "importance_sampling_level": "token",
        "log_multimodal": False,
        "mask_truncated_completions": False,
        "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False,
        "num_generations": GROUP,
        "num_iterations": 1,
        "off_policy_mask_threshold": None,
        "pad_to_multiple_of": None,
        "reward_clip_range": None,
        "scale_rewards": "group",
        "tools": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
    }
    for name, value in (plain | settings).items():
        object.__setattr__(made, name, value)
    return made


def their_loss(step: Case, logprobs: Tensor, loss_type: str, kind: Any = grpo.GRPOTrainer, **settings: Any) -> Tensor:
    """GRPOTrainer's loss of log-probs at hand; holes in the mask are TRL's tool mask."""
    made = trainer(kind, loss_type=loss_type, max_completion_length=step.mask.shape[1], **settings)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.zeros(step.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "tool_mask": step.mask.long(),
        "advantages": step.advantages,
        "old_per_token_logps": step.old,
        "ref_per_token_logps": step.ref,
        "num_items_in_batch": step.mask.sum(),
    }
    return made._compute_loss(None, inputs)


def compare(
    ledger: Ledger, name: str, kind: str, step: Case, options: dict[str, Any], settings: dict[str, Any], label: str = ""
) -> None:
    logprobs = step.logprobs.clone().requires_grad_()
    expected = their_loss(step, logprobs, kind, **settings)
    found, _ = policy_loss(name, logprobs, step.old, step.advantages, step.mask, ref_logprobs=step.ref, **options)
    ledger.same_loss(f"loss {name}", f"TRL {label or 'loss_type=' + kind}", found, expected, of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
        ("luspo", "seq-mean-token-sum"),
    ],
)
def test_clipped_losses(ledger: Ledger, seed: int, kind: str, mode: str) -> None:
    """One loss and five ways to sum it up."""
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "aggregation": mode}
    compare(ledger, "ppo_clip", kind, case(seed, holes=True), options, {"epsilon_high": 0.28})


@pytest.mark.parametrize("seed", SEEDS)
def test_default_losses_of_the_papers(ledger: Ledger, seed: int) -> None:
    """By name, with nothing set: GRPO without dual clip, DAPO's higher bound, Dr. GRPO's constant."""
    step = case(seed)
    compare(ledger, "ppo_clip", "grpo", step, {"dual_clip": None}, {})
    compare(ledger, "dapo", "dapo", step, {"dual_clip": None}, {"epsilon_high": 0.28})
    compare(ledger, "dr_grpo", "dr_grpo", step, {"dual_clip": None}, {})


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_is_delta(ledger: Ledger, seed: int) -> None:
    """With log-ratios of ±50: a bound on the loss of bad answers, so that no exponential is left to overflow."""
    step = case(seed, holes=True, extreme=True)
    settings = {"args": {"delta": 3.0}}
    compare(ledger, "ppo_clip", "grpo", step, {"dual_clip": 3.0}, settings, "loss_type=grpo, delta")


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_the_loss(ledger: Ledger, seed: int) -> None:
    step = case(seed, holes=True)
    options = {"dual_clip": None, "kl_coef": 0.3}
    compare(ledger, "ppo_clip", "grpo", step, options, {"beta": 0.3}, "loss_type=grpo, beta (k3)")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "mode"), [("grpo", "seq-mean-token-mean"), ("luspo", "seq-mean-token-sum")])
def test_gspo_is_the_sequence_level(ledger: Ledger, seed: int, kind: str, mode: str) -> None:
    """The gradient of a ratio of the whole answer, and of a token's own share of it, is the same when each answer has
    one advantage."""
    step = case(seed, holes=True)
    settings = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    one_each = replace(step, advantages=step.advantages[:, 0])
    logprobs = step.logprobs.clone().requires_grad_()
    expected = their_loss(one_each, logprobs, kind, **settings)
    found, _ = policy_loss("gspo", logprobs, step.old, one_each.advantages, step.mask, aggregation=mode)
    oracle = f"TRL loss_type={kind}, importance_sampling_level=sequence"
    ledger.same_loss("loss gspo", oracle, found, expected, of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(ledger: Ledger, seed: int) -> None:
    """TRL's epsilon_high is the largest weight itself, Covey's clip_high how far it is above 1."""
    step = case(seed, holes=True, extreme=True)
    compare(ledger, "cispo", "cispo", step, {"clip_high": 4.0}, {"epsilon_high": 5.0})


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(ledger: Ledger, seed: int) -> None:
    compare(ledger, "sapo", "sapo", case(seed, holes=True, extreme=True), {}, {})


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo(ledger: Ledger, seed: int) -> None:
    """With one advantage per answer, as TRL has them."""
    step = case(seed, holes=True)
    step = replace(step, advantages=step.advantages[:, 0])
    logprobs = step.logprobs.clone().requires_grad_()
    expected = their_loss(step, logprobs, "vespo")
    found, _ = policy_loss("vespo", logprobs, step.old, step.advantages, step.mask)
    ledger.same_loss("loss vespo", "TRL loss_type=vespo", found, expected, of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_gmpo(ledger: Ledger, seed: int) -> None:
    step = case(seed, holes=True)
    step = replace(step, advantages=step.advantages[:, 0])
    logprobs = step.logprobs.clone().requires_grad_()
    bounds = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    expected = their_loss(step, logprobs, "grpo", gmpo.GMPOTrainer, **bounds)
    found, _ = policy_loss("gmpo", logprobs, step.old, step.advantages, step.mask)
    ledger.same_loss("loss gmpo", "TRL GMPOTrainer", found, expected, of=logprobs)


class OneStep(online_dpo.OnlineDPOTrainer):  # type: ignore[misc, name-defined]
    """A step of OnlineDPOTrainer on answers, log-probs and rewards at hand; `loss` is what it would differentiate."""

    def __init__(self, step: Case, logprobs: Tensor, beta: float) -> None:
        self._beta, self.step, self.scores = beta, step, iter([logprobs, step.ref])
        keep = SimpleNamespace(gather_for_metrics=lambda x: x, backward=self.keep)
        self.accelerator, self.stats, self.model = keep, defaultdict(list), None
        self.ref_model, self.reward_funcs, self.eos_token_ids = object(), [None], [1]
        self.processing_class = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
        names = ("use_vllm", "missing_eos_penalty", "torch_empty_cache_steps")
        arguments = {"loss_type": "sigmoid", "optim": "adamw", "n_gpu": 1, "gradient_accumulation_steps": 1}
        self.args = SimpleNamespace(**dict.fromkeys(names), **arguments)

    def keep(self, loss: Tensor, **_: Any) -> None:
        self.loss = loss

    def _generate(self, *_: Any) -> tuple[Tensor, ...]:
        ids = torch.zeros(self.step.mask.shape, dtype=torch.long)
        return ids, ids, ids, self.step.mask.long(), None  # type: ignore[return-value]

    def _forward(self, *_: Any) -> Tensor:
        return next(self.scores)

    def _calculate_rewards_from_functions(self, **_: Any) -> Tensor:
        return self.step.rewards.clone()


@pytest.mark.parametrize("seed", SEEDS)
def test_online_dpo(ledger: Ledger, seed: int) -> None:
    """Pairs of answers: the first answers of all prompts, then the second ones."""
    step = case(seed, sizes=[2, 2, 2])
    groups, order = [0, 1, 2, 0, 1, 2], [step.groups.index(f"prompt {i}") for i in range(3)]
    order += [i for prompt in range(3) for i in range(6) if step.groups[i] == f"prompt {prompt}" and i not in order]
    moved = {name: value[order] for name, value in vars(step).items() if isinstance(value, Tensor)}
    step = replace(step, groups=[f"prompt {i}" for i in groups], **moved)
    step = replace(step, rewards=step.rewards + 0.01 * torch.arange(6))
    logprobs = step.logprobs.clone().requires_grad_()
    made = OneStep(step, logprobs, beta=0.3)
    made.training_step(SimpleNamespace(train=lambda: None), {"prompt": [""] * 3})
    options = {"groups": groups, "ref_logprobs": step.ref, "beta": 0.3}
    found, _ = policy_loss("online_dpo", logprobs, step.old, step.rewards, step.mask, **options)
    ledger.same_loss("loss online_dpo", "TRL OnlineDPOTrainer", found, made.loss, of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo_loss_on_policy(ledger: Ledger, seed: int) -> None:
    """RLOOTrainer clips a ratio of whole answers. For the policy that sampled, that is the policy gradient, summed over
    tokens."""
    step = case(seed, holes=True)
    logprobs = step.logprobs.clone().requires_grad_()
    made = trainer(rloo.RLOOTrainer)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    ids = torch.zeros(step.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": step.mask.long(),
        "advantages": step.rewards,
        "old_logps": (step.logprobs * step.mask).sum(-1),
    }
    expected = made._compute_loss(None, inputs)
    mode = "seq-mean-token-sum"
    found, _ = policy_loss("policy_gradient", logprobs, step.logprobs, step.rewards, step.mask, aggregation=mode)
    slopes = gradient(found, logprobs), gradient(expected, logprobs)
    ledger.same("loss policy_gradient on-policy, its gradient", "TRL RLOOTrainer", *slopes)


# Advantages.


def scored(kind: Any, step: Case, columns: list[Tensor], **settings: Any) -> dict[str, Any]:
    """Everything TRL computes between sampling and loss, for answers and rewards at hand."""
    names = [f"reward {number}" for number in range(len(columns))]
    weights = settings.pop("reward_weights", [1.0] * len(columns))
    made = trainer(kind, reward_funcs=names, reward_func_names=names, reward_weights=torch.tensor(weights), **settings)
    lengths = step.mask.sum(-1).tolist()
    width = max(lengths)
    ids = [[1] * length for length in lengths]
    prompts, texts = [[1] for _ in ids], ["" for _ in ids]
    engine = [row[:length] for row, length in zip(step.ref.tolist(), lengths, strict=True)]
    sampled = (prompts, ids, texts) if kind is rloo.RLOOTrainer else (prompts, ids, None, texts, engine, {}, None, None)
    made._generate = lambda _: sampled
    made._calculate_rewards = lambda *_: torch.stack(columns, 1)
    made.ref_model = "reference"

    def logprobs(model: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        return (step.ref if model == "reference" else step.old)[:, :width], None, None

    made._get_per_token_logps_and_entropies = logprobs
    return made._generate_and_score_completions([{"prompt": label} for label in step.groups])


def beside(seed: int) -> Case:
    """Groups of equal size, side by side, as TRL holds them; no holes."""
    return side_by_side(case(seed, sizes=[GROUP] * 5))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", ["group", "none"])
def test_grpo_advantages(ledger: Ledger, seed: int, scale: str) -> None:
    """TRL's ε is 1e-4, a setting of Covey's."""
    step = beside(seed)
    expected = scored(grpo.GRPOTrainer, step, [step.rewards], scale_rewards=scale)["advantages"]
    found = advantages("grpo", step.rewards, step.groups, epsilon=1e-4, std_normalize=scale == "group")
    ledger.same("grpo", f"TRL GRPOTrainer, scale_rewards={scale}", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_several_rewards_added(ledger: Ledger, seed: int) -> None:
    step = beside(seed)
    columns, weights = [step.rewards, step.values[:, 0]], [1.0, 0.5]
    expected = scored(grpo.GRPOTrainer, step, columns, reward_weights=weights)["advantages"]
    named = dict(zip(("a", "b"), columns, strict=True))
    found = advantages("grpo", named, step.groups, epsilon=1e-4, weights={"b": 0.5})
    ledger.same("grpo, several rewards", "TRL GRPOTrainer, reward_weights", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("missing", [False, True])
def test_gdpo(ledger: Ledger, seed: int, missing: bool) -> None:
    """TRL's normalize_then_sum, with rewards that were given to some answers only, and an answer with none."""
    step = beside(seed)
    columns, weights = [step.rewards.clone(), step.values[:, 0].clone()], [1.0, 0.5]
    if missing:
        columns[0][::3] = math.nan
        columns[1][::5] = math.nan
    settings = {"reward_weights": weights, "multi_objective_aggregation": "normalize_then_sum"}
    expected = scored(grpo.GRPOTrainer, step, columns, **settings)["advantages"]
    named = dict(zip(("a", "b"), columns, strict=True))
    found = advantages("gdpo", named, step.groups, epsilon=1e-4, weights={"b": 0.5})
    ledger.same("gdpo, rewards missing" if missing else "gdpo", "TRL normalize_then_sum", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_advantages(ledger: Ledger, seed: int, beta: float) -> None:
    step = beside(seed)
    expected = scored(rloo.RLOOTrainer, step, [step.rewards], beta=beta)["advantages"]
    algorithm = make("rloo", kl_coef=beta, kl_in="reward")
    shaped, _ = algorithm.shape(samples(step))
    name, oracle = ("rloo, KL in the reward", "TRL RLOOTrainer, beta") if beta else ("rloo", "TRL RLOOTrainer")
    ledger.same(name, oracle, algorithm.advantages(shaped).values, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("way", ["truncate", "mask"])
def test_importance_weights(ledger: Ledger, seed: int, level: str, way: str) -> None:
    """The engine's log-probs are the case's `ref`."""
    step = beside(seed)
    bounds = {"vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None}
    if way == "mask":
        bounds["vllm_importance_sampling_clip_min"] = 0.5
    switches = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    mode = {"vllm_importance_sampling_mode": f"{level}_{way}"}
    expected = scored(grpo.GRPOTrainer, step, [step.rewards], **bounds, **switches, **mode)["importance_sampling_ratio"]
    settings = {"reject_below": 0.5, "reject_above": 3.0} if way == "mask" else {}
    rows = torch.arange(len(step.groups))
    own = Correction(correction=level, correction_cap=3.0, **settings)
    found, _ = own.weights(step.old, step.ref, step.mask, rows, len(rows))
    width = int(step.mask.sum(-1).max())
    mask = step.mask[:, :width]
    expected = expected.expand(mask.shape)
    name = f"correction {level}, reject_…" if way == "mask" else f"correction {level}"
    ledger.same(name, f"TRL vllm_importance_sampling_mode={level}_{way}", found[:, :width][mask], expected[mask])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_answer_that_nobody_scored(ledger: Ledger, name: str) -> None:
    """Rewards 1, 0, 1 and none: the fourth is out of the group's statistics, with advantage 0. Mean 2/3, so 1/3 for a
    right answer before any scaling; leave-one-out of three, 1/2."""
    step = beside(0)
    rewards = torch.tensor([1.0, 0.0, 1.0, math.nan] * 5)
    kind = grpo.GRPOTrainer if name == "grpo" else rloo.RLOOTrainer
    expected = scored(kind, step, [rewards], scale_rewards="none")["advantages"][:4]
    settings = {"std_normalize": False} if name == "grpo" else {}
    found = advantages(name, rewards, step.groups, **settings)[:4]
    theory = [1 / 3, -2 / 3, 1 / 3, 0] if name == "grpo" else [1 / 2, -1, 1 / 2, 0]
    assert expected.tolist() == pytest.approx(theory)
    ledger.same(f"{name}, an answer without a reward", f"TRL {kind.__name__}", found, expected)


# Where they differ.


def test_an_exploding_ratio_without_dual_clip(ledger: Ledger) -> None:
    """A bad answer with a log-ratio of 50: e^50 in TRL; Covey holds log-ratios to 20."""
    old, mask = torch.tensor([[-51.0]]), torch.ones(1, 1, dtype=torch.bool)
    logprobs, bad = torch.tensor([[-1.0]]), torch.tensor([[-1.0]])
    step = Case(["a"], bad[:, 0], mask, logprobs, old, old, old, bad)
    expected = their_loss(step, logprobs, "grpo")
    found, _ = policy_loss("ppo_clip", logprobs, old, bad, mask, dual_clip=None)
    assert float(found) == pytest.approx(math.exp(20))
    assert float(expected) == pytest.approx(math.exp(50))
    because = "log-ratios are clamped to ±20; TRL's exponential is unbounded"
    ledger.differs("loss ppo_clip, log-ratio 50, no dual clip", "TRL loss_type=grpo", found, expected, because=because)


def test_k3_far_below_the_reference(ledger: Ledger) -> None:
    """log π_ref − log π = 30: e^30 − 31 in TRL; in Covey a straight line from d = 20 on, with its slope there."""
    logprobs, ref, mask = torch.tensor([[-31.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool)
    none = torch.zeros(1, 1)
    step = Case(["a"], none[:, 0], mask, logprobs, logprobs, ref, none, none)
    expected = their_loss(step, logprobs, "grpo", beta=1.0)
    found, _ = policy_loss("ppo_clip", logprobs, logprobs, none, mask, ref_logprobs=ref, kl_coef=1.0)
    assert float(found) == pytest.approx(math.exp(20) - 21 + 10 * (math.exp(20) - 1))
    assert float(expected) == pytest.approx(math.exp(30) - 31)
    because = "a straight line beyond d = 20; TRL's exponential is unbounded"
    ledger.differs("KL k3, 30 below the reference", "TRL beta", found, expected, because=because)


@pytest.mark.parametrize(("kind", "mode"), [("grpo", "seq-mean-token-mean"), ("dr_grpo", "seq-mean-token-sum-norm")])
def test_an_answer_without_tokens_does_not_count(ledger: Ledger, kind: str, mode: str) -> None:
    """Two tokens of loss −1 in one answer, none in the other. Covey's mean is over answers that said something; TRL's
    is over both, half as much."""
    mask = torch.tensor([[True, True], [False, False]])
    zero, good = torch.zeros(2, 2), torch.ones(2, 2)
    step = Case(["a", "a"], good[:, 0], mask, zero, zero, zero, zero, good)
    expected = their_loss(step, zero, kind)
    found, _ = policy_loss("ppo_clip", zero, zero, good, mask, aggregation=mode)
    assert float(found) == -1
    assert float(expected) == -0.5
    because = "the mean is over answers that have tokens; TRL's is over all"
    ledger.differs(f"an answer without tokens in {mode}", f"TRL loss_type={kind}", found, expected, because=because)
