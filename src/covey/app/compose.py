"""From a parsed command line to the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.algorithms import algorithm_schemas, schema
from covey.app.resume import checkpoint_folder, run_of
from covey.config import Composed, compose, literal, read_yaml
from covey.config.read import export
from covey.errors import InputError
from covey.tasks import data_folder


@dataclass
class Words:
    settings: list[str] = field(default_factory=list)  # key=value
    places: list[str] = field(default_factory=list)  # everything else that is no flag
    flags: dict[str, str | bool] = field(default_factory=dict)

    def text(self, flag: str) -> str | None:
        value = self.flags.get(flag)
        return value if isinstance(value, str) else None

    def on(self, flag: str) -> bool:
        return bool(self.flags.get(flag))

    @property
    def help(self) -> bool:
        return self.on("--help") or self.on("-h")


CONFIG = "config.yaml"  # in a run's folder and in its checkpoints


RESUME = ("resume", "resume_from_checkpoint", "trainer.resume_mode", "trainer.resume_from_path")


def compose_words(
    words: Words,
    *,
    settings: Sequence[str] | None = None,
    config_path: Path | None = None,
    training: bool = False,
) -> Composed:
    """The configuration that a command line describes; environment variables of its file are set. `settings` and
    `config_path` stand in for the command line's own. A check that starts nothing goes on without what is missing. A
    command that trains (`training`) may start from the recipe that its words belong to (origin.py). A run that is named
    to go on from (resume=RUN) brings its settings, unless a file or recipe is named."""
    path = config_path or words.text("--config")
    name = words.text("--config-name")
    if path and name:
        raise InputError("--config and --config-name contradict each other: give a file or a recipe")
    path = Path(path).expanduser() if path is not None else None
    settings = words.settings if settings is None else settings
    if path is None and name is None:
        path = _settings_of_resumed(settings)
    origin = find_origin(settings, path) if training and name is None else Origin()
    composed = compose(
        [*_from_environment(), *origin.settings, *settings],
        algorithms=algorithm_schemas(),
        own_algorithm=schema,
        config_name=name or origin.recipe,
        config_path=path,
        tolerant=(words.on("--validate-only") or words.on("--dry-run")) and not words.on("--strict"),
    )
    export(composed.env)
    return replace(composed, warnings=(origin.remark, *composed.warnings)) if origin.remark else composed


def _settings_of_resumed(settings: Sequence[str]) -> Path | None:
    """The settings of the run or checkpoint that is named to go on from, where there is one."""
    asked = [word for word in settings if word.partition("=")[0].lstrip("+") in RESUME]
    if not asked:
        return None
    resume = compose(asked, algorithms=algorithm_schemas()).config.resume
    named = checkpoint_folder(Path(resume).expanduser())
    if resume in ("auto", "disable") or not (run_of(named) / "run.json").is_file():
        return None
    return next((path for path in (named / CONFIG, run_of(named) / CONFIG) if path.is_file()), None)


def _from_environment() -> list[str]:
    """VERBOSITY=DEBUG in the environment is logging.verbosity; a setting on the command line comes later and wins."""
    verbosity = os.environ.get("VERBOSITY", "").lower()
    return [f"logging.verbosity={verbosity}"] if verbosity in ("debug", "info", "warning") else []


# -- Which recipe a command line starts from where it names none -------------------------------------------------------
# The scripts of other projects bring their own task and algorithm. Their words tell which script a command was written
# for, so that `covey train` in its place trains what the script would have trained:
#
# TorchRL's GRPO scripts      `mode=sync`, `optimizer.lr`, `train.epochs`, ...       grpo_gsm8k
# the GVPO guide's script     no task named, and data files in data/train            gvpo_math on these files
#
# A command that names a task or another algorithm starts from the defaults.

TORCHRL = ("env.", "inference_model.", "optimizer.", "policy.", "ref_model.", "train.", "train_model.")


VERL = ("actor_rollout_ref.", "algorithm.adv_estimator", "algorithm.gvpo_", "critic.", "trainer.")


TASK = ("data", "data.name", "data.train_files", "data.val_files")


ALGORITHM = ("algorithm", "algorithm.name", "algorithm.adv_estimator")


SUFFIXES = (".parquet", ".json", ".jsonl", ".csv")


@dataclass(frozen=True)
class Origin:
    """The recipe to start from, settings that belong to it, and what the user is told."""

    recipe: str | None = None
    settings: tuple[str, ...] = ()
    remark: str = ""


def find_origin(settings: Sequence[str], config_path: Path | None) -> Origin:
    """Of a training command without --config-name."""
    given = [(key.lstrip("+"), value) for key, _, value in (word.partition("=") for word in settings)]
    if config_path is not None:
        given += [(key, str(value)) for key, value, _ in read_yaml(config_path)]
    keys = {key for key, _ in given}
    algorithms = [value for key, value in given if key in ALGORITHM]
    if keys & {*TASK} or any(key.startswith(("agent", "reward")) for key in keys):
        return Origin()
    if _is_torchrl(given):
        if config_path is not None or algorithms:
            return Origin()
        return Origin(
            "grpo_gsm8k",
            remark="settings of TorchRL's GRPO scripts: starting from the recipe grpo_gsm8k as they do "
            "(--config-name grpo_gsm8k); --config-name default starts from Covey's defaults",
        )
    return _gvpo_guide(keys) if all(name == "gvpo" for name in algorithms) else Origin()


def _is_torchrl(given: Sequence[tuple[str, str]]) -> bool:
    """Their own words, or `mode=sync` written out, as all of their commands do and Covey's, where it is the default, do
    not. Uppercase names under `env.` are variables of other vocabularies."""
    theirs = (key.startswith(TORCHRL) and key.islower() for key, _ in given)
    return any(theirs) or ("mode", "sync") in given


def _gvpo_guide(keys: Collection[str]) -> Origin:
    train, validation = (_files(data_folder(split)) for split in ("train", "val"))
    if train:
        found = {"data.train_files": train} | ({"data.val_files": validation} if validation else {"eval.every": 0})
        return Origin(
            "gvpo_math",
            tuple(f"{key}={literal(value)}" for key, value in found.items()),
            f"no task is named, and {data_folder('train')} holds data files: starting from the recipe gvpo_math on "
            "them; data=sort trains on the generated default task",
        )
    if keys and not any(key.startswith(VERL) for key in keys):
        return Origin()
    return Origin(
        remark="no task is named: training on the generated task sort. The GVPO guide's run is --config-name gvpo_math "
        f"(or put its files into {data_folder('train')} and {data_folder('val')}), the minimal script's is "
        "--config-name gvpo_minimal; your own data: data.train_files=FILE"
    )


def _files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("*") if path.suffix in SUFFIXES and path.is_file())
