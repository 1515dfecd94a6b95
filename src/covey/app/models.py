"""Makes the learner with its models (policy, reference, critic; on resume from the checkpoint), and the engine."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from covey.app.checks import engine_gpus, shares_gpu
from covey.app.teacher import load_teacher
from covey.config.schema import Config, LearnerConfig, LoraConfig, ModelConfig
from covey.protocols import RolloutEngine

if TYPE_CHECKING:
    from covey.learner.learner import Learner
    from covey.learner.parallel import Ranks
    from covey.models.loading import ModelSource
    from covey.protocols import Algorithm
    from covey.training.checkpoint import Checkpoint


class BuildSpec(Protocol):
    """What models, learner and engine are built from."""

    @property
    def config(self) -> Config: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def model(self) -> ModelSource | None: ...

    @property
    def total_steps(self) -> int: ...


def make_learner(prepared: BuildSpec, checkpoint: Checkpoint | None, ranks: Ranks | None = None) -> Learner:
    """The learner of this rank."""
    from covey.learner.learner import Learner
    from covey.learner.parallel import SINGLE_PROCESS

    config = prepared.config
    ranks = (ranks or SINGLE_PROCESS).with_tensor_parallel(config.learner.tensor_parallel)
    model, plan = on_rank(prepared, ranks)
    policy, start = _load_models(prepared, model, checkpoint)
    sharded = ranks.device is not None and plan.parallel == "fsdp"
    valued = prepared.algorithm.needs.values
    learner = Learner(
        policy,
        plan,
        total_updates=_total_updates(prepared),
        reference=start if prepared.algorithm.needs.reference else None,
        teacher=load_teacher(prepared, start, ranks, sharded=sharded),
        critic=config.critic if valued else None,
        critic_backbone=_load_critic(prepared, ranks) if valued and not config.critic.shared else None,
        ranks=ranks,
    )
    if checkpoint is not None:
        learner.restore(checkpoint.folder, checkpoint.state["learner"])
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    return learner


def on_rank(prepared: BuildSpec, ranks: Ranks) -> tuple[ModelConfig, LearnerConfig]:
    """The model and learner settings of one rank: its device, precision, and sharding. A model to be sharded is loaded
    to the CPU and moves to the device unit by unit."""
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


def _load_models(prepared: BuildSpec, model: ModelConfig, checkpoint: Checkpoint | None) -> tuple[Any, Any]:
    """The policy, from the checkpoint if there is one, and the start policy, if it is the reference or the teacher."""
    from covey.models.loading import Reference, load_policy

    config, source = prepared.config, prepared.model
    assert source is not None
    needed = prepared.algorithm.needs.reference or config.teacher.name == "initial"
    offload = config.learner.offload_reference

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


def _load_critic(prepared: BuildSpec, ranks: Ranks) -> Any:
    """The critic's backbone, a full model without adapters: critic.model, or the policy's start model."""
    from covey.models.loading import load_policy, open_source

    config, source = prepared.config, prepared.model
    assert source is not None
    plain = dataclasses.replace(config.model, name=config.critic.model or config.model.name, lora=LoraConfig())
    plain = plain if ranks.device is None else dataclasses.replace(plain, device=str(ranks.device))
    source = open_source(plain, headless=True) if config.critic.model is not None else source
    return load_policy(dataclasses.replace(source, adapter=None), plain)


def _total_updates(prepared: BuildSpec) -> int:
    config = prepared.config
    per_epoch = -(-config.data.train_batch_size // (config.learner.mini_batch_size or config.data.train_batch_size))
    critic_only = config.critic.warmup_steps if prepared.algorithm.needs.values else 0
    return max(1, prepared.total_steps - critic_only) * per_epoch * config.learner.epochs


# -- The engine --------------------------------------------------------------------------------------------------------


def make_engine(
    prepared: BuildSpec, policy: Any, *, log: Path | None = None, shared: bool | None = None
) -> RolloutEngine:
    """The engine for a loaded policy: embedded in this process, or vLLM in its own. `log` is the file of vLLM's output.
    `shared`: vLLM is on the learner's GPU; None: as the settings say."""
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


def _make_vllm(prepared: BuildSpec, policy: Any, log: Path, shared: bool | None) -> RolloutEngine:
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
    here = policy.get_input_embeddings().weight.device.type == "cuda"  # False: another process trains the policy
    return VllmEngine(settings, log=log, same_gpu=colocated and len(gpus) == 1 and here)
