"""Validates settings, and compares those of a run with those of its continuation.

All values that are out of range or of the wrong type are reported in one error, under the names that the user typed.
The ranges are annotations of the settings (`schema.py`, `covey.algorithms`).

A setting that differs between a run and its continuation has one of three effects:

    free        results stay comparable: length, schedule, evaluation, logging, checkpoints, memory and speed
    training    training changes: data, rewards, sampling, algorithm, optimiser
    fixed       the checkpoint determines it: the shape of an adapter

Whether a checkpoint's weights, optimiser and critic fit is checked with the checkpoint itself (app/resume.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.config.read import Override, literal
from covey.config.schema import EPISODES_PER_STEP, Config
from covey.config.settings import Setting, algorithm_settings, find, schema_settings
from covey.errors import InputError
from covey.ranges import Allowed, range_error
from covey.redact import MASK

_BATCH, _GROUP = "data.train_batch_size", "rollout.group_size"


class WrongValues(InputError):
    """Values out of range or of the wrong type, each with its own text."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Checker:
    """`overrides` are the user's settings by native key, `parts` the foreign settings that native values are derived
    from (`derive.py`)."""

    settings: Mapping[str, Setting]
    overrides: Mapping[str, Override]
    parts: Mapping[str, Override]

    def wrong_type(self, key: str, override: Override) -> str:
        setting = find(key, self.settings)
        assert setting is not None
        if setting.allowed is None:
            value = f"{override.value!r:.200}"
            return f"{override.label} must be {setting.type}, got {value}{_native(key, override)}"
        allowed = setting.allowed if key == setting.key else setting.allowed.entry
        return self._range_error(key, override, override.value, setting, allowed)

    def out_of_range(self, plain: Mapping[str, Any]) -> list[str]:
        """Errors about values of the whole configuration."""
        wrong = [text for setting in self.settings.values() for text in self._out_of_range(setting, plain)]
        return wrong or list(self._too_many_episodes(plain))

    def _out_of_range(self, setting: Setting, plain: Mapping[str, Any]) -> Iterator[str]:
        allowed, key, value = setting.allowed, setting.key, value_at(plain, setting.key)
        if allowed is None or value in allowed:
            return
        if not isinstance(value, Mapping):
            yield self._range_error(key, self.overrides.get(key), value, setting, allowed)
            return
        for name, item in value.items():
            if item not in allowed.entry:
                inner = f"{key}.{name}"
                yield self._range_error(inner, self.overrides.get(inner), item, setting, allowed.entry)

    def _range_error(self, key: str, override: Override | None, value: Any, setting: Setting, allowed: Allowed) -> str:
        name, note = key, ""
        if override is not None:
            typed = self._typed(override)
            if literal(typed.value) == literal(override.value):
                name, note = override.label, _native(key, override)
            else:  # derived from the typed value
                name = f"{typed.label}={literal(typed.value)}: {key}"
        fix = f"the default is {literal(setting.default)}; more: covey config explain {setting.key}"
        return f"{range_error(name, value, allowed, note)}\n  {fix}"

    def _typed(self, override: Override) -> Override:
        """The setting that the user typed, if `override` was derived from one."""
        return next((part for part in self.parts.values() if part.key == override.key), override)

    def _too_many_episodes(self, plain: Mapping[str, Any]) -> Iterator[str]:
        tasks, attempts = value_at(plain, _BATCH), value_at(plain, _GROUP)
        if tasks * attempts > EPISODES_PER_STEP:
            names = [self._name(_BATCH, tasks), self._name(_GROUP, attempts)]
            total = f"make {tasks * attempts:,} episodes in one step, and the maximum is {EPISODES_PER_STEP:,}"
            yield f"{' and '.join(names)} {total}\n  lower one of them"

    def _name(self, key: str, value: Any) -> str:
        override = self.overrides.get(key)
        return str(self._typed(override)) if override is not None else f"{key}={literal(value)}"


