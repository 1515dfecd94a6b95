"""The plug-in inside the installed verl: found, registered, and called by verl's own trainer and actor code on CPU."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithms.functional import advantages, compute_gvpo_advantage, policy_loss
from covey.errors import InputError
from covey.integrations import verl as plugin
from tests.oracles.cases import SEEDS, Case, case, gradient
from tests.oracles.conftest import Ledger

REASON = "verl is not installed here: make oracles"
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", reason=REASON)
actor_losses = pytest.importorskip("verl.workers.utils.losses", reason=REASON)
workers = pytest.importorskip("verl.workers.config", reason=REASON)
verl = pytest.importorskip("verl", reason=REASON)
verl_config = pytest.importorskip("verl.utils.config", reason=REASON)
omegaconf = pytest.importorskip("omegaconf", reason=REASON)
tensordict = pytest.importorskip("tensordict", reason=REASON)

BETA = 0.3


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    plugin._DGDO.clear()
    yield


def algorithm(**settings: Any) -> Any:
    """verl's `algorithm` section, as its trainer passes it on."""
    plain = {
        "use_kl_in_reward": True,
        "kl_penalty": "kl",
        "kl_ctrl": {"type": "fixed", "kl_coef": BETA},
        "rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    }
    config = omegaconf.OmegaConf.create(plain | settings)
    omegaconf.OmegaConf.set_struct(config, True)
    return config


def proto(step: Case, **columns: Any) -> Any:
    tensors = {
        "response_mask": step.mask.long(),
        "token_level_scores": step.on_last_token(),
        "old_log_probs": step.logprobs,
        "ref_log_prob": step.ref,
        "prompts": torch.zeros(len(step.groups), 1, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(len(step.groups), 1), step.mask], 1).long(),
    }
    named = {"uid": np.array(step.groups, dtype=object)} | {key: np.array(value) for key, value in columns.items()}
    return verl.DataProto.from_dict(tensors, non_tensors=named)


def batch_advantages(name: str, step: Case, config: Any, **columns: Any) -> Tensor:
    """What verl's trainer computes between rewards and update."""
    data = proto(step, **columns)
    if config.use_kl_in_reward:
        controller = core.get_kl_controller(config.kl_ctrl)
        data, _ = trainer.apply_kl_penalty(data, controller, kl_penalty=config.kl_penalty)
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    return trainer.compute_advantage(data, name, config=config).batch["advantages"]


def actor(**settings: Any) -> Any:
    plain = {"loss_agg_mode": "seq-mean-token-sum", "policy_loss": workers.PolicyLossConfig(loss_mode="gvpo")}
    return workers.ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **(plain | settings))


def own_loss(step: Case, logprobs: Tensor, beta: float = BETA, **options: Any) -> Tensor:
    centred = advantages("gvpo", step.rewards, step.groups)
    loss, _ = policy_loss(
        "gvpo",
        logprobs,
        step.logprobs,
        centred,
        step.mask,
        groups=step.groups,
        ref_logprobs=step.ref,
        beta=beta,
        **options,
    )
    return loss


# Found and registered.


def test_verl_finds_the_plug_in_by_itself() -> None:
    """In a fresh process that imports verl and nothing of Covey's."""
    code = (
        "import verl\n"
        "from verl.trainer.ppo import core_algos as c\n"
        "print({'gvpo', 'covey_gdpo', 'dgdo'} <= set(c.ADV_ESTIMATOR_REGISTRY), 'gvpo' in c.POLICY_LOSS_REGISTRY)"
    )
    if not [point for point in metadata.entry_points(group="verl.plugins") if point.name == "covey"]:
        pytest.skip("covey is on the path here, but not installed: make oracles")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["True", "True"]


def test_importing_the_plug_in_needs_no_verl() -> None:
    code = "import sys, covey.integrations.verl; assert 'verl' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_twice_changes_nothing() -> None:
    before = dict(core.ADV_ESTIMATOR_REGISTRY)
    plugin.register()
    assert before == core.ADV_ESTIMATOR_REGISTRY


