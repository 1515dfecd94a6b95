"""The configuration of a run from a parsed command line, and the recipe that a command without one implies.

Some commands are written for the scripts of other projects. Their settings imply a recipe, so that `covey train`
trains what the script would have trained:

    TorchRL's GRPO scripts      mode=sync, optimizer.lr, train.epochs, ...      grpo_gsm8k
    the GVPO guide's script     no task named, data files in data/train         gvpo_math on these files

A command that names a task or another algorithm starts from the defaults.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.algorithms import algorithm_schemas, schema
from covey.app.resume import checkpoint_folder, run_of
from covey.config import Composed, compose, literal, read_yaml
from covey.config.read import export
from covey.errors import InputError
from covey.tasks import data_folder

CONFIG = "config.yaml"  # in a run's folder and in its checkpoints
RESUME_KEYS = ("resume", "resume_from_checkpoint", "trainer.resume_mode", "trainer.resume_from_path")
TORCHRL = ("env.", "inference_model.", "optimizer.", "policy.", "ref_model.", "train.", "train_model.")
VERL = ("actor_rollout_ref.", "algorithm.adv_estimator", "algorithm.gvpo_", "critic.", "trainer.")
TASK = ("data", "data.name", "data.train_files", "data.val_files")
ALGORITHM = ("algorithm", "algorithm.name", "algorithm.adv_estimator")
SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")


@dataclass
class CommandLine:
    """A parsed command line. Settings and flags may come in any order."""

    settings: list[str] = field(default_factory=list)  # key=value
    positional: list[str] = field(default_factory=list)
    flags: dict[str, str | bool] = field(default_factory=dict)

    def value(self, flag: str) -> str | None:
        value = self.flags.get(flag)
        return value if isinstance(value, str) else None

    def has(self, flag: str) -> bool:
        return bool(self.flags.get(flag))

    def one(self, what: str, usage: str) -> str:
        """The only positional argument."""
        if len(self.positional) != 1:
            raise InputError(f"name one {what}\n\n{usage.rstrip()}")
        return self.positional[0]

    def integer(self, flag: str, default: int, *, least: int = 1) -> int:
        text = self.value(flag)
        return default if text is None else whole_number(flag, text, least=least)

    def number(self, flag: str, default: float) -> float:
        text = self.value(flag)
        try:
            number = default if text is None else float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{flag} wants a number, got {text!r}")
        return number

    def names(self, flag: str) -> tuple[str, ...]:
        """A comma-separated value, each name once."""
        parts = (part.strip() for part in (self.value(flag) or "").split(","))
        return tuple(dict.fromkeys(filter(None, parts)))


def whole_number(flag: str, text: str, *, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{flag} wants a whole number, at least {least}, got {text!r}")
    return int(text)


def compose_command(
    args: CommandLine,
    *,
    settings: Sequence[str] | None = None,
    config_path: Path | None = None,
    training: bool = False,
) -> Composed:
    """The configuration of a command line; exports the variables that its file sets.

    `settings` and `config_path` replace those of the command line. With --validate-only or --dry-run, missing features
    are warnings. With `training`, the settings may imply a recipe. resume=RUN starts from the settings of that run,
    unless a file or a recipe is named.
    """
    path = config_path or args.value("--config")
    name = args.value("--config-name")
    if path and name:
        raise InputError("--config and --config-name contradict each other: give a file or a recipe")
    path = Path(path).expanduser() if path is not None else None
    settings = args.settings if settings is None else settings
    if path is None and name is None:
        path = _config_of_resumed_run(settings)
    implied = implied_recipe(settings, path) if training and name is None else ImpliedRecipe()
    composed = compose(
        [*_from_environment(), *implied.settings, *settings],
        algorithms=algorithm_schemas(),
        own_algorithm=schema,
        config_name=name or implied.recipe,
        config_path=path,
        tolerant=(args.has("--validate-only") or args.has("--dry-run")) and not args.has("--strict"),
    )
    export(composed.env)
    return replace(composed, warnings=(implied.note, *composed.warnings)) if implied.note else composed


def _config_of_resumed_run(settings: Sequence[str]) -> Path | None:
    """config.yaml of the run or checkpoint that the settings resume, if it exists."""
    resuming = [word for word in settings if word.partition("=")[0].lstrip("+") in RESUME_KEYS]
    if not resuming:
        return None
    resume = compose(resuming, algorithms=algorithm_schemas()).config.resume
    named = checkpoint_folder(Path(resume).expanduser())
    if resume in ("auto", "disable") or not (run_of(named) / "run.json").is_file():
        return None
    return next((path for path in (named / CONFIG, run_of(named) / CONFIG) if path.is_file()), None)


def _from_environment() -> list[str]:
    """VERBOSITY=DEBUG in the environment sets logging.verbosity; a setting on the command line overrides it."""
    verbosity = os.environ.get("VERBOSITY", "").lower()
    return [f"logging.verbosity={verbosity}"] if verbosity in ("debug", "info", "warning") else []


# -- Implied recipes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImpliedRecipe:
    """The recipe to start from, settings that belong to it, and a note for the user."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    note: str = ""


def implied_recipe(settings: Sequence[str], config_path: Path | None) -> ImpliedRecipe:
    """The recipe that a training command without --config-name implies."""
    pairs = [(key.lstrip("+"), value) for key, _, value in (word.partition("=") for word in settings)]
    if config_path is not None:
        pairs += [(key, str(value)) for key, value, _ in read_yaml(config_path)]
    keys = {key for key, _ in pairs}
    algorithms = [value for key, value in pairs if key in ALGORITHM]
    if not keys.isdisjoint(TASK) or any(key.startswith(("agent", "reward")) for key in keys):
        return ImpliedRecipe()
    # Every command of TorchRL's scripts writes mode=sync out; in Covey it is the default. Uppercase names under `env.`
    # are environment variables of other vocabularies.
    if ("mode", "sync") in pairs or any(key.startswith(TORCHRL) and key.islower() for key in keys):
        if config_path is not None or algorithms:
            return ImpliedRecipe()
        return ImpliedRecipe(
            "grpo_gsm8k",
            note="settings of TorchRL's GRPO scripts: starting from the recipe grpo_gsm8k as they do "
            "(--config-name grpo_gsm8k); --config-name default starts from Covey's defaults",
        )
    if any(name != "gvpo" for name in algorithms):
        return ImpliedRecipe()
    train, validation = (_data_files(data_folder(split)) for split in ("train", "val"))
    if train:
        values = {"data.train_files": train} | ({"data.val_files": validation} if validation else {"eval.every": 0})
        return ImpliedRecipe(
            "gvpo_math",
            tuple(f"{key}={literal(value)}" for key, value in values.items()),
            f"no task is named, and {data_folder('train')} holds data files: starting from the recipe gvpo_math on "
            "them; data=sort trains on the generated default task",
        )
    if keys and not any(key.startswith(VERL) for key in keys):
        return ImpliedRecipe()
    return ImpliedRecipe(
        note="no task is named: training on the generated task sort. The GVPO guide's run is --config-name gvpo_math "
        f"(or put its files into {data_folder('train')} and {data_folder('val')}), the minimal script's is "
        "--config-name gvpo_minimal; your own data: data.train_files=FILE"
    )


def _data_files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("*") if path.suffix in SUFFIXES and path.is_file())
