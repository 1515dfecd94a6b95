"""Makes the learner with its models (policy, reference, critic; on resume from the checkpoint), and the engine."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from covey.app.checks import check_training, engine_gpus, shares_gpu
from covey.app.teacher import load_teacher, teacher_bytes
from covey.config.schema import Config, LearnerConfig, LoraConfig, ModelConfig
from covey.protocols import RolloutEngine

if TYPE_CHECKING:
    from covey.learner.learner import Learner
    from covey.learner.parallel import Ranks
    from covey.learner.pass_memory import Demand
    from covey.models.loading import ModelSource
    from covey.protocols import Algorithm
    from covey.rollout.embedded import EmbeddedEngine
    from covey.training.checkpoint import Checkpoint


PLANNING = "planning memory, on a GPU with a pass that compiles the layers"


class LongestRow(NamedTuple):
    """Tokens of the longest row that a run expects; turns after the first may make others longer."""

    prompt: int
    answer: int
    setting: str = "rollout.max_tokens"  # that bounds it
    sampled: bool = True  # by an engine
    images: int | None = None  # tokens of images; None: at most those of the prompt


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

    @property
    def task_count(self) -> int: ...

    @property
    def longest_row(self) -> LongestRow: ...


def make_learner(prepared: BuildSpec, checkpoint: Checkpoint | None, ranks: Ranks | None = None) -> Learner:
    """The learner of this rank. Its memory is planned by `plan_memory`."""
    from covey.learner.learner import Learner
    from covey.learner.parallel import SINGLE_PROCESS

    config = prepared.config
    ranks = (ranks or SINGLE_PROCESS).with_tensor_parallel(config.learner.tensor_parallel)
    model, plan = on_rank(prepared, ranks)
    _check_states(prepared, model, plan, ranks)
    policy, start = _load_models(prepared, model, checkpoint)
    sharded = ranks.device is not None and plan.parallel == "fsdp"
    valued = prepared.algorithm.needs.values
    learner = Learner(
        policy,
        plan,
        total_updates=_updates(prepared, prepared.total_steps),
        critic_only_updates=_updates(prepared, config.critic.warmup_steps) if valued else 0,
        reference=start if prepared.algorithm.needs.reference else None,
        teacher=load_teacher(prepared, start, ranks, sharded=sharded),
        critic=config.critic if valued else None,
        critic_backbone=_load_critic(prepared, ranks) if valued and not config.critic.shared else None,
        vision=None if prepared.model is None else prepared.model.vision,
        ranks=ranks,
    )
    if checkpoint is not None:
        moving = prepared.algorithm.needs.reference_every > 0
        learner.restore(checkpoint.folder, checkpoint.state["learner"], moving=moving)
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    return learner


def _check_states(prepared: BuildSpec, model: ModelConfig, plan: LearnerConfig, ranks: Ranks) -> None:
    """On a GPU, check that weights and states fit. A sharded or quantised model is not checked."""
    import torch

    from covey.learner.pass_memory import check_states
    from covey.models.loading import parameter_count, pick_device, pick_dtype, trained_count

    device, source = ranks.device or pick_device(model.device), prepared.model
    assert source is not None
    if device.type != "cuda" or plan.parallel == "fsdp" or model.quantization is not None:
        return
    adapter = model.lora.rank > 0 or source.adapter is not None
    needs, initial = prepared.algorithm.needs, prepared.config.teacher.name == "initial"
    loaded = needs.full_kl or (initial and needs.teacher_kl)  # during updates, wherever it is otherwise
    start = (needs.reference or initial) and not adapter and (loaded or not plan.offload_reference)
    critic = needs.values and not prepared.config.critic.shared
    weights = parameter_count(source)
    check_states(
        plan,
        weights=weights,
        trained=trained_count(source, model) + (weights if critic else 0),
        copies=1 + start + critic + (bool(prepared.config.agent.opponents) and not adapter),
        itemsize=pick_dtype(model.dtype, device).itemsize,
        memory=torch.cuda.get_device_properties(device).total_memory,
        teacher=teacher_bytes(prepared.config, device) if needs.teacher_kl or not plan.offload_reference else 0,
    )


def plan_memory(prepared: BuildSpec, learner: Any) -> None:
    """Plan the learner's passes before the first step; on a GPU this may run one of them. The run is refused if its
    longest row cannot fit."""
    learner.plan_memory(_demand(prepared, learner.model))


def _demand(prepared: BuildSpec, policy: Any) -> Demand:
    """What the run's rows and its engine take of the learner's memory."""
    from covey.learner.pass_memory import Demand
    from covey.memory import cache_bytes_per_token

    config, source, row, needs = prepared.config, prepared.model, prepared.longest_row, prepared.algorithm.needs
    assert source is not None
    context = config.model.context_length or source.context_length or row.prompt + row.answer
    demand = Demand(
        row.prompt,
        min(row.answer, context - row.prompt),
        row.setting,
        config.model.gradient_checkpointing,
        sampled=row.sampled,
        refuse=True,
        images=row.images,
        full_kl=needs.full_kl,
        sample_full_kl=needs.sample_full_kl,
        teacher_kl=needs.teacher_kl,
        teacher_top=needs.teacher_top,
    )
    ray = config.cluster.name == "ray"
    if not row.sampled or (ray and config.cluster.rollout_devices is not None):
        return demand
    if config.rollout.name == "vllm":
        awake = not config.rollout.sleep and (ray or shares_gpu(config, engine_gpus(config)))
        return dataclasses.replace(demand, engine_share=config.rollout.memory if awake else 0.0)
    sequences = max(config.rollout.max_sequences, _episodes_in_progress(config))
    size = cache_bytes_per_token(policy) * demand.longest * sequences
    demand = dataclasses.replace(demand, cache_share=config.rollout.memory, cache_bytes=size)
    if not config.agent.opponents:
        return demand
    copied = sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    return dataclasses.replace(demand, cache_bytes=2 * size, copied=copied)


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
    check_training(dataclasses.replace(config, learner=plan), adapter=adapter)
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
    plain = dataclasses.replace(
        config.model, name=config.critic.model or config.model.name, lora=LoraConfig(), quantization=None
    )
    plain = plain if ranks.device is None else dataclasses.replace(plain, device=str(ranks.device))
    source = open_source(plain, headless=True) if config.critic.model is not None else source
    return load_policy(dataclasses.replace(source, adapter=None), plain)


def _updates(prepared: BuildSpec, steps: int) -> int:
    """Updates in a number of steps, if no group is skipped."""
    config = prepared.config
    groups = min(config.data.train_batch_size, max(1, prepared.task_count) * config.mode.max_uses)
    return steps * config.learner.epochs * math.ceil(groups / (config.learner.mini_batch_size or groups))


# -- The engine --------------------------------------------------------------------------------------------------------


def make_engine(
    prepared: BuildSpec, policy: Any, *, log: Path | None = None, shared: bool | None = None
) -> RolloutEngine:
    """The engine for a loaded policy: embedded in this process, or vLLM in its own. `log` is the file of vLLM's output.
    `shared`: vLLM is on the learner's GPU; None: as the settings say."""
    if prepared.config.rollout.name == "vllm":
        return _make_vllm(prepared, policy, log or Path(tempfile.mkdtemp(prefix="covey-")) / "vllm.log", shared)
    return make_embedded(prepared, policy)