def test_a_name_that_is_taken_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def someone(**_: Any) -> None: ...

    monkeypatch.setattr(core, "ADV_ESTIMATOR_REGISTRY", {"dgdo": someone})
    monkeypatch.setattr(core, "POLICY_LOSS_REGISTRY", {})
    with pytest.warns(UserWarning, match="already has 'dgdo'"):
        plugin.register()
    assert core.ADV_ESTIMATOR_REGISTRY["dgdo"] is someone
    assert core.ADV_ESTIMATOR_REGISTRY["gvpo"] is plugin.gvpo_advantage


def command_line(number: int) -> Any:
    """The settings of the page's example, read by verl's own configuration."""
    hydra = pytest.importorskip("hydra", reason=REASON)
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    example = [block for block in page.split("```") if "main_ppo" in block][number]
    overrides = [word for word in shlex.split(example.replace("\\\n", " ")) if "=" in word]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer", overrides)


def test_the_first_command_line_of_the_page(ledger: Ledger) -> None:
    """Its estimator, its loss and its aggregation, from rewards to gradient."""
    step, config = case(6), command_line(0)
    logprobs = step.logprobs.clone().requires_grad_()
    advantage = batch_advantages(config.algorithm.adv_estimator, step, config.algorithm)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    settings = verl_config.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss, _ = core.get_policy_loss_fn(settings.policy_loss.loss_mode)(
        old_log_prob=step.logprobs,
        log_prob=logprobs,
        advantages=advantage,
        response_mask=step.mask,
        loss_agg_mode=settings.loss_agg_mode,
        config=settings,
    )
    found = own_loss(step, logprobs, beta=config.algorithm.kl_ctrl.kl_coef)
    ledger.same_loss("loss gvpo", "verl with docs/verl.md's settings, plug-in gvpo", found, loss, of=logprobs)


def test_the_second_command_line_of_the_page(ledger: Ledger) -> None:
    step, config = case(7), command_line(1)
    correct, length = two_rewards(step).values()
    found = batch_advantages("gdpo", step, config.algorithm, correct=correct, format=length)
    columns = dict(zip(("correct", "format"), named(step).values(), strict=True))
    expected = advantages("dgdo", columns, step.groups, weights={"format": 0.5}, warmup_steps=30)
    oracle = "verl with docs/verl.md's settings, plug-in dgdo"
    ledger.same("dgdo, step after step", oracle, found, expected[:, None] * step.mask)


