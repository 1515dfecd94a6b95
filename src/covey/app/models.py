"""The learner of a run and the models in it: policy, reference, critic; on resume, from the checkpoint."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from covey.app.checks import engine_gpus, shares_gpu
from covey.config.schema import Config, LearnerConfig, LoraConfig, ModelConfig
from covey.protocols import RolloutEngine

if TYPE_CHECKING:
    from covey.learner.learner import Learner
    from covey.learner.parallel import Ranks
    from covey.models.loading import ModelSource
    from covey.protocols import Algorithm
    from covey.training.checkpoint import Checkpoint


class Parts(Protocol):
    """What models, learner and engine are made from."""

    @property
    def config(self) -> Config: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def model(self) -> ModelSource | None: ...

    @property
    def total_steps(self) -> int: ...


def make_learner(prepared: Parts, checkpoint: Checkpoint | None, ranks: Ranks | None = None) -> Learner:
    """On several ranks, one of the learners that learn together; every rank makes its own."""
    from covey.learner.learner import Learner
    from covey.learner.parallel import SINGLE_PROCESS

    config = prepared.config
    ranks = (ranks or SINGLE_PROCESS).with_tensor_parallel(config.learner.tensor_parallel)
    model, plan = on_rank(prepared, ranks)
    policy, reference = _load_models(prepared, model, checkpoint)
    valued = prepared.algorithm.needs.values
    learner = Learner(
        policy,
        plan,
        total_updates=_total_updates(prepared),
        reference=reference,
        critic=config.critic if valued else None,
        critic_backbone=_load_critic(prepared, ranks) if valued and not config.critic.shared else None,
        ranks=ranks,
    )
    if checkpoint is not None:
        learner.restore(checkpoint.folder, checkpoint.state["learner"])
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    return learner


def on_rank(prepared: Parts, ranks: Ranks) -> tuple[ModelConfig, LearnerConfig]:
    """Where a rank loads the model to, and how weights are shared out: what is sharded goes to the device unit by
    unit."""
    from covey.learner.parallel import BYTES_PER_WEIGHT, check_sharding, check_tensor_parallel, should_shard
    from covey.models.loading import parameter_count, pick_dtype

    config, source = prepared.config, prepared.model
    assert source is not None
    if ranks.device is None:
        return config.model, config.learner
    adapter = config.model.lora.rank > 0 or source.adapter is not None
    sharded = should_shard(config.learner, ranks, parameter_count(source) * (2 if adapter else BYTES_PER_WEIGHT))
    if sharded:
        check_sharding(config.learner, adapter=adapter)
    if config.learner.tensor_parallel > 1:
        check_tensor_parallel(source.config, config.learner.tensor_parallel)
    dtype = str(pick_dtype(config.model.dtype, ranks.device)).removeprefix("torch.")
    place = "cpu" if sharded else str(ranks.device)
    plan = dataclasses.replace(config.learner, parallel="fsdp" if sharded else "ddp")
    return dataclasses.replace(config.model, device=place, dtype=dtype), plan


def _load_models(prepared: Parts, model: ModelConfig, checkpoint: Checkpoint | None) -> tuple[Any, Any]:
    """The policy, from the checkpoint if there is one, and its reference, always from the start model."""
    from covey.models.loading import Reference, load_policy

    config, source = prepared.config, prepared.model
    assert source is not None
    needed, offload = prepared.algorithm.needs.reference, config.learner.offload_reference

    def load(source: ModelSource) -> Any:
        return load_policy(source, model, seed=config.seed)

    if checkpoint is None:
        policy = load(source)
        return policy, Reference.of(policy, offload=offload) if needed else None
    if config.model.lora.rank > 0 or source.adapter is not None:
        policy = load(dataclasses.replace(source, adapter=checkpoint.model))
        return policy, Reference.of(policy, offload=offload) if needed else None
    policy = load(dataclasses.replace(source, path=str(checkpoint.model)))
    return policy, Reference(load(source), offload=offload) if needed else None


def _load_critic(prepared: Parts, ranks: Ranks) -> Any:
    """A whole model without adapters: critic.model, or what the policy starts from."""
    from covey.models.loading import load_policy, open_source

    config, source = prepared.config, prepared.model
    assert source is not None
    plain = dataclasses.replace(config.model, name=config.critic.model or config.model.name, lora=LoraConfig())
    plain = plain if ranks.device is None else dataclasses.replace(plain, device=str(ranks.device))
    source = open_source(plain, headless=True) if config.critic.model is not None else source
    return load_policy(dataclasses.replace(source, adapter=None), plain)


def _total_updates(prepared: Parts) -> int:
    config = prepared.config
    per_epoch = -(-config.data.train_batch_size // (config.learner.mini_batch_size or config.data.train_batch_size))
    alone = config.critic.warmup_steps if prepared.algorithm.needs.values else 0  # steps without the policy
    return max(1, prepared.total_steps - alone) * per_epoch * config.learner.epochs


# -- The engine of a policy that is loaded: in this process, or vLLM beside it -----------------------------------------


def make_engine(prepared: Parts, policy: Any, *, log: Path | None = None, shared: bool | None = None) -> RolloutEngine:
    """The engine of a policy that is loaded. `log` is where vLLM's chatter goes. `shared`: whether vLLM is on the
    learner's GPU; None: what the settings say."""
    from covey.rollout.embedded import EmbeddedEngine

    source = prepared.model
    assert source is not None
    if prepared.config.rollout.name == "vllm":
        return _make_vllm(prepared, policy, log or Path(tempfile.mkdtemp(prefix="covey-")) / "vllm.log", shared)
    return EmbeddedEngine(
        policy,
        eos_ids=source.eos_ids(),
        decode=source.tokenizer.decode,
        max_sequences=prepared.config.rollout.max_sequences,
        context_length=prepared.config.model.context_length or source.context_length,
        memory=prepared.config.rollout.memory,
        eager=prepared.config.rollout.eager,
        drains=prepared.config.mode.update == "drain",
    )


def _make_vllm(prepared: Parts, policy: Any, log: Path, shared: bool | None) -> RolloutEngine:
    from covey.rollout.vllm import VllmEngine, VllmSettings

    source, config = prepared.model, prepared.config
    assert source is not None
    rollout, gpus = config.rollout, engine_gpus(config)
    colocated = shares_gpu(config, gpus) if shared is None else shared
    settings = VllmSettings(
        model=source.path,
        eos_ids=source.eos_ids(),
        dtype=str(policy.get_input_embeddings().weight.dtype).removeprefix("torch."),
        devices=gpus,
        tensor_parallel=rollout.tensor_parallel,
        context_length=config.model.context_length,
        max_sequences=rollout.max_sequences,
        memory=rollout.memory,
        eager=rollout.eager,
        sleeps=rollout.sleep and colocated,
        trust_remote_code=config.model.trust_remote_code,
        revision=source.revision,
    )
    here = policy.get_input_embeddings().weight.device.type == "cuda"  # elsewhere the policy is another process's
    return VllmEngine(settings, log=log, same_gpu=colocated and len(gpus) == 1 and here)