def _native(key: str, override: Override) -> str:
    """A note with the native name of a foreign one."""
    return "" if override.key in (key, key.removesuffix(".name")) else f"  (= {key})"


def value_at(plain: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    value: Any = plain
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# -- Changes between a run and its continuation ------------------------------------------------------------------------

Effect = Literal["free", "training", "fixed"]

# A name that ends with a dot is a section.
FREE = (
    *("loop.", "eval.", "logging.", "cluster.", "gateway.", "sandbox.max_concurrent", "validation tasks"),
    *("agent.chromium", "agent.browsers", "agent.pages_per_browser"),
    *("learner.lr", "learner.schedule", "learner.warmup_steps", "learner.min_lr_ratio", "critic.lr"),
    *("learner.micro_batch_tokens", "learner.micro_batch_size", "learner.compile", "learner.max_skipped"),
    *("learner.offload_optimizer", "learner.offload_reference", "learner.offload_weights", "learner.parallel"),
    *("learner.tensor_parallel", "rollout.max_sequences", "rollout.memory", "rollout.eager", "rollout.sleep"),
    *("rollout.tensor_parallel", "rollout.devices", "model.gradient_checkpointing", "model.trust_remote_code"),
    *("model.device", "model.dtype", "data.val_files", "data.val_size", "teacher.url", "teacher.api_key_env"),
)
CONTENTS = ("training tasks", "validation tasks", "rewards")  # compared by their hashes
FIXED = ("model.lora.",)
# After a change of these, scores are not comparable with earlier ones.
SCORE_KEYS = (
    *("eval.modes", "eval.n", "eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p", "eval.max_tokens"),
    *("agent.", "validation tasks", "rewards", "rollout.max_tokens", "rollout.stop"),
)
UNUSED_BY_SFT = (  # SFT samples and scores nothing
    *("rollout.", "algorithm.", "reward.", "critic.", "teacher.", "sandbox.", "mode."),
    *("data.sampler.", "data.sampler_options."),
)
UNSET = "(not set)"
LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class Change:
    """A changed setting, or a change of one of `CONTENTS`."""

    key: str
    old: Any
    new: Any

    @property
    def effect(self) -> Effect:
        return "fixed" if matches(self.key, FIXED) else "free" if matches(self.key, FREE) else "training"

    @property
    def values(self) -> str:
        if self.key in CONTENTS:
            return "changed"
        return f"{_shorten(self.old)} → {_shorten(self.new)}"

    def __str__(self) -> str:
        return f"{self.key}: {self.values}"


def matches(key: str, names: Collection[str]) -> bool:
    """Whether a setting is one of `names`, or in one of the sections among them."""
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> list[Change]:
    """The changes between two whole configurations as plain data with hidden secrets. `config` is the new one."""
    schemas = {config.algorithm.name: type(config.algorithm)}
    settings = schema_settings() | algorithm_settings(config.algorithm.name, schemas)
    defaults = {key: setting.default for key, setting in settings.items()}
    changes = [change for change in _diff(old, new, "") if not _is_same(change, defaults)]
    if any(change.key in ("algorithm.name", "algorithm.loss") for change in changes):
        # Settings that only one of the two algorithms has are not changes.
        changes = [c for c in changes if not (c.key.startswith("algorithm.") and UNSET in (c.old, c.new))]
    return [change for change in changes if change.key != "resume"]


def _diff(old: Any, new: Any, key: str) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            yield from _diff(old.get(name, UNSET), new.get(name, UNSET), f"{key}.{name}" if key else str(name))
    elif _text(old) != _text(new):
        yield Change(key, old, new)


def _is_same(change: Change, defaults: Mapping[str, Any]) -> bool:
    """True for a hidden secret, and for a setting newer than the run that has its default."""
    if any(MASK in _text(value) for value in (change.old, change.new)):
        return True
    return change.old == UNSET and change.key in defaults and _text(defaults[change.key]) == _text(change.new)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else _text(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
