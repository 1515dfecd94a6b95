"""Unsupported options, and native values that are derived from several foreign settings or from other units.

TorchRL counts dialog turns (one per episode here), TRL counts completions; Covey counts groups of `rollout.group_size`
episodes, which are never split. `train.optim_batch_size`, the turns per optimiser step, becomes
`learner.mini_batch_size`; its parts of `1/gradient_accumulation_steps` become `learner.micro_batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from covey.config.read import Override, literal
from covey.errors import InputError, unknown

Test = Callable[[Any], bool]


def number(value: Any) -> float:
    """A value as a number, also if YAML quoted it; 0 if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def true(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "yes", "on", "1")


def off(value: Any) -> bool:
    """Whether a value means off, in any spelling of YAML and the command line."""
    try:
        return float(value) == 0
    except (TypeError, ValueError):
        return value is None or str(value).strip().lower() in ("", "none", "null", "false", "no", "off")


def over(bound: float) -> Test:
    return lambda value: number(value) > bound


def is_(*names: str) -> Test:
    return lambda value: str(value).lower() in names


def is_not(*names: str) -> Test:
    return lambda value: value is not None and str(value).lower() not in names


@dataclass(frozen=True)
class Unsupported:
    """An option that Covey does not support. Values that mean "off" are accepted."""

    key: str  # as `aliases.translate` returns it
    when: Test
    feature: str
    instead: str


_ONE = "leave it at 1"

UNSUPPORTED = (
    # Agents
    Unsupported(
        "agent.opponent",
        is_not("none", "null"),
        "an opponent by name",
        "agent.opponents=[ROLE] lets past policies of the run play a role",
    ),
    Unsupported(
        "ref_model_mixup_alpha",
        lambda value: number(value) != 1,
        "mixing the policy into the reference",
        "set it to 1: the policy replaces the reference",
    ),
    Unsupported(
        "env.reasoning",
        true,
        "the reasoning prompt",
        "data.system_prompt='…' asks for reasoning; another turn after a wrong answer: docs/environments.md",
    ),
    # Where and when things run
    Unsupported("rollout.name", is_("sglang", "hf"), "other engines", "use rollout=embedded or rollout=vllm"),
    Unsupported("cluster.name", is_("slurm"), "submitting Slurm jobs", "write a job script: covey slurm"),
    Unsupported("actor.ulysses_sequence_parallel_size", over(1), "sequence parallelism", _ONE),
    Unsupported("train_model.quantization.enabled", true, "quantised training", "set it to false"),
    Unsupported("optimizer.name", is_not("adamw", "adam"), "other optimisers", "use AdamW"),
)

UNSUPPORTED_KEYS = frozenset(row.key for row in UNSUPPORTED)


def find_unsupported(slots: Mapping[str, Override]) -> dict[str, str]:
    """Slot → error, for all unsupported options in use."""
    return {
        key: f"not supported yet: {row.feature}  ({override.label}={_short(override.value)})\n  {row.instead}"
        for key, override in slots.items()
        for row in UNSUPPORTED
        if row.key == key and row.when(override.value)
    }