# GVPO.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, {"clip_weight": 0.3}, {"use_bessel_correction": False}])
def test_gvpo_weights(ledger: Ledger, seed: int, options: dict[str, Any]) -> None:
    """Uneven groups: the finished weight, times β, divided by each group's own k − 1, times answers per group."""
    step = case(seed, holes=True)
    found = batch_advantages("gvpo", step, algorithm(gvpo=options))
    clip = {key: value for key, value in options.items() if key == "clip_weight"}
    weight = compute_gvpo_advantage(step.rewards, step.logprobs, step.ref, step.groups, step.mask, beta=BETA, **clip)
    sizes = torch.tensor([step.groups.count(label) for label in step.groups], dtype=torch.float64)
    divisor = sizes - int(options.get("use_bessel_correction", True))
    factor = BETA * len(step.groups) / len(set(step.groups)) / divisor
    expected = (factor * weight)[:, None] * step.mask
    ledger.same("gvpo's weight", "verl compute_advantage, plug-in gvpo", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("silent", ["nobody", "an answer", "a group"])
def test_gvpo_is_exact_for_the_first_update(ledger: Ledger, seed: int, silent: str) -> None:
    """Also where an answer has no tokens, or none of a group has."""
    step = case(seed, holes=True, empty=silent == "an answer")
    if silent == "a group":
        step.mask[[i for i, label in enumerate(step.groups) if label == step.groups[0]]] = False
    logprobs = step.logprobs.clone().requires_grad_()
    advantage = batch_advantages("gvpo", step, algorithm())
    loss = core.get_policy_loss_fn("gvpo")
    settings = actor(global_batch_info={"global_batch_size": len(step.groups)})
    arguments = {"old_log_prob": step.logprobs, "response_mask": step.mask, "loss_agg_mode": "seq-mean-token-sum"}
    expected, metrics = loss(log_prob=logprobs, advantages=advantage, config=settings, **arguments)
    ledger.same_loss("loss gvpo", "verl, plug-in gvpo", own_loss(step, logprobs), expected, of=logprobs)
    assert metrics["actor/gvpo_stale_log_ratio"] == 0


def test_gvpo_without_a_kl_in_the_reward_is_anchored_at_the_sampling_policy(ledger: Ledger) -> None:
    step = case(1)
    logprobs = step.logprobs.clone().requires_grad_()
    advantage = batch_advantages("gvpo", step, algorithm(use_kl_in_reward=False))
    loss = -(advantage * logprobs * step.mask).sum() / len(step.groups)
    found = own_loss(step, logprobs, reference="old")
    ledger.same_loss("loss gvpo, reference=old", "verl, plug-in gvpo", found, loss, of=logprobs)


def test_gvpo_is_stale_for_the_second_update() -> None:
    """The policy has moved, the weight has not: what verl's interface does not allow. The metric says how far."""
    step = case(2)
    advantage = batch_advantages("gvpo", step, algorithm())
    moved = (step.logprobs + 0.1 * step.values).requires_grad_()
    settings = actor(global_batch_info={"global_batch_size": len(step.groups)})
    stale, metrics = plugin.gvpo_loss(step.logprobs, moved, advantage, step.mask, "seq-mean-token-sum", settings)
    shift = (0.1 * step.values * step.mask).sum(-1).abs().mean()
    assert metrics["actor/gvpo_stale_log_ratio"] == pytest.approx(float(shift))
    fresh = gradient(own_loss(step, moved), moved)
    assert not torch.allclose(gradient(stale, moved), fresh, rtol=1e-3)


def test_gvpo_through_the_actor(ledger: Ledger) -> None:
    """verl's actor splits a mini-batch into micro-batches whose groups it does not know; the gradients add up."""
    step = case(4)
    logprobs = step.logprobs.clone().requires_grad_()
    advantage = batch_advantages("gvpo", step, algorithm())
    config, total = actor(), torch.zeros(())
    for rows in torch.arange(len(step.groups)).split(3):
        output, data = packed(step, logprobs, advantage, rows)
        loss, metrics = actor_losses.ppo_loss(config, output, data)
        assert "actor/gvpo_stale_log_ratio" in metrics
        total = total + loss
    found = own_loss(step, logprobs)
    ledger.same_loss("loss gvpo", "verl ppo_loss in micro-batches, plug-in gvpo", found, total, of=logprobs)


def packed(step: Case, logprobs: Tensor, advantage: Tensor, rows: Tensor) -> tuple[dict[str, Tensor], Any]:
    """Rows as the actor holds them: without padding, the prompt (one token here) in front."""
    lengths = step.mask.sum(-1)[rows].tolist()

    def nested(columns: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(columns, layout=torch.jagged)

    def response(column: Tensor) -> Tensor:
        return nested([column[row, :length] for row, length in zip(rows, lengths, strict=True)])

    columns = {
        "prompts": nested([torch.zeros(1, dtype=torch.long) for _ in lengths]),
        "responses": nested([torch.zeros(length, dtype=torch.long) for length in lengths]),
        "response_mask": response(step.mask.long()),
        "old_log_probs": response(step.logprobs),
        "advantages": response(advantage),
    }
    data = tensordict.TensorDict(columns, batch_size=len(rows))
    for key, value in {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": len(step.groups)}.items():
        data.set_non_tensor(key, value)
    # A model's output at a place is the log-prob of the next token.
    ahead = [
        torch.cat([logprobs[row, :length], logprobs.new_zeros(1)]) for row, length in zip(rows, lengths, strict=True)
    ]
    return {"log_probs": torch.cat(ahead)}, data


def test_gvpo_in_the_default_trainer(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """trainer.use_v1 keeps its columns in a store; KL in the reward and the estimator do the same there."""
    v1 = pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason=REASON)
    step, written = case(5), {}
    lengths = step.mask.sum(-1).tolist()

    def nested(column: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor(
            [row[:length] for row, length in zip(column, lengths, strict=True)], layout=torch.jagged
        )

    columns = {"old_log_probs": step.logprobs, "ref_log_prob": step.ref, "rm_scores": step.on_last_token()}
    stored = {key: nested(column) for key, column in columns.items()} | {"response_mask": nested(step.mask.long())}
    data = tensordict.TensorDict(stored, batch_size=len(step.groups))
    data["uid"] = tensordict.NonTensorStack(*step.groups)
    monkeypatch.setattr(v1.tq, "kv_batch_get", lambda **_: data)
    monkeypatch.setattr(v1.tq, "kv_batch_put", lambda fields, **_: written.update(advantages=fields["advantages"]))
    settings = {"adv_estimator": "gvpo", "gamma": 1.0, "lam": 1.0}
    config = omegaconf.OmegaConf.create(
        {"algorithm": algorithm(**settings), "actor_rollout_ref": {"rollout": {"n": 4}}}
    )
    run = SimpleNamespace(config=config, kl_ctrl_in_reward=core.get_kl_controller(config.algorithm.kl_ctrl))
    keys = [f"{label}_{number}_0" for number, label in enumerate(step.groups)]
    batch = v1.KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
    v1.PPOTrainer._compute_advantage(run, batch, {})
    found, expected = written["advantages"], nested(batch_advantages("gvpo", step, algorithm()))
    oracle = "verl PPOTrainer (v1), plug-in gvpo"
    ledger.same("gvpo's weight", oracle, found.values(), expected.values())


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gvpo_refuses_another_aggregation(mode: str) -> None:
    step = case(0)
    with pytest.raises(InputError, match="loss_agg_mode=seq-mean-token-sum"):
        plugin.gvpo_loss(step.old, step.logprobs, step.advantages, step.mask, mode, actor(loss_agg_mode=mode))


def test_gvpo_refuses_what_breaks_its_zero_sum() -> None:
    step, mode = case(0), "seq-mean-token-sum"
    with pytest.raises(InputError, match="use_kl_loss=false"):
        plugin.gvpo_loss(step.old, step.logprobs, step.advantages, step.mask, mode, actor(use_kl_loss=True))
    with pytest.raises(InputError, match="rollout_is=null"):
        plugin.gvpo_loss(step.old, step.logprobs, step.advantages, step.mask, mode, actor(), torch.ones_like(step.old))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_penalty": "low_var_kl"}, "kl_penalty=kl"),
        ({"kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 10, "target_kl": 0.1}}, "kl_ctrl.type=fixed"),
        ({"rollout_correction": {"rollout_is": "token"}}, "rollout_is breaks"),
        ({"rollout_correction": {"rollout_rs": "token_k1"}}, "rollout_rs breaks"),
        ({"rollout_correction": {"bypass_mode": True}}, "bypass_mode breaks"),
        ({"gvpo": {"clip_wait": 1.0}}, "clip_weight"),
    ],
)
def test_gvpo_refuses_settings_that_make_it_something_else(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch_advantages("gvpo", case(0), algorithm(**settings))


# Several rewards.


def two_rewards(step: Case) -> dict[str, Any]:
    length: list[float | None] = step.values[:, 0].tolist()
    length[1] = None  # not given
    return {"correct": (step.rewards > 0).double().tolist(), "length": length}


def named(step: Case) -> dict[str, Tensor]:
    return {
        name: torch.tensor([float("nan") if value is None else value for value in column], dtype=torch.float64)
        for name, column in two_rewards(step).items()
    }


COLUMNS = {"use_kl_in_reward": False, "gdpo_reward_keys": ["correct", "length"], "gdpo_reward_weights": [1.0, 0.5]}
WEIGHTS = {"correct": 1.0, "length": 0.5}


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_as_covey_does_it(ledger: Ledger, seed: int) -> None:
    step = case(seed, holes=True)
    found = batch_advantages("gdpo", step, algorithm(**COLUMNS, gdpo_estimator="covey_gdpo"), **two_rewards(step))
    expected = advantages("gdpo", named(step), step.groups, weights=WEIGHTS)[:, None] * step.mask
    ledger.same("gdpo", "verl compute_advantage, plug-in covey_gdpo", found, expected)


def test_gdpo_under_its_own_name(ledger: Ledger) -> None:
    step = case(0)
    estimator = core.get_adv_estimator_fn("covey_gdpo")
    found, _ = estimator(
        token_level_rewards=step.on_last_token(),
        response_mask=step.mask.long(),
        index=np.array(step.groups, dtype=object),
        config=algorithm(**COLUMNS),
        non_tensor_batch=two_rewards(step),
    )
    expected = advantages("gdpo", named(step), step.groups, weights=WEIGHTS)[:, None] * step.mask
    ledger.same("gdpo", "verl get_adv_estimator_fn, plug-in covey_gdpo", found, expected)


def test_verl_keeps_its_own_gdpo() -> None:
    """Without the switch, its numbers are its own, to the last bit."""
    step = case(0)
    rewards = {name: column.nan_to_num(nan=0.0).numpy() for name, column in named(step).items()}
    found = batch_advantages("gdpo", step, algorithm(**COLUMNS), **rewards)
    data = proto(step)
    expected, _ = core.compute_gdpo_outcome_advantage(
        step.on_last_token(),
        step.mask.long(),
        np.array(step.groups, dtype=object),
        config=algorithm(**COLUMNS),
        non_tensor_batch=rewards,
        batch=data.batch,
    )
    assert torch.equal(found, expected)
    own = advantages("gdpo", named(step), step.groups, weights=WEIGHTS)[:, None] * step.mask
    assert not torch.allclose(found.double(), own)


def test_dgdo_goes_on_from_call_to_call(ledger: Ledger) -> None:
    """Two steps of warm-up and three beyond, against the same steps with a state of their own."""
    options, state = {"warmup_steps": 2, "beta_start": 0.2, "beta_warmup_steps": 3}, {}
    config = algorithm(**COLUMNS, gdpo_estimator="dgdo", dgdo=options)
    for seed in range(5):
        step = case(seed)
        found = batch_advantages("gdpo", step, config, **two_rewards(step))
        expected = advantages("dgdo", named(step), step.groups, weights=WEIGHTS, state=state, **options)
        by_token = expected[:, None] * step.mask
        ledger.same("dgdo, step after step", "verl compute_advantage, plug-in dgdo", found, by_token)
    plain = advantages("gdpo", named(step), step.groups, weights=WEIGHTS)
    assert not torch.allclose(expected, plain)


@pytest.mark.parametrize("name", ["covey_gdpo", "dgdo"])
def test_verl_gives_reward_columns_to_gdpo_alone(name: str) -> None:
    """Used by its own name in a run, the estimator receives only the sum: the error names the settings to use."""
    step = case(0)
    with pytest.raises(InputError, match=f"adv_estimator=gdpo .algorithm.gdpo_estimator={name}"):
        batch_advantages(name, step, algorithm(**COLUMNS), **two_rewards(step))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gdpo_estimator": "dgpo"}, "did you mean   dgdo"),
        ({"gdpo_estimator": "dgdo", "gdpo_reward_keys": None}, "gdpo_reward_keys"),
        ({"gdpo_estimator": "dgdo", "gdpo_reward_keys": ["correct", "style"]}, "style"),
        ({"gdpo_estimator": "dgdo", "gdpo_reward_weights": [1.0]}, "1 weights for 2 rewards"),
        ({"gdpo_estimator": "dgdo", "use_kl_in_reward": True}, "use_kl_loss=true"),
        ({"gdpo_estimator": "dgdo", "dgdo": {"warm_up_steps": 1}}, "warmup_steps"),
    ],
)
def test_several_rewards_refuse_what_they_cannot_use(settings: dict[str, Any], message: str) -> None:
    step = case(0)
    with pytest.raises(InputError, match=message):
        batch_advantages("gdpo", step, algorithm(**(COLUMNS | settings)), **two_rewards(step))
