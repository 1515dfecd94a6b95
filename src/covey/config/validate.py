"""Values that are out of range or of the wrong type: all of them in one error, each under the name that the user typed.

The ranges themselves are stated beside the settings (`schema.py`, the parts in `covey.algorithms`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.config.read import Given, literal
from covey.config.schema import EPISODES_PER_STEP, Config
from covey.config.settings import Setting, algorithm_settings, find, schema_settings
from covey.errors import InputError
from covey.ranges import Allowed, refusal
from covey.redact import MASK

_BATCH, _GROUP = "data.train_batch_size", "rollout.group_size"


class WrongValues(InputError):
    """Values out of range or of the wrong type, each with its own text."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Checker:
    """`given` is what the user wrote, by native key; `parts` are the foreign settings that some native values were
    computed from (`derive.py`)."""

    settings: Mapping[str, Setting]
    given: Mapping[str, Given]
    parts: Mapping[str, Given]

    def wrong_type(self, key: str, given: Given) -> str:
        setting = find(key, self.settings)
        assert setting is not None
        if setting.allowed is None:
            value = f"{given.value!r:.200}"
            return f"{given.place}{given.key} must be {setting.type}, got {value}{_native(key, given)}"
        what = setting.allowed if key == setting.key else setting.allowed.entry
        return self._refusal(key, given, given.value, setting, what)

    def out_of_range(self, plain: Mapping[str, Any]) -> list[str]:
        """Errors about the values of a whole configuration."""
        wrong = [text for setting in self.settings.values() for text in self._out_of_range(setting, plain)]
        return wrong or list(self._too_many_episodes(plain))

    def _out_of_range(self, setting: Setting, plain: Mapping[str, Any]) -> Iterator[str]:
        what, key, value = setting.allowed, setting.key, _at(plain, setting.key)
        if what is None or value in what:
            return
        if not isinstance(value, Mapping):
            yield self._refusal(key, self.given.get(key), value, setting, what)
            return
        for name, item in value.items():
            if item not in what.entry:
                inner = f"{key}.{name}"
                yield self._refusal(inner, self.given.get(inner), item, setting, what.entry)

    def _refusal(self, key: str, given: Given | None, value: Any, setting: Setting, what: Allowed) -> str:
        name, note = key, ""
        if given is not None:
            typed = self._typed(given)
            if literal(typed.value) == literal(given.value):
                name, note = f"{given.place}{given.key}", _native(key, given)
            else:  # the value was computed from what the user typed
                name = f"{typed.place}{typed.key}={literal(typed.value)}: {key}"
        fix = f"the default is {literal(setting.default)}; more: covey config explain {setting.key}"
        return f"{refusal(name, value, what, note)}\n  {fix}"

    def _typed(self, given: Given) -> Given:
        """What the user typed where `given` was derived from it."""
        return next((part for part in self.parts.values() if part.key == given.key), given)

    def _too_many_episodes(self, plain: Mapping[str, Any]) -> Iterator[str]:
        tasks, attempts = _at(plain, _BATCH), _at(plain, _GROUP)
        if tasks * attempts > EPISODES_PER_STEP:
            names = [self._name(_BATCH, tasks), self._name(_GROUP, attempts)]
            made = f"make {tasks * attempts:,} episodes in one step, and {EPISODES_PER_STEP:,} are the most"
            yield f"{' and '.join(names)} {made}\n  lower one of them"

    def _name(self, key: str, value: Any) -> str:
        given = self.given.get(key)
        return str(self._typed(given)) if given is not None else f"{key}={literal(value)}"


def _native(key: str, given: Given) -> str:
    """The native name behind a foreign one. A section's own name stands for its `name`."""
    return "" if given.key in (key, key.removesuffix(".name")) else f"  (= {key})"


def _at(plain: Mapping[str, Any], key: str) -> Any:
    found: Any = plain
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


