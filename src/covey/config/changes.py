"""Settings that differ between a run and its continuation, and what each difference means.

    free        results so far stay comparable: length, schedule, evaluation, logging, checkpoints, memory and speed
    training    what follows is trained differently: data, rewards, sampling, algorithm, optimiser
    fixed       the checkpoint has it already: the shape of an adapter

Whether weights, optimiser and critic of a checkpoint fit is found out from the checkpoint itself (cli/resume.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.config.schema import Config
from covey.config.settings import algorithm_settings, schema_settings
from covey.redact import MASK

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