def make_embedded(prepared: BuildSpec, policy: Any, *, beside: EmbeddedEngine | None = None) -> EmbeddedEngine:
    """`beside`: another engine of this run, with whose steps those of this one alternate."""
    from covey.rollout.embedded import EmbeddedEngine

    source = prepared.model
    assert source is not None
    rollout, engines = prepared.config.rollout, 2 if prepared.config.agent.opponents else 1
    return EmbeddedEngine(
        policy,
        eos_ids=source.eos_ids(),
        decode=source.tokenizer.decode,
        max_sequences=rollout.max_sequences,
        kept_sequences=_episodes_in_progress(prepared.config),
        context_length=prepared.config.model.context_length or source.context_length,
        memory=rollout.memory / engines,
        eager=rollout.eager or prepared.config.model.quantization is not None,  # its kernels are not captured
        drains=prepared.config.mode.update == "drain",
        vision=source.vision,
        thread=None if beside is None else beside.thread,
    )


def copy_policy(policy: Any) -> Any:
    """A copy of the module with its own trained weights. Frozen ones, such as the base of an adapter, are shared."""
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    return copy.deepcopy(policy, shared)


def _episodes_in_progress(config: Config) -> int:
    """How many episodes of several turns a step runs at once; 0 if the agent has one turn."""
    if config.agent.name == "chat":
        return 0
    return config.data.train_batch_size * config.rollout.group_size


def _make_vllm(prepared: BuildSpec, policy: Any, log: Path, shared: bool | None) -> RolloutEngine:
    from covey.models.families import causal_lm, fixed_rope_length
    from covey.models.image_features import trains_vision
    from covey.rollout.vllm import VisionSettings, VllmEngine, VllmSettings

    source, config = prepared.model, prepared.config
    assert source is not None
    rollout, gpus = config.rollout, engine_gpus(config)
    colocated = shares_gpu(config, gpus) if shared is None else shared
    vision = None
    if source.vision is not None:
        vision = VisionSettings.of(source.vision, trained=trains_vision(causal_lm(policy)))
    settings = VllmSettings(
        model=source.path,
        eos_ids=source.eos_ids(),
        dtype=str(policy.get_input_embeddings().weight.dtype).removeprefix("torch."),
        devices=gpus,
        tensor_parallel=rollout.tensor_parallel,
        context_length=config.model.context_length or fixed_rope_length(source.config),
        max_sequences=rollout.max_sequences,
        memory=rollout.memory,
        eager=rollout.eager,
        sleeps=rollout.sleep and colocated,
        trust_remote_code=config.model.trust_remote_code,
        revision=source.revision,
        vision=vision,
    )
    here = policy.get_input_embeddings().weight.device.type == "cuda"  # False: another process trains the policy
    return VllmEngine(settings, log=log, same_gpu=colocated and len(gpus) == 1 and here, vision=source.vision)
