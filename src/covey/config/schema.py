"""Every setting of a run: frozen dataclasses, one per section. A comment is the setting's explanation:
`covey config explain KEY` prints it.

`algorithm` has no class here: its settings are the fields of the chosen algorithm (`covey.algorithms`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from covey.errors import InputError, unknown


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown(f"value of {key}", value, allowed)


def _at_least(key: str, value: float | None, bound: float) -> None:
    if value is not None and value < bound:
        raise InputError(f"{key} must be at least {bound}, got {value}")


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0  # 0: train all weights; otherwise train adapters of this rank (needs the extra covey[lora])
    alpha: float = 32.0  # adapter scale is alpha / rank
    target_modules: Any = "all-linear"  # module names that get an adapter, or "all-linear"


@dataclass(frozen=True)
class ModelConfig:
    name: str = "smollm2-135m"  # a folder, a Hugging Face id (ORG/NAME or ORG/NAME@REVISION), or built in: smollm2-135m
    dtype: str = "auto"  # float32 | bfloat16 | float16; auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # cpu | cuda | cuda:1 ...; auto: the GPU if there is one
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    trust_remote_code: bool = False  # run Python code that comes with the model
    context_length: int | None = None  # longest prompt + answer in tokens; null: what the model supports
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))


@dataclass(frozen=True)
class DataConfig:
    name: str = "sort"  # a data set or a generated task (covey data show); not used when files are given
    options: dict[str, Any] = field(default_factory=dict)  # of the data set or generated task: docs/data.md
    train_files: Any = None  # files or globs (JSON, JSONL, Parquet, CSV), one or a list
    val_files: Any = None  # the same, for evaluation; never trained on
    train_size: int | None = None  # use this many training tasks; generated tasks: 2000
    val_size: int | None = None  # use this many validation tasks; generated tasks: 200
    train_batch_size: int = 8  # tasks per step; each gets rollout.group_size attempts
    system_prompt: str | None = None  # put before every question that brings no system message of its own
    shuffle: bool = True  # a new order every epoch, from the run's seed

    def __post_init__(self) -> None:
        _at_least("data.train_batch_size", self.train_batch_size, 1)
        _at_least("data.train_size", self.train_size, 1)
        _at_least("data.val_size", self.val_size, 1)


@dataclass(frozen=True)
class AgentConfig:
    name: str = "chat"  # chat | hf | react | code | flow | gateway | verifiers, or your own as file.py:function
    tools: list[str] = field(default_factory=list)  # tools by name, module:function or file.py:function
    tool_options: dict[str, Any] = field(default_factory=dict)  # a tool's own settings: {search: {corpus: docs.jsonl}}
    format: str = "auto"  # how calls are written: hermes | llama | mistral; auto: as the model's template does
    max_turns: int = 8  # replies of the model in one episode
    max_response_tokens: int | None = None  # sampled tokens of one episode, all turns together; null: no limit
    max_tool_tokens: int = 512  # of one tool's output; the rest is cut off, with a mark
    tool_seconds: float = 10.0  # one tool call may take this long, unless the tool says otherwise
    train_modules: list[str] = field(default_factory=lambda: ["planner"])  # agent=flow: whose turns are learned from
    template: str | None = None  # qwen2.5, qwen2.5-vl, or a chat template file (Jinja); null: the model's own
    environment: str | None = None  # agent=verifiers: an environment of that package, by id, module:function or file
    environment_options: dict[str, Any] = field(default_factory=dict)  # agent=verifiers: its own `env` settings
    max_seconds: float = 500.0  # an episode's own work, its reward included, may take this long (sampling not counted)
    command: str | None = None  # agent=gateway: a program started for each episode; null: programs come for attempts

    def __post_init__(self) -> None:
        _at_least("agent.max_seconds", self.max_seconds, 0.001)
        _at_least("agent.tool_seconds", self.tool_seconds, 0.001)
        _at_least("agent.max_turns", self.max_turns, 1)
        _at_least("agent.max_response_tokens", self.max_response_tokens, 1)
        _at_least("agent.max_tool_tokens", self.max_tool_tokens, 1)
        _one_of("agent.format", self.format, ("auto", "hermes", "llama", "mistral"))


@dataclass(frozen=True)
class GatewayConfig:
    port: int = 9999  # of the endpoint of agent=gateway and covey serve, on this machine only; 0: any that is free
    max_programs: int = 16  # programs of agent.command that run at once

    def __post_init__(self) -> None:
        _at_least("gateway.port", self.port, 0)
        _at_least("gateway.max_programs", self.max_programs, 1)


@dataclass(frozen=True)
class SandboxConfig:
    tier: str = "auto"  # bubblewrap | namespaces | limits; auto: the strongest that works here
    allow_weak: bool = False  # run code of the model's where only limits, and no walls, can be had
    seconds: float = 10.0  # one execution may take this long
    memory_mb: int = 512  # of one sandbox
    max_concurrent: int = 16  # programs that run at once; others wait their turn

    def __post_init__(self) -> None:
        _one_of("sandbox.tier", self.tier, ("auto", "bubblewrap", "namespaces", "limits"))
        _at_least("sandbox.seconds", self.seconds, 0.001)
        _at_least("sandbox.memory_mb", self.memory_mb, 64)
        _at_least("sandbox.max_concurrent", self.max_concurrent, 1)


@dataclass(frozen=True)
class RewardConfig:
    name: Any = "auto"  # a reward or a list of them, by name, module:function or file.py:function; auto: the task's own
    weights: dict[str, float] = field(
        default_factory=dict
    )  # by reward name; 1 where not given; 0 measures without training
    only_if: dict[str, str] = field(
        default_factory=dict
    )  # {short: exact}: short counts only where exact is over 0; {short: "exact>=0.5"} with a bar
    options: dict[str, Any] = field(default_factory=dict)  # a reward's own settings: {judge: {url: ..., model: ...}}
    seconds: float = 30.0  # scoring one episode with one reward may take this long

    def __post_init__(self) -> None:
        _at_least("reward.seconds", self.seconds, 0.001)


@dataclass(frozen=True)
class RolloutConfig:
    name: str = "embedded"  # embedded: in this process with the learner's own weights; vllm: beside it; auto: by size
    group_size: int = 8  # attempts per task
    temperature: float = 1.0  # softmax temperature of sampling; the learner uses the same
    top_p: float = 1.0  # sample from the smallest set of tokens with this probability; 1: all
    top_k: int = 0  # sample from this many most likely tokens; 0: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the likeliest
    max_tokens: int = 256  # longest answer (of one turn), in tokens
    stop: list[str] = field(default_factory=list)  # strings that end an answer
    max_sequences: int = 256  # sequences decoded together; bounds the memory of the key-value cache
    memory: float = 0.5  # embedded: share of free GPU memory (or of a CPU's) for the cache; vllm: of the whole GPU
    eager: bool = False  # no captured graphs on a GPU: slower, starts faster
    tensor_parallel: int = 1  # vllm: GPUs that share one copy of the model
    devices: list[int] | None = None  # vllm: its GPUs by number; null: the learner's own, and those after it
    sleep: bool = True  # vllm on the learner's GPU: gives its memory back while the learner works

    def __post_init__(self) -> None:
        _at_least("rollout.group_size", self.group_size, 1)
        _at_least("rollout.max_sequences", self.max_sequences, 1)
        _at_least("rollout.max_tokens", self.max_tokens, 1)
        _at_least("rollout.tensor_parallel", self.tensor_parallel, 1)
        _one_of("rollout.name", self.name, ("embedded", "vllm", "auto"))
        if not 0 < self.memory <= 1:
            raise InputError(f"rollout.memory is a share of the GPU's memory, between 0 and 1; got {self.memory:g}")
        if self.temperature <= 0:
            raise InputError(
                f"rollout.temperature must be positive, got {self.temperature}\n"
                "  a group of greedy answers is one answer, and teaches nothing"
            )


@dataclass(frozen=True)
class LearnerConfig:
    lr: float = 1e-5  # learning rate after the warm-up
    schedule: str = "constant"  # constant | cosine | linear
    warmup_steps: int = 0  # optimiser steps of linear warm-up
    min_lr_ratio: float = 0.0  # where cosine and linear end, as a fraction of lr
    weight_decay: float = 0.0  # AdamW's decoupled weight decay
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    grad_clip: float = 1.0  # largest gradient norm; 0: no clipping
    epochs: int = 1  # passes over each step's samples
    mini_batch_size: int | None = None  # groups per optimiser step; null: all groups of the step
    micro_batch_tokens: int | None = None  # per forward pass; null: what fits on the GPU, 8192 on a CPU; same gradient
    micro_batch_size: int | None = None  # episodes per forward pass at most; null: no limit but the tokens
    entropy_coef: float = 0.0  # entropy bonus per token
    compile: bool | None = None  # fuse the small operations of a layer: slow start, faster steps; null: on a GPU
    offload_optimizer: bool = False  # optimiser state and float32 weights in CPU memory, the update made there
    offload_reference: bool = False  # the reference model waits in CPU memory while it is not asked
    offload_weights: bool = False  # with vllm on the same GPU: the policy waits in CPU memory during sampling
    parallel: str = "auto"  # several learners: ddp, each has all weights; fsdp: weights and optimiser are shared out
    tensor_parallel: int = 1  # learners that share the matrices of every layer, as transformers' plan says; with fsdp
    max_skipped: int = 5  # stop after this many updates in a row with a non-finite loss or gradient

    def __post_init__(self) -> None:
        _one_of("learner.parallel", self.parallel, ("auto", "ddp", "fsdp"))
        _one_of("learner.schedule", self.schedule, ("constant", "cosine", "linear"))
        _at_least("learner.lr", self.lr, 0)
        _at_least("learner.epochs", self.epochs, 1)
        _at_least("learner.mini_batch_size", self.mini_batch_size, 1)
        _at_least("learner.micro_batch_tokens", self.micro_batch_tokens, 1)
        _at_least("learner.micro_batch_size", self.micro_batch_size, 1)
        _at_least("learner.max_skipped", self.max_skipped, 1)
        _at_least("learner.grad_clip", self.grad_clip, 0)
        _at_least("learner.warmup_steps", self.warmup_steps, 0)
        _at_least("learner.tensor_parallel", self.tensor_parallel, 1)
        if self.tensor_parallel > 1 and self.parallel == "ddp":
            raise InputError(
                f"learner.tensor_parallel={self.tensor_parallel} splits weights; learner.parallel=ddp has them whole\n"
                "  use learner.parallel=fsdp, or auto"
            )


@dataclass(frozen=True)
class CriticConfig:
    shared: bool = False  # a head on the policy's own backbone; false: a model of its own
    model: str | None = None  # what that model starts from; null: what the policy starts from
    lr: float = 1e-5  # learning rate of the critic; schedule and AdamW settings are the learner's
    grad_clip: float = 1.0  # largest gradient norm of the critic's backbone, and of its head; 0: no clipping
    clip: float | None = 0.5  # a value moves by at most this in one step; null: no clipping
    warmup_steps: int = 0  # steps in which only the critic learns
    shared_coef: float = 0.1  # how much of the value loss's gradient a shared backbone gets

    def __post_init__(self) -> None:
        _at_least("critic.lr", self.lr, 0)
        _at_least("critic.grad_clip", self.grad_clip, 0)
        _at_least("critic.clip", self.clip, 0)
        _at_least("critic.warmup_steps", self.warmup_steps, 0)
        _at_least("critic.shared_coef", self.shared_coef, 0)
        if self.shared and self.model is not None:
            raise InputError("critic.shared=true uses the policy's backbone: critic.model has no place\n  give one")


@dataclass(frozen=True)
class LoopConfig:
    total_steps: int | None = None  # steps to train; null: what total_epochs makes
    total_epochs: int | None = None  # passes over the training tasks; null with total_steps null: 1
    max_minutes: float | None = None  # stop after this long, with a checkpoint; the same command goes on from there
    save_every: int = 0  # write a checkpoint every n steps; 0: only at the end
    keep_last: int = 2  # checkpoints kept besides the best
    keep_best: bool = True  # never delete the checkpoint with the best evaluation
    save_final: bool = True  # write a checkpoint at the end
    threads: int | None = None  # CPU threads; null: one per core. Recorded: results depend on it in the last bits

    def __post_init__(self) -> None:
        _at_least("loop.total_steps", self.total_steps, 1)
        _at_least("loop.total_epochs", self.total_epochs, 1)
        _at_least("loop.max_minutes", self.max_minutes, 0)
        _at_least("loop.keep_last", self.keep_last, 1)
        _at_least("loop.save_every", self.save_every, 0)
        _at_least("loop.threads", self.threads, 1)


@dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # evaluate every n steps; 0: only before and after
    before: bool = True  # evaluate before the first step
    after: bool = True  # evaluate after the last step
    modes: list[str] = field(default_factory=lambda: ["greedy"])  # greedy, sampled, or both
    n: int = 1  # answers per task where sampled
    temperature: float = 1.0  # of the sampled mode
    top_p: float = 1.0  # of the sampled mode
    top_k: int = 0  # of the sampled mode
    max_tokens: int | None = None  # longest answer; null: rollout.max_tokens
    batch_size: int | None = None  # tasks evaluated together; null: all

    def __post_init__(self) -> None:
        for mode in self.modes:
            _one_of("eval.modes", mode, ("greedy", "sampled"))
        _at_least("eval.n", self.n, 1)
        _at_least("eval.every", self.every, 0)
        _at_least("eval.batch_size", self.batch_size, 1)


@dataclass(frozen=True)
class ClusterConfig:
    name: str = "local"  # local: one process; ray: learners and engines as actors, on one machine or many
    address: str | None = None  # ray: of a running cluster; null: RAY_ADDRESS, or one started here for this run
    nodes: int = 1  # ray: machines that must be there
    learner_devices: int = 1  # ray: processes that learn together, one per GPU (or on CPUs)
    rollout_devices: int | None = None  # ray: engines, one per GPU (or on CPUs); null: one on each learner's device
    transport: str = "auto"  # ray: how weights travel: shared_memory | collective | file; auto: the best that works
    max_restarts: int = 3  # ray: how often a run that lost a learner begins again from its last checkpoint

    def __post_init__(self) -> None:
        _one_of("cluster.name", self.name, ("local", "ray"))
        _at_least("cluster.nodes", self.nodes, 1)
        _at_least("cluster.learner_devices", self.learner_devices, 1)
        _at_least("cluster.rollout_devices", self.rollout_devices, 1)
        _at_least("cluster.max_restarts", self.max_restarts, 0)
        _one_of("cluster.transport", self.transport, ("auto", "shared_memory", "collective", "file"))
        if self.name == "local" and (self.nodes, self.learner_devices, self.rollout_devices or 1) != (1, 1, 1):
            asked = f"nodes={self.nodes}, learner_devices={self.learner_devices}, "
            raise InputError(
                f"cluster=local is one process on one device, but cluster has {asked}"
                f"rollout_devices={'null' if self.rollout_devices is None else self.rollout_devices}\n"
                "  use cluster=ray, or leave these at their defaults"
            )


@dataclass(frozen=True)
class ModeConfig:
    name: str = "sync"  # sync: collect, then learn, by turns; async: episodes go on while the learner learns
    max_staleness: int = 1  # async: updates that the policy of an answer may be behind; 0: by turns
    update: str = "in_flight"  # async: new weights in the midst of answers; drain: answers are finished first
    publish_every: int = 1  # async: engines apart (vllm, ray) get new weights after so many updates
    max_uses: int = 1  # async: steps that may learn from a group; over 1, a part of each step is drawn from former ones

    def __post_init__(self) -> None:
        _at_least("mode.max_staleness", self.max_staleness, 0)
        _at_least("mode.publish_every", self.publish_every, 1)
        _at_least("mode.max_uses", self.max_uses, 1)
        if self.name == "async" and self.max_staleness < max(self.publish_every, self.max_uses) - 1:
            raise InputError(
                f"mode.max_staleness={self.max_staleness} is too short for mode.publish_every={self.publish_every} and "
                f"mode.max_uses={self.max_uses}\n  both make samples older: max_staleness must be at least one less"
            )
        _one_of("mode.update", self.update, ("in_flight", "drain"))


@dataclass(frozen=True)
class LoggingConfig:
    project: str = "covey"  # with experiment: names the run, and finds the run that resume=auto continues
    experiment: str = "run"  # see project
    to: list[str] = field(
        default_factory=lambda: ["console"]
    )  # besides files: console, wandb, tensorboard, mlflow, trackio
    output_dir: str = "outputs"  # runs go to output_dir/DATE/TIME
    episodes_per_step: int = 4  # attempts at one task that are written to episodes.jsonl each step
    verbosity: str = "info"  # debug | info | warning

    def __post_init__(self) -> None:
        for place in self.to:
            _one_of("logging.to", place, ("console", "wandb", "tensorboard", "mlflow", "trackio"))
        _one_of("logging.verbosity", self.verbosity, ("debug", "info", "warning"))


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: Any = None  # the chosen algorithm's own settings
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mode: ModeConfig = field(default_factory=ModeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resume: str = "auto"  # auto: continue the newest unfinished run with these settings; disable; or a folder
    seed: int = 0  # of everything random: data order, sampling, adapters