def _short(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- Derived values ----------------------------------------------------------------------------------------------------

_KL, _KL_COEF, _KL_TYPE = "actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"
_CLIP = "actor.clip_ratio"
_KL_REWARD, _KL_PENALTY, _KL_PLACE = "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "train.kl_coef_in_loss"
_CTRL, _CTRL_COEF = "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef"
_CTRL_TARGET, _CTRL_HORIZON = "algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"
_OVERLONG, _OVERLONG_LEN = "reward_model.overlong_buffer.enable", "reward_model.overlong_buffer.len"
_LORA, _LORA_RANK = "train_model.lora.enabled", "train_model.lora.r"
_SYNC_REF, _SYNC_REF_STEPS = "sync_ref_model", "ref_model_sync_steps"
_RESPONSE, _PER_TURN = "rollout.response_length", "agent.max_tokens_per_turn"
_RESUME, _RESUME_PATH = "trainer.resume_mode", "trainer.resume_from_path"
_USE_AGENT = "agent.use_agent"
_SAVE_FREQ, _TEST_FREQ = "trainer.save_freq", "trainer.test_freq"
_BATCH, _OPTIM = "train.dialog_turns_per_batch", "train.optim_batch_size"
_PIECES, _TOTAL = "train.gradient_accumulation_steps", "train.total_dialog_turns"
_SYNC, _SYNC_ITER, _PUSHES = "train.sync", "train.sync_iter", "train.weight_update_frequency"
_DATASET = "env.dataset"
_NODES, _PER_NODE = "trainer.nnodes", "trainer.n_gpus_per_node"
_DEVICE_BATCH, _ACCUMULATED, _SCALE = "per_device_train_batch_size", "gradient_accumulation_steps", "scale_rewards"
_LEARNERS, _ENGINES = "train_model.num_devices", "inference_model.num_devices"

ONE_LIST = {"ifeval": 100}  # data sets without a validation split → the number of tasks that are held out

# Foreign key → the native settings derived from it, and how.
PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    _RESUME: (("resume",), "auto, disable, or resume_path for trainer.resume_from_path"),
    _RESUME_PATH: (("resume",), "used by trainer.resume_mode=resume_path"),
    _USE_AGENT: (("agent.name", "agent.tools"), "false: agent=chat, without tools"),
    _SAVE_FREQ: (("loop.save_every", "loop.save_final"), "-1: never, also not at the end"),
    _TEST_FREQ: (("eval.every", "eval.after"), "-1: never, also not at the end"),
    _KL: (("algorithm.kl_coef",), "false sets it to 0"),
    _KL_COEF: (("algorithm.kl_coef",), "only with use_kl_loss=true"),
    _KL_TYPE: (("algorithm.kl_estimator",), "only for a KL in the loss, not with use_kl_in_reward=true"),
    _KL_REWARD: (("algorithm.kl_in", "algorithm.kl_coef"), "true puts the KL into the reward, weighted by kl_ctrl"),
    _KL_PENALTY: (("algorithm.kl_estimator",), "only with use_kl_in_reward=true"),
    _KL_PLACE: (("algorithm.kl_in",), "false puts the KL into the reward"),
    _CTRL: (("algorithm.kl_target",), "adaptive controls kl_coef towards kl_ctrl.target_kl"),
    _CTRL_COEF: (("algorithm.kl_coef",), "only with use_kl_in_reward=true"),
    _CTRL_TARGET: (("algorithm.kl_target",), "only with kl_ctrl.type=adaptive and use_kl_in_reward=true"),
    _CTRL_HORIZON: (("algorithm.kl_horizon",), "only with kl_ctrl.type=adaptive and use_kl_in_reward=true"),
    _SYNC_REF: (("algorithm.reference_every", "algorithm.reference"), "true: 512 without ref_model_sync_steps"),
    _SYNC_REF_STEPS: (("algorithm.reference_every",), "only with sync_ref_model=true"),
    _OVERLONG: (("algorithm.overlong_buffer",), "false sets it to 0"),
    _OVERLONG_LEN: (("algorithm.overlong_buffer",), "only with overlong_buffer.enable=true"),
    _CLIP: (("algorithm.clip_low", "algorithm.clip_high"), "unless clip_ratio_low or clip_ratio_high is set"),
    _RESPONSE: (("rollout.max_tokens", "agent.max_response_tokens"), "the latter with agent.max_tokens_per_turn"),
    _PER_TURN: (("rollout.max_tokens",), "the longest reply of one turn"),
    _LORA: (("model.lora.rank",), "false sets it to 0"),
    _LORA_RANK: (("model.lora.rank",), "unless train_model.lora.enabled=false"),
    _BATCH: (("data.train_batch_size",), "turns / rollout.group_size"),
    _OPTIM: (("learner.mini_batch_size",), "turns / rollout.group_size"),
    _PIECES: (("learner.micro_batch_size",), "episodes per optimiser step / gradient_accumulation_steps"),
    _TOTAL: (("loop.total_steps",), "turns / episodes per step"),
    _DEVICE_BATCH: (("data.train_batch_size",), "completions: times gradient_accumulation_steps / rollout.group_size"),
    _ACCUMULATED: (("data.train_batch_size",), "times per_device_train_batch_size (8) / rollout.group_size"),
    _SCALE: (("algorithm.std_normalize", "algorithm.std_over"), "group, batch or none"),
    _NODES: (("cluster.nodes", "cluster.learner_devices", "cluster.name"), "over 1: cluster=ray"),
    _PER_NODE: (("cluster.learner_devices", "cluster.name"), "times trainer.nnodes; over 1: cluster=ray"),
    _LEARNERS: (("cluster.learner_devices", "cluster.name"), "over 1: cluster=ray"),
    _ENGINES: (("cluster.rollout_devices", "cluster.name"), "if one of these is over 1: cluster=ray"),
    _SYNC: (("mode.name",), "false: async"),
    _SYNC_ITER: (("mode.name", "mode.max_staleness"), "false: async, at most one update behind, also with mode=sync"),
    _DATASET: (("data.name", "data.options"), "for ifeval, 100 prompts are held out for evaluation"),
    _PUSHES: (("mode.publish_every", "mode.max_staleness"), "the latter at least one less, unless it is set"),
}


