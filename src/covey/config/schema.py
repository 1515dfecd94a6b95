"""Every setting of a run: frozen dataclasses, one per section. The comment of a field is its explanation, which
`covey config explain KEY` prints; the annotation of a number states its range.

`algorithm` has no class here: its settings are the fields of the chosen algorithm (`covey.algorithms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from covey.errors import InputError, unknown
from covey.ranges import (
    AnyTemperature,
    Cap,
    Coefficient,
    Positive,
    PositiveShare,
    Range,
    Seconds,
    Share,
    ShareBelowOne,
    Steps,
    StopText,
    Tokens,
    TopK,
    Weight,
    check_ranges,
)

GUI_FORMATS = ("computer_use", "thought_action")
EPISODES_PER_STEP = 1_000_000  # the maximum of data.train_batch_size × rollout.group_size
TEACHER_TOP_K = 20  # the default of teacher.top_k
_GREEDY = "greedy answers to one task are all the same: a group of them has nothing to compare"


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise unknown(f"value of {key}", value, allowed)


# -- Ranges (those that algorithms use too are in `covey.ranges`) -----------------------------------------------------

Attempts = Annotated[int, Range(1, 65_536)]
BatchTokens = Annotated[int, Range(1, 1_000_000_000)]
Browsers = Annotated[int, Range(1, 32)]
DeviceNumber = Annotated[int, Range(0, 1023)]
Devices = Annotated[int, Range(1, 100_000)]
Episodes = Annotated[int, Range(1, EPISODES_PER_STEP)]
Few = Annotated[int, Range(1, 10_000)]
Images = Annotated[int, Range(0, 10_000)]
LearningRate = Annotated[float, Range(0, 10)]
LoraRank = Annotated[int, Range(0, 4096)]
Many = Annotated[int, Range(1, 1_000_000)]
Megabytes = Annotated[int, Range(64, 16_777_216)]  # an interpreter, up to 16 TiB
Minutes = Annotated[float, Range(0, 10_000_000)]
Pixels = Annotated[int, Range(1, 80_000_000)]
Port = Annotated[int, Range(0, 65_535)]
Restarts = Annotated[int, Range(0, 10_000)]
Seed = Annotated[int, Range(-(10**18), 10**18)]  # within torch's limits
Sequences = Annotated[int, Range(1, 65_536)]
Staleness = Annotated[int, Range(0, 1000)]
Tasks = Annotated[int, Range(1, 10_000_000)]
TeacherTokens = Annotated[int, Range(1, 1000)]
Temperature = Annotated[float, Range(0.001, 100, hint=_GREEDY)]
TensorParallel = Annotated[int, Range(1, 1024)]
Threads = Annotated[int, Range(1, 4096)]
TotalSteps = Annotated[int, Range(1, 1_000_000_000)]
Uses = Annotated[int, Range(1, 1001)]  # at most the maximal staleness plus one
WeightDecay = Annotated[float, Range(0, 100)]
Written = Annotated[int, Range(0, 1_000_000)]


@dataclass(frozen=True)
class LoraConfig:
    rank: LoraRank = 0  # 0: train all weights; otherwise train adapters of this rank (needs the extra covey[lora])
    alpha: Positive = 32.0  # the scale of the adapter is alpha / rank
    target_modules: Any = "all-linear"  # names of the modules that get an adapter, or "all-linear"
    part: str = "language"  # of a vision-language model: language | vision | both get an adapter

    def __post_init__(self) -> None:
        check_ranges(self, "model.lora.")
        _one_of("model.lora.part", self.part, ("language", "vision", "both"))


@dataclass(frozen=True)
class ModelConfig:
    name: str = "smollm2-135m"  # a folder, a run, a Hugging Face id (ORG/NAME, ORG/NAME@REVISION), or smollm2-135m
    dtype: str = "auto"  # float32 | bfloat16 | float16; auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # cpu | cuda | cuda:1 ...; auto: the GPU if there is one
    gradient_checkpointing: bool | None = None  # recompute activations in the backward pass; null: if memory needs it
    quantization: str | None = None  # nf4 | fp4: frozen weights in 4 bits, with model.lora (extra quantization)
    trust_remote_code: bool = False  # run Python code that comes with the model
    context_length: Tokens | None = None  # longest prompt + answer in tokens; null: the model's limit
    min_pixels: Pixels | None = None  # smaller images are enlarged to this many pixels; null: the model's own limit
    max_pixels: Pixels | None = None  # larger images are reduced to this many pixels; null: the model's own limit
    freeze_vision: bool = True  # train only the language part of a vision-language model
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_ranges(self, "model.")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise InputError(f"model.min_pixels={self.min_pixels} is over model.max_pixels={self.max_pixels}")
        _one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.quantization is not None:
            _one_of("model.quantization", self.quantization, ("nf4", "fp4"))


@dataclass(frozen=True)
class DataConfig:
    name: str = "sort"  # a data set or a generated task (covey data show); not used when files are given
    options: dict[str, Any] = field(default_factory=dict)  # options of the data set or generated task: docs/data.md
    train_files: Any = None  # files or globs (JSON, JSONL, Parquet, CSV), one or a list
    val_files: Any = None  # the same, for evaluation; never trained on
    train_size: Tasks | None = None  # use this many training tasks; generated tasks: 2000
    val_size: Tasks | None = None  # use this many validation tasks; generated tasks: 200
    train_batch_size: Episodes = 8  # tasks per step; each gets rollout.group_size attempts
    system_prompt: str | None = None  # system message for questions without one of their own
    shuffle: bool = True  # a new order every epoch, from the run's seed
    sampler: str = "uniform"  # which tasks a step gets: uniform | band | uncertainty | priority | buckets
    sampler_options: dict[str, Any] = field(default_factory=dict)  # options of the sampler: docs/curriculum.md

    def __post_init__(self) -> None:
        check_ranges(self, "data.")
        _one_of("data.sampler", self.sampler, ("uniform", "band", "uncertainty", "priority", "buckets"))


OWN_TASKS = ("verifiers", "gymnasium", "openenv", "harbor")  # agents whose environments bring their tasks


@dataclass(frozen=True)
class AgentConfig:
    name: str = "chat"  # chat | hf | react | code | flow | gui | gateway, an environment's package, or file.py:function
    tools: list[str] = field(default_factory=list)  # tools by name, module:function or file.py:function
    tool_options: dict[str, Any] = field(default_factory=dict)  # settings per tool: {search: {corpus: docs.jsonl}}
    format: str = "auto"  # hermes | llama | mistral; auto: of the chat template. gui: computer_use | thought_action
    max_turns: Few = 8  # replies of the model in one episode
    max_response_tokens: Tokens | None = None  # sampled tokens of one episode over all turns; null: no limit
    max_tool_tokens: Tokens = 512  # tokens of one tool's output; longer outputs are truncated, with a mark
    tool_seconds: Seconds = 10.0  # timeout of one tool call, unless the tool sets its own
    train_modules: list[str] = field(default_factory=lambda: ["planner"])  # agent=flow: modules to train
    train_roles: list[str] = field(default_factory=list)  # roles of an environment to train on; []: all
    opponents: list[str] = field(default_factory=list)  # roles that a past policy of the run plays: docs/agents.md
    opponent_options: dict[str, Any] = field(default_factory=dict)  # every, keep, draw: docs/agents.md
    template: str | None = None  # qwen2.5, qwen2.5-vl, none (plain text), or a Jinja file; null: the model's own
    environment: str | None = None  # of verifiers, gymnasium, openenv, harbor: an id, address or folder
    environment_options: dict[str, Any] = field(default_factory=dict)  # its options: docs/environments.md
    max_seconds: Seconds = 500.0  # timeout of an episode with its reward, without the time for sampling
    chromium: str | None = None  # agent=gui: the browser's program; null: chromium or google-chrome on the PATH
    browsers: Browsers = 2  # agent=gui: browsers that run at the same time
    pages_per_browser: Few = 16  # agent=gui: episodes that play in one browser at the same time; others wait
    keep_images: Images | None = None  # of a conversation, the model is shown the last n images only; null: all
    command: str | None = None  # agent=gateway: a program to start per episode; null: programs request attempts

    def __post_init__(self) -> None:
        check_ranges(self, "agent.")
        gui = self.name == "gui"
        _one_of("agent.format", self.format, ("auto", *(GUI_FORMATS if gui else ("hermes", "llama", "mistral"))))


@dataclass(frozen=True)
class GatewayConfig:
    port: Port = 9999  # port of agent=gateway and covey serve, on this machine only; 0: any free port
    max_programs: Few = 16  # programs of agent.command that run at the same time

    def __post_init__(self) -> None:
        check_ranges(self, "gateway.")


@dataclass(frozen=True)
class SandboxConfig:
    tier: str = "auto"  # bubblewrap | namespaces | limits; auto: the strongest that works on this machine
    allow_weak: bool = False  # run the model's code even if only resource limits, and no isolation, are available
    seconds: Seconds = 10.0  # timeout of one execution
    memory_mb: Megabytes = 512  # memory of one sandbox
    max_concurrent: Few = 16  # programs that run at the same time; others wait

    def __post_init__(self) -> None:
        check_ranges(self, "sandbox.")
        _one_of("sandbox.tier", self.tier, ("auto", "bubblewrap", "namespaces", "limits"))


@dataclass(frozen=True)
class RewardConfig:
    name: Any = "auto"  # a reward or a list of them, by name, module:function or file.py:function; auto: the task's own
    weights: dict[str, Weight] = field(default_factory=dict)  # by reward name; default 1; 0: measured, not trained on
    only_if: dict[str, str] = field(
        default_factory=dict
    )  # {short: exact}: short counts only if exact is over 0; {short: "exact>=0.5"}: with a threshold
    options: dict[str, Any] = field(default_factory=dict)  # settings per reward: {judge: {url: ..., model: ...}}
    seconds: Seconds = 30.0  # timeout for scoring one episode with one reward

    def __post_init__(self) -> None:
        check_ranges(self, "reward.")


@dataclass(frozen=True)
class RolloutConfig:
    name: str = "embedded"  # embedded: in this process, sharing the learner's weights; vllm; auto: by model size
    group_size: Attempts = 8  # attempts per task
    temperature: Temperature = 1.0  # softmax temperature of sampling; the learner uses the same
    top_p: PositiveShare = 1.0  # sample from the smallest set of tokens with this probability; 1: all
    top_k: TopK = 0  # sample from the k most likely tokens; 0: all
    min_p: ShareBelowOne = 0.0  # drop tokens less likely than this fraction of the most likely one
    max_tokens: Tokens = 256  # longest answer (of one turn), in tokens
    stop: list[StopText] = field(default_factory=list)  # strings that end an answer
    max_sequences: Sequences = 256  # sequences decoded together; bounds the memory of the key-value cache
    memory: PositiveShare = 0.5  # embedded: share of free GPU or CPU memory for the cache; vllm: share of the whole GPU
    eager: bool = False  # no captured graphs on a GPU: slower, starts faster
    tensor_parallel: TensorParallel = 1  # vllm: GPUs that share one copy of the model
    devices: list[DeviceNumber] | None = None  # vllm: its GPUs by number; null: the learner's own, and those after it
    sleep: bool = True  # vllm on the learner's GPU: frees its memory during updates

    def __post_init__(self) -> None:
        check_ranges(self, "rollout.")
        _one_of("rollout.name", self.name, ("embedded", "vllm", "auto"))


@dataclass(frozen=True)
class LearnerConfig:
    optimizer: str = "adamw"  # adamw | adamw8bit: moments in 8 bits, a quarter of the memory (extra quantization)
    lr: LearningRate = 1e-5  # learning rate after the warm-up
    schedule: str = "constant"  # constant | cosine | linear
    warmup_steps: Steps = 0  # optimiser steps of linear warm-up
    min_lr_ratio: Share = 0.0  # final learning rate of cosine and linear, as a fraction of lr
    weight_decay: WeightDecay = 0.0  # AdamW's decoupled weight decay
    beta1: ShareBelowOne = 0.9  # AdamW
    beta2: ShareBelowOne = 0.95  # AdamW
    eps: PositiveShare = 1e-8  # AdamW
    grad_clip: Cap = 1.0  # largest gradient norm; 0: no clipping
    epochs: Few = 1  # passes over each step's samples
    mini_batch_size: Episodes | None = None  # tasks (groups) per optimiser step; null: all of the step
    micro_batch_tokens: BatchTokens | None = None  # per forward pass; null: as many as fit; on a CPU at most 8192
    micro_batch_size: Episodes | None = None  # most episodes per forward pass; null: limited by tokens only
    entropy_coef: Weight = 0.0  # entropy bonus per token
    compile: bool | None = None  # fuse the small operations of a layer: slow start, faster steps; null: on a GPU
    offload_optimizer: bool = False  # keep optimiser state and float32 weights in CPU memory, and update there
    offload_reference: bool = False  # keep the reference model, and a teacher, in CPU memory while it is not used
    offload_weights: bool = False  # with vllm on the same GPU: keep the policy in CPU memory during sampling
    parallel: str = "auto"  # several learners: ddp, each has all weights; fsdp: weights and optimiser are sharded
    tensor_parallel: TensorParallel = 1  # learners that shard a layer's matrices, by transformers' plan; with fsdp
    replay_routing: bool = False  # mixture of experts: all updates of a step use the experts chosen at its start
    max_skipped: Many = 5  # stop after this many updates in a row with a non-finite loss or gradient

    def __post_init__(self) -> None:
        check_ranges(self, "learner.")
        _one_of("learner.optimizer", self.optimizer, ("adamw", "adamw8bit"))
        _one_of("learner.parallel", self.parallel, ("auto", "ddp", "fsdp"))
        _one_of("learner.schedule", self.schedule, ("constant", "cosine", "linear"))
        if self.replay_routing and self.compile:
            raise InputError("learner.compile cannot compile routers that replay\n  remove it or replay_routing")
        if self.tensor_parallel > 1 and self.parallel == "ddp":
            raise InputError(
                f"learner.tensor_parallel={self.tensor_parallel} splits weights; learner.parallel=ddp has them whole\n"
                "  use learner.parallel=fsdp, or auto"
            )


@dataclass(frozen=True)
class CriticConfig:
    shared: bool = False  # a head on the policy's backbone; false: a separate model
    model: str | None = None  # start model of a separate critic; null: the policy's
    lr: LearningRate = 1e-5  # learning rate of the critic; schedule and AdamW settings are the learner's
    grad_clip: Cap = 1.0  # largest gradient norm of the critic's backbone, and of its head; 0: no clipping
    clip: Cap | None = 0.5  # largest change of a value in one step; null: no clipping
    warmup_steps: Steps = 0  # steps in which only the critic is trained
    shared_coef: Coefficient = 0.1  # weight of the value loss's gradient in a shared backbone

    def __post_init__(self) -> None:
        check_ranges(self, "critic.")
        if self.shared and self.model is not None:
            raise InputError(
                "critic.shared=true uses the policy's backbone, so critic.model is unused\n  give one of them"
            )


@dataclass(frozen=True)
class TeacherConfig:
    name: str | None = None  # a model that scores the policy's tokens; with prompt_template also initial or current
    kl: str = "sampled"  # reverse KL: sampled: of sampled tokens, as advantage; full: over the vocabulary; top_k: url
    alone: bool = False  # learn from the teacher only: rewards are measured, not trained on
    coef: Coefficient = 1.0  # weight of the KL to the teacher, beside the rewards
    discount: Share = 0.0  # sampled: weight of later tokens' KL in a token's advantage; 1: the KL of the whole answer
    prompt_template: str | None = None  # the teacher's question, a text or a file: {question}, {answer}, {COLUMN}
    dtype: str = "auto"  # float32 | bfloat16 | float16; auto: bfloat16 on a GPU, float32 on a CPU
    url: str | None = None  # the teacher's OpenAI-compatible endpoint, http://HOST/v1 (vLLM); null: in this process
    api_key_env: str | None = None  # url: the environment variable that holds the key
    top_k: TeacherTokens = TEACHER_TOP_K  # url: the teacher's most likely tokens in kl=top_k

    def __post_init__(self) -> None:
        check_ranges(self, "teacher.")
        _one_of("teacher.kl", self.kl, ("sampled", "full", "top_k"))
        _one_of("teacher.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.discount and self.kl != "sampled":
            raise InputError(
                f"teacher.discount={self.discount:g} is for teacher.kl=sampled, whose KL is an advantage\n"
                f"  with teacher.kl={self.kl} leave it at 0"
            )
        if self.top_k != TEACHER_TOP_K and self.kl != "top_k":
            raise InputError(f"teacher.top_k={self.top_k} is for teacher.kl=top_k, and teacher.kl={self.kl}")
        if self.api_key_env is not None and self.url is None:
            raise InputError("teacher.api_key_env names the key of teacher.url, and there is no teacher.url")
        if self.kl == "top_k" and self.url is None:
            raise InputError("teacher.kl=top_k is for a teacher at an endpoint (teacher.url)\n  use teacher.kl=full")
        if self.kl == "full" and self.url is not None:
            raise InputError(
                "teacher.kl=full needs the teacher's whole distribution, which an endpoint does not send\n"
                "  use teacher.kl=top_k or sampled"
            )


@dataclass(frozen=True)
class LoopConfig:
    total_steps: TotalSteps | None = None  # steps to train; null: from total_epochs
    total_epochs: Many | None = None  # passes over the training tasks; if total_steps is null too: 1
    max_minutes: Minutes | None = None  # stop after this time, with a checkpoint; the same command continues
    save_every: Steps = 0  # write a checkpoint every n steps; 0: only at the end
    keep_last: Many = 2  # checkpoints kept besides the best
    keep_best: bool = True  # never delete the checkpoint with the best evaluation
    save_final: bool = True  # write a checkpoint at the end
    threads: Threads | None = None  # CPU threads (results depend on it in the last bits); null: OMP_NUM_THREADS or all

    def __post_init__(self) -> None:
        check_ranges(self, "loop.")


@dataclass(frozen=True)
class EvalConfig:
    every: Steps = 0  # evaluate every n steps; 0: only before and after
    before: bool = True  # evaluate before the first step
    after: bool = True  # evaluate after the last step
    modes: list[str] = field(default_factory=lambda: ["greedy"])  # greedy, sampled, or both
    n: Attempts = 1  # answers per task in the sampled mode
    temperature: AnyTemperature = 1.0  # temperature of the sampled mode
    top_p: PositiveShare = 1.0  # top_p of the sampled mode
    top_k: TopK = 0  # top_k of the sampled mode
    min_p: ShareBelowOne = 0.0  # min_p of the sampled mode
    max_tokens: Tokens | None = None  # longest answer; null: rollout.max_tokens
    batch_size: Tasks | None = None  # tasks evaluated together; null: all

    def __post_init__(self) -> None:
        check_ranges(self, "eval.")
        for mode in self.modes:
            _one_of("eval.modes", mode, ("greedy", "sampled"))


@dataclass(frozen=True)
class ClusterConfig:
    name: str = "local"  # local: one process; ray: learners and engines as actors, on one machine or many
    address: str | None = None  # ray: address of a running cluster; null: RAY_ADDRESS, or a cluster for this run
    nodes: Few = 1  # ray: machines that must have joined
    learner_devices: Devices = 1  # ray: learner processes, one per GPU (or on CPUs)
    rollout_devices: Devices | None = None  # ray: engines, one per GPU (or on CPUs); null: one on each learner's device
    transport: str = "auto"  # ray: weight transport: shared_memory | collective | file; auto: the best that works
    max_restarts: Restarts = 3  # ray: restarts from the last checkpoint after a learner was lost

    def __post_init__(self) -> None:
        check_ranges(self, "cluster.")
        _one_of("cluster.name", self.name, ("local", "ray"))
        _one_of("cluster.transport", self.transport, ("auto", "shared_memory", "collective", "file"))
        if self.name == "local" and (self.nodes, self.learner_devices, self.rollout_devices or 1) != (1, 1, 1):
            sizes = f"nodes={self.nodes}, learner_devices={self.learner_devices}, "
            raise InputError(
                f"cluster=local is one process on one device, but cluster has {sizes}"
                f"rollout_devices={'null' if self.rollout_devices is None else self.rollout_devices}\n"
                "  use cluster=ray, or leave these at their defaults"
            )


@dataclass(frozen=True)
class ModeConfig:
    name: str = "sync"  # sync: sample, then update, alternating; async: sampling continues during updates
    max_staleness: Staleness = 1  # async: updates that the policy of an answer may be behind; 0: alternating
    update: str = "in_flight"  # async: in_flight: weights change during answers; drain: answers are finished first
    publish_every: Uses = 1  # async: engines with their own weights (vllm, ray) get new ones every N updates
    max_uses: Uses = 1  # async: steps that may train on a group; over 1, each step reuses some earlier groups

    def __post_init__(self) -> None:
        check_ranges(self, "mode.")
        if self.name == "async" and self.max_staleness < (older := self.publish_every - 1 + self.max_uses - 1):
            raise InputError(
                f"mode.max_staleness={self.max_staleness} is too short for mode.publish_every={self.publish_every} and "
                f"mode.max_uses={self.max_uses}\n  both make samples older: mode.max_staleness must be at least {older}"
            )
        _one_of("mode.update", self.update, ("in_flight", "drain"))


@dataclass(frozen=True)
class LoggingConfig:
    project: str = "covey"  # with experiment: the name of the run, by which resume=auto finds it
    experiment: str = "run"  # see project
    to: list[str] = field(
        default_factory=lambda: ["console"]
    )  # loggers besides files: console, wandb, tensorboard, mlflow, trackio
    output_dir: str = "outputs"  # runs go to output_dir/DATE/TIME
    episodes_per_step: Written = 4  # attempts at one task written to episodes.jsonl each step
    verbosity: str = "info"  # debug | info | warning
    tags: list[str] = field(default_factory=list)  # labels of the run, e.g. [baseline,long]: covey dash, W&B, MLflow
    notes: str = ""  # the purpose of the run in your words: covey dash, W&B, MLflow

    def __post_init__(self) -> None:
        check_ranges(self, "logging.")
        check_tags(self.tags, "logging.tags")
        for place in self.to:
            _one_of("logging.to", place, ("console", "wandb", "tensorboard", "mlflow", "trackio"))
        _one_of("logging.verbosity", self.verbosity, ("debug", "info", "warning"))


LONGEST_TAG = 64  # characters, as in W&B


def check_tags(tags: Sequence[str], where: str) -> None:
    for tag in tags:
        if not tag.strip() or len(tag) > LONGEST_TAG or not tag.isprintable():
            raise InputError(f"{where}: {tag!r:.80} is not a tag: one line of 1 to {LONGEST_TAG} characters")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: Any = None  # the settings of the chosen algorithm
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mode: ModeConfig = field(default_factory=ModeConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    resume: str = "auto"  # auto: the newest unfinished run with these settings; disable; or a run or checkpoint
    seed: Seed = 0  # seed of data order, sampling and adapters

    def __post_init__(self) -> None:
        check_ranges(self, "")
