"""covey.trl against the real package: its arguments and defaults, and loss and advantages of translated settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from covey.algorithms.functional import advantages, policy_loss
from covey.trl import GRPOConfig
from covey.trl.translate import translate
from tests.oracles.cases import SEEDS, case
from tests.oracles.conftest import Ledger
from tests.oracles.test_trl import beside, double, grpo, scored, their_loss  # noqa: F401

theirs = pytest.importorskip("trl.trainer.grpo_config", reason="TRL is not installed here: make oracles")

OLDER = {"warmup_ratio", "max_prompt_length", "use_liger_loss"}  # of earlier versions, which scripts still name


def test_arguments_and_their_defaults() -> None:
    real = {field.name: field.default for field in dataclasses.fields(theirs.GRPOConfig)}
    ours = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert set(ours) - set(real) == OLDER
    other = {name for name, default in ours.items() if name not in OLDER and real[name] != default}
    assert other == {"vllm_server_host"}  # an address of all networks, for a server mode that is refused here
    specific = set(real) - {field.name for field in dataclasses.fields(theirs._BaseConfig)}
    assert specific <= set(ours)  # all that GRPO adds to transformers' arguments


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
        {"loss_type": "bnpo", "delta": 2.0},
        {"loss_type": "dr_grpo", "beta": 0.3},
        {"loss_type": "luspo", "beta": 0.3, "use_bias_correction_kl": False},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 1.1},
        {"loss_type": "vespo", "vespo_lambda_neg": 1.5},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ],
    ids=str,
)
def test_translated_losses(ledger: Ledger, seed: int, arguments: dict[str, Any]) -> None:
    step = case(seed)
    step = dataclasses.replace(step, advantages=step.advantages[:, 0])
    args = GRPOConfig(max_completion_length=step.mask.shape[1], **arguments)
    options = dict(translate(args, 64).settings["algorithm"])
    logprobs = step.logprobs.clone().requires_grad_()
    found, _ = policy_loss(
        options.pop("loss"), logprobs, step.old, step.advantages, step.mask, ref_logprobs=step.ref, **options
    )
    names = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
    names += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    expected = their_loss(
        step,
        logprobs,
        args.loss_type,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        importance_sampling_level=args.importance_sampling_level,
        args={name: getattr(args, name) for name in names},
    )
    label = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "its defaults"
    ledger.same_loss("covey.trl, loss", f"TRL {label}", found, expected, of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_translated_advantages(ledger: Ledger, seed: int, scale: str) -> None:
    step = beside(seed)
    expected = scored(grpo.GRPOTrainer, step, [step.rewards], scale_rewards=scale)["advantages"]
    options = translate(GRPOConfig(scale_rewards=scale), 64).settings["algorithm"]
    chosen = {name: options[name] for name in ("epsilon", "std_normalize", "std_over")}
    found = advantages("grpo", step.rewards, step.groups, **chosen)
    ledger.same("covey.trl, advantages", f"TRL scale_rewards={scale}", found, expected)