class NotACount(InputError):
    """A foreign setting that must be a whole number from 1."""


@dataclass(frozen=True)
class Derived:
    """A native value and the settings that it is derived from."""

    key: str
    value: Any
    sources: tuple[Override, ...]
    weak: bool = False  # overridden by the same setting written out
    strong: bool = False  # overrides the same setting written out in the same layer
    remark: str = ""  # a warning for the user

    @property
    def layer(self) -> int:
        return max(override.layer for override in self.sources)

    @property
    def order(self) -> int:
        return max(override.order for override in self.sources if override.layer == self.layer)


Parts = Mapping[str, Override]
Rule = Callable[[Parts, DictConfig], Iterator[Derived]]


def rules() -> tuple[Rule, ...]:
    """The rules in the order in which they use each other's results."""
    in_groups = (_train_batch, _device_batch, _mini_batch, _micro_batch, _total_steps)
    about_kl = (_kl_loss, _kl_type, _kl_reward, _kl_place, _sync_reference)
    first = (_dataset, _mode, _agent, _frequencies, _resume, _devices)
    return (*first, *about_kl, _scale, _overlong, _lengths, _lora, _clip_ratio, *in_groups)


def remarks(parts: Parts) -> Iterator[str]:
    """Warnings about parts without effect because of the switch that belongs to them."""
    if _KL_COEF in parts and _KL not in parts:  # verl's KL loss is off by default
        coef = parts[_KL_COEF].key
        yield f"{coef} has no effect without {coef.replace('kl_loss_coef', 'use_kl_loss')}=true"
    if _SYNC_REF_STEPS in parts and _SYNC_REF not in parts:
        yield f"{_SYNC_REF_STEPS} has no effect without {_SYNC_REF}=true"
    if _OVERLONG_LEN in parts and _OVERLONG not in parts:
        length = parts[_OVERLONG_LEN].key
        yield f"{length} has no effect without {length.removesuffix('len')}enable=true"
    if _CTRL_COEF in parts and not _on(parts, _KL_REWARD):
        yield f"{parts[_CTRL_COEF].key} has no effect without {_KL_REWARD}=true"
    control = parts.get(_CTRL)
    if control is not None and control.value == "adaptive" and not _on(parts, _KL_REWARD):
        yield f"{control} has no effect without {_KL_REWARD}=true"
    mode = parts.get(_RESUME)
    if _RESUME_PATH in parts and parts[_RESUME_PATH].value and mode is not None and mode.value != "resume_path":
        yield f"{parts[_RESUME_PATH].key} has no effect with {mode}"


def _on(parts: Parts, switch: str) -> bool:
    return switch in parts and true(parts[switch].value)