# -- Settings that differ between a run and its continuation, and what each difference means ---------------------------
# free        results so far stay comparable: length, schedule, evaluation, logging, checkpoints, memory and speed
# training    what follows is trained differently: data, rewards, sampling, algorithm, optimiser
# fixed       the checkpoint has it already: the shape of an adapter
#
# Whether weights, optimiser and critic of a checkpoint fit is found out from the checkpoint itself (app/resume.py).

Effect = Literal["free", "training", "fixed"]

# Sections end with a dot.
FREE = (
    *("loop.", "eval.", "logging.", "cluster.", "gateway.", "sandbox.max_concurrent", "validation tasks"),
    *("learner.lr", "learner.schedule", "learner.warmup_steps", "learner.min_lr_ratio", "critic.lr"),
    *("learner.micro_batch_tokens", "learner.micro_batch_size", "learner.compile", "learner.max_skipped"),
    *("learner.offload_optimizer", "learner.offload_reference", "learner.offload_weights", "learner.parallel"),
    *("learner.tensor_parallel", "rollout.max_sequences", "rollout.memory", "rollout.eager", "rollout.sleep"),
    *("rollout.tensor_parallel", "rollout.devices", "model.gradient_checkpointing", "model.trust_remote_code"),
    *("model.device", "model.dtype", "data.val_files", "data.val_size"),
)
CONTENTS = ("training tasks", "validation tasks", "rewards")  # known by their hashes
FIXED = ("model.lora.",)
# After a change of these, scores are not comparable with earlier ones.
SCORES = (
    *("eval.modes", "eval.n", "eval.temperature", "eval.top_p", "eval.top_k", "eval.max_tokens", "agent."),
    *("validation tasks", "rewards", "rollout.max_tokens", "rollout.stop"),
)
UNUSED_BY_SFT = ("rollout.", "algorithm.", "reward.", "critic.", "sandbox.", "mode.")  # it samples and scores nothing
UNSET = "(not set)"
LONGEST = 80  # characters of a value that are shown


@dataclass(frozen=True)
class Change:
    """A setting, or one of `CONTENTS`."""

    key: str
    old: Any
    new: Any

    @property
    def effect(self) -> Effect:
        return "fixed" if within(self.key, FIXED) else "free" if within(self.key, FREE) else "training"

    @property
    def values(self) -> str:
        if self.key in CONTENTS:
            return "other than before"
        return f"{_shown(self.old)} → {_shown(self.new)}"

    def __str__(self) -> str:
        return f"{self.key}: {self.values}"


def within(key: str, names: Collection[str]) -> bool:
    """Whether a setting is one of `names`, or of one of the sections among them."""
    return any(key.startswith(name) if name.endswith(".") else key == name for name in names)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> list[Change]:
    """Between two whole configurations as plain data, secrets hidden; `config` is the new one."""
    own = {config.algorithm.name: type(config.algorithm)}
    settings = schema_settings() | algorithm_settings(config.algorithm.name, own)
    defaults = {key: setting.default for key, setting in settings.items()}
    found = [change for change in _walk(old, new, "") if not _is_same(change, defaults)]
    if any(change.key in ("algorithm.name", "algorithm.loss") for change in found):
        # Each has settings that the other one does not know.
        found = [c for c in found if not (c.key.startswith("algorithm.") and UNSET in (c.old, c.new))]
    return [change for change in found if change.key != "resume"]


def _walk(old: Any, new: Any, key: str) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            yield from _walk(old.get(name, UNSET), new.get(name, UNSET), f"{key}.{name}" if key else str(name))
    elif _text(old) != _text(new):
        yield Change(key, old, new)


def _is_same(change: Change, defaults: Mapping[str, Any]) -> bool:
    """A secret that one of them hides; or a setting that Covey did not have when the run began, at its default."""
    if any(MASK in _text(value) for value in (change.old, change.new)):
        return True
    return change.old == UNSET and change.key in defaults and _text(defaults[change.key]) == _text(change.new)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else _text(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