def _dataset(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """TorchRL also trains on data sets without a validation split."""
    if override := parts.get(_DATASET):
        yield Derived("data.name", override.value, (override,))
        if override.value in ONE_LIST:
            yield Derived("data.options.held_out", ONE_LIST[override.value], (override,), weak=True)


def _mode(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    for name in (_SYNC, _SYNC_ITER):
        if (override := parts.get(name)) is not None and not true(override.value):
            # TorchRL's mode=sync selects the script; with sync_iter=False that script also samples while it learns.
            yield Derived("mode.name", "async", (override,), strong=name == _SYNC_ITER)
            if name == _SYNC_ITER:
                yield Derived("mode.max_staleness", 1, (override,), weak=True)
    if (pushes := parts.get(_PUSHES)) is not None:
        yield Derived("mode.publish_every", _count(pushes), (pushes,))
        yield Derived("mode.max_staleness", max(1, _count(pushes) - 1), (pushes,), weak=True)


def _agent(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """AgentFly's switch is stronger than an agent and tools beside it."""
    if (switch := parts.get(_USE_AGENT)) is not None and off(switch.value):
        yield Derived("agent.name", "chat", (switch,), strong=True)
        yield Derived("agent.tools", [], (switch,), strong=True)


def _frequencies(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """verl saves and validates after the last step too, unless the frequency is −1 or 0."""
    for name, every, last in (
        (_SAVE_FREQ, "loop.save_every", "loop.save_final"),
        (_TEST_FREQ, "eval.every", "eval.after"),
    ):
        if (override := parts.get(name)) is not None:
            yield Derived(every, override.value, (override,))
            if off(override.value):
                yield Derived(last, False, (override,), weak=True)


def _devices(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """One device is cluster=local, where engine and learner share it; more are cluster=ray."""
    sizes = {name: parts[name] for name in (_NODES, _PER_NODE, _LEARNERS, _ENGINES) if name in parts}
    count = {name: _count(part) for name, part in sizes.items()}
    if max(count.values(), default=1) == 1:
        return
    yield Derived("cluster.name", "ray", tuple(sizes.values()), weak=True)
    if _PER_NODE in sizes:
        machines = tuple(sizes[name] for name in (_NODES, _PER_NODE) if name in sizes)
        yield Derived("cluster.learner_devices", count[_PER_NODE] * count.get(_NODES, 1), machines)
    keys = {_NODES: "cluster.nodes", _LEARNERS: "cluster.learner_devices", _ENGINES: "cluster.rollout_devices"}
    for name, key in keys.items():
        if name in sizes:
            yield Derived(key, count[name], (sizes[name],))


def _resume(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    mode, path = parts.get(_RESUME), parts.get(_RESUME_PATH)
    if mode is None and path is not None and path.value:
        yield Derived("resume", str(path.value), (path,))
    elif mode is not None and mode.value == "resume_path":
        if path is None or not path.value:
            raise InputError(f"{mode.label}=resume_path needs a path\n  add {_RESUME_PATH}=FOLDER")
        yield Derived("resume", str(path.value), (mode, path))
    elif mode is not None:
        if mode.value not in ("auto", "disable"):
            raise unknown(f"value of {mode.key}", str(mode.value), ("auto", "disable", "resume_path"))
        yield Derived("resume", mode.value, (mode,))


def _switched(
    parts: Parts, switch_key: str, value_key: str, target: str, present: Any, default: float
) -> Iterator[Derived]:
    """A switch and its number: off is 0; on without a number keeps the present value or takes the default."""
    switch, value = parts.get(switch_key), parts.get(value_key)
    if switch is None:
        return  # see `remarks`
    if not true(switch.value):
        yield Derived(target, 0, (switch,))
    elif value is None:
        yield Derived(target, present or default, (switch,))
    else:
        yield Derived(target, value.value, (switch, value))


def _kl_loss(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    present = tree.algorithm.kl_coef if "kl_coef" in tree.algorithm else None
    yield from _switched(parts, _KL, _KL_COEF, "algorithm.kl_coef", present, 0.001)


def _kl_type(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """verl's default file sets the type even if the KL is in the reward."""
    kind = parts.get(_KL_TYPE)
    if kind is not None and (_on(parts, _KL) or not _on(parts, _KL_REWARD)):
        yield Derived("algorithm.kl_estimator", kind.value, (kind,))


def _kl_reward(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """verl's KL in the reward has its own switch, coefficient, estimator and controller."""
    if not _on(parts, _KL_REWARD):
        return
    switch = parts[_KL_REWARD]
    if _on(parts, _KL):
        raise InputError(f"{switch} and {parts[_KL]}\n  the KL is in the reward or in the loss: give one of them")
    coef, penalty, control = parts.get(_CTRL_COEF), parts.get(_KL_PENALTY), parts.get(_CTRL)
    yield Derived("algorithm.kl_in", "reward", (switch,))
    yield Derived("algorithm.kl_coef", coef.value if coef else 0.001, (switch, coef) if coef else (switch,))
    if penalty is not None:
        yield Derived("algorithm.kl_estimator", penalty.value, (switch, penalty))
    if control is None or control.value != "adaptive":
        return
    target, horizon = parts.get(_CTRL_TARGET), parts.get(_CTRL_HORIZON)
    yield Derived("algorithm.kl_target", target.value if target else 0.1, (control, target) if target else (control,))
    if horizon is not None:
        yield Derived("algorithm.kl_horizon", horizon.value, (control, horizon))


def _kl_place(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    place = parts.get(_KL_PLACE)
    if place is not None and ("kl_in" in tree.algorithm or not true(place.value)):
        yield Derived("algorithm.kl_in", "loss" if true(place.value) else "reward", (place,))


def _sync_reference(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """TRL mixes the policy into the reference; here it replaces it. GVPO's anchor has a name of its own."""
    anchored, on = "reference" in tree.algorithm, _on(parts, _SYNC_REF)
    if anchored and on:
        yield Derived("algorithm.reference", "moving", (parts[_SYNC_REF],))
    if on or not anchored:
        yield from _switched(parts, _SYNC_REF, _SYNC_REF_STEPS, "algorithm.reference_every", 512, 512)


def _overlong(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    present = tree.algorithm.overlong_buffer if "overlong_buffer" in tree.algorithm else None
    yield from _switched(parts, _OVERLONG, _OVERLONG_LEN, "algorithm.overlong_buffer", present, 0.2)


def _lengths(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """If turns have a limit of their own, the response length is that of the whole episode."""
    response, turn = parts.get(_RESPONSE), parts.get(_PER_TURN)
    if longest := turn or response:
        yield Derived("rollout.max_tokens", longest.value, (longest,))
    if turn is not None and response is not None:
        yield Derived("agent.max_response_tokens", response.value, (response,))


def _lora(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if _LORA_RANK in parts and _LORA not in parts:  # TorchRL's adapters are on by default
        yield Derived("model.lora.rank", parts[_LORA_RANK].value, (parts[_LORA_RANK],))
    yield from _switched(parts, _LORA, _LORA_RANK, "model.lora.rank", tree.model.lora.rank, 8)


def _clip_ratio(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if ratio := parts.get(_CLIP):
        for side in ("low", "high"):
            yield Derived(f"algorithm.clip_{side}", ratio.value, (ratio,), weak=True)


def _train_batch(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if turns := parts.get(_BATCH):
        yield _in_groups("data.train_batch_size", turns, tree.rollout.group_size)


def _device_batch(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    """TRL counts completions per forward pass, and forward passes per optimiser step."""
    sources = [parts[name] for name in (_DEVICE_BATCH, _ACCUMULATED) if name in parts]
    if not sources:
        return
    per_device = _count(parts[_DEVICE_BATCH]) if _DEVICE_BATCH in parts else 8
    completions = per_device * (_count(parts[_ACCUMULATED]) if _ACCUMULATED in parts else 1)
    group = max(1, tree.rollout.group_size)
    prompts, remark = _ceil(completions, group), ""
    if prompts * group != completions:
        words = " and ".join(map(str, sources))
        remark = f"{words}: {completions} completions are not whole groups of {group}: data.train_batch_size={prompts}"
    yield Derived("data.train_batch_size", prompts, tuple(sources), remark=remark)


def _scale(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    scale = parts.get(_SCALE)
    if scale is None:
        return
    chosen = "none" if off(scale.value) else "group" if true(scale.value) else str(scale.value)
    if chosen not in ("group", "batch", "none"):
        raise unknown(f"value of {scale.key}", chosen, ("group", "batch", "none"))
    yield Derived("algorithm.std_normalize", chosen != "none", (scale,))
    if chosen != "none":
        yield Derived("algorithm.std_over", chosen, (scale,))


def _mini_batch(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if turns := parts.get(_OPTIM):
        yield _in_groups("learner.mini_batch_size", turns, tree.rollout.group_size)


def _micro_batch(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if pieces := parts.get(_PIECES):
        groups = tree.learner.mini_batch_size or tree.data.train_batch_size
        yield Derived("learner.micro_batch_size", _ceil(groups * tree.rollout.group_size, _count(pieces)), (pieces,))


def _total_steps(parts: Parts, tree: DictConfig) -> Iterator[Derived]:
    if turns := parts.get(_TOTAL):
        episodes = max(1, tree.data.train_batch_size * tree.rollout.group_size)
        yield Derived("loop.total_steps", _ceil(_count(turns), episodes), (turns,))


def _in_groups(key: str, turns: Override, group_size: int) -> Derived:
    count, group_size = _count(turns), max(1, group_size)  # the schema reports a wrong group size
    groups, remark = _ceil(count, group_size), ""
    if groups * group_size != count:
        remark = f"{turns.key}={count} is not a whole number of groups of {group_size}: {key} is {groups}"
    return Derived(key, groups, (turns,), remark=remark)


def _count(override: Override) -> int:
    count = number(override.value)
    if not count >= 1 or not count.is_integer():
        raise NotACount(f"{override.label} must be a whole number from 1, got {literal(override.value)}")
    return int(count)


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
