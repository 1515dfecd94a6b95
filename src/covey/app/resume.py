"""Resolves the run and checkpoint that a command names: a run in place of a model, and resume=auto, RUN or CHECKPOINT.

resume=auto          continues the newest unfinished run with the same settings; otherwise starts a new run
resume=RUN           continues that run in its folder from its newest checkpoint, also with other settings
resume=CHECKPOINT    starts a new run at that checkpoint, in its own folder; the other run is only read
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.run_files import PreparedRun, changes_since, start_info, store
from covey.config import Composed
from covey.config.compose import NOT_IN_FINGERPRINT
from covey.config.validate import SCORE_KEYS, Change, matches
from covey.errors import InputError

if TYPE_CHECKING:
    from covey.training.checkpoint import Checkpoint
    from covey.training.folder import RunFolder


Note = Callable[[str], None]
NEAR = 8  # an unfinished run is mentioned if at most this many settings differ
MODEL_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


# -- A run in place of a model -----------------------------------------------------------------------------------------


def run_of(path: Path) -> Path:
    """The run's folder for a run or one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def is_run(name: str) -> bool:
    """Whether a name is a run's folder or one of its checkpoints."""
    return (run_of(Path(name).expanduser()) / "run.json").is_file()


def checkpoint_folder(path: Path) -> Path:
    """The folder of a checkpoint. Leading zeros may be omitted: step-20 for step-000020."""
    short = re.fullmatch(r"step-(\d{1,5})", path.name)
    return path.with_name(f"step-{int(short[1]):06d}") if short and not path.exists() else path


def model_of(name: str) -> Path:
    """The model folder of a run's best checkpoint, or of the named checkpoint."""
    path = Path(name).expanduser()
    return best_model(path) if path == run_of(path) else named_model(path)


def named_model(checkpoint: Path) -> Path:
    """The model folder of a checkpoint, after its checksums are verified."""
    from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint

    try:
        return open_checkpoint(checkpoint_folder(checkpoint)).model
    except DamagedCheckpoint as error:
        raise InputError(str(error)) from error


def best_model(run: Path) -> Path:
    """The model folder of the checkpoint with the best evaluation, or of the last one."""
    from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint, step_folders

    folders = step_folders(run / "checkpoints")
    if not folders:
        raise InputError(f"{run} has no checkpoint yet\n  runs write one at the end, or every loop.save_every steps")
    try:
        last = open_checkpoint(folders[-1])
        best = last.state["best"]
        named = run / "checkpoints" / f"step-{best['step']:06d}" if best else last.folder
        return (open_checkpoint(named) if named.is_dir() else last).model
    except DamagedCheckpoint as error:
        raise InputError(f"{error}\n  name another one of {run / 'checkpoints'}") from error


def with_model_folder(composed: Composed) -> Composed:
    """Replace a run in model.name by the folder of its weights, since the run may write better checkpoints later."""
    config = composed.config
    if not is_run(config.model.name):
        return composed
    name = str(model_of(config.model.name))
    tree: dict[str, Any] = composed.tree | {"model": composed.tree["model"] | {"name": name}}
    return dataclasses.replace(
        composed, config=dataclasses.replace(config, model=dataclasses.replace(config.model, name=name)), tree=tree
    )


# -- Resuming ----------------------------------------------------------------------------------------------------------


def open_run(prepared: PreparedRun, note: Note) -> tuple[RunFolder, Checkpoint | None]:
    """The folder to write to, and the checkpoint to continue from, if any."""
    from covey.training.folder import find_unfinished, new_folder, open_folder

    config, output = prepared.config, Path(prepared.config.logging.output_dir)
    if prepared.folder is not None:
        return _open_exact(prepared, prepared.folder, note)
    if config.resume == "disable":
        return new_folder(output), None
    if config.resume == "auto":
        found = find_unfinished(output, *_names(prepared), note)
        if found is None:
            _note_similar_run(prepared, output, note)
            return new_folder(output), None
        return found, _resumed(prepared, found, note)
    named = Path(config.resume).expanduser()
    if named != run_of(named):
        return _branch(prepared, named, note)
    folder = open_folder(named)
    return folder, _resumed(prepared, folder, note)


def check_resume(prepared: PreparedRun, note: Note) -> None:
    """Raise the errors that `open_run` would raise and report changed settings, without opening the run."""
    from covey.training.checkpoint import step_folders
    from covey.training.folder import require_run

    named = Path(prepared.config.resume).expanduser()
    if prepared.config.resume in ("auto", "disable"):
        return
    require_run(run_of(named))
    if named == run_of(named):
        if not (folders := step_folders(named / "checkpoints")):
            raise _no_checkpoint(named)
        named = folders[-1]
    checkpoint = _named_checkpoint(named)
    changes = changes_since(prepared, run_of(named), checkpoint)
    _check_fits(prepared, run_of(named), checkpoint, changes)
    _report_changes(run_of(named), checkpoint, changes, note)


def _names(prepared: PreparedRun) -> tuple[str, str, str]:
    logging = prepared.config.logging
    return logging.project, logging.experiment, prepared.fingerprint


def _open_exact(prepared: PreparedRun, path: Path, note: Note) -> tuple[RunFolder, Checkpoint | None]:
    """A run of a sweep has a fixed folder, so a job that is restarted continues there."""
    from covey.training.checkpoint import step_folders
    from covey.training.folder import exact_folder

    resume = prepared.config.resume
    named = None if resume in ("auto", "disable") else Path(resume).expanduser()
    if named is not None and named == run_of(named) and named.resolve() != path.resolve():
        raise InputError(
            f"resume={named}: the runs of a sweep cannot all continue in one folder\n"
            f"  name a checkpoint to start them from:  resume={named}/checkpoints/step-…"
        )
    folder = exact_folder(path)
    if step_folders(path / "checkpoints"):
        with _unlock_on_error(folder):
            if folder.info()["fingerprint"] != prepared.fingerprint:
                raise InputError(f"{path}: holds a run with other settings, tasks or rewards; take another folder")
        return folder, _resumed(prepared, folder, note)
    if named is None or named == run_of(named):
        return folder, None
    return _begin_branch(prepared, named, _named_checkpoint(named), note, lambda: folder)


def _resumed(prepared: PreparedRun, folder: RunFolder, note: Note) -> Checkpoint:
    """The newest checkpoint of a run, adapted to these settings."""
    with _unlock_on_error(folder):
        checkpoint = store(prepared.config, folder.path).latest(note)
        if checkpoint is None:
            raise _no_checkpoint(folder.path)
        changes = changes_since(prepared, folder.path, checkpoint)
        _check_fits(prepared, folder.path, checkpoint, changes)
        if prepared.config.resume == "auto":
            reported = [change for change in changes if not matches(change.key, NOT_IN_FINGERPRINT)]
        else:
            reported = changes
        _report_changes(folder.path, checkpoint, reported, note)
        if folder.info()["status"] == "finished" and checkpoint.step == prepared.total_steps:
            note(f"all {checkpoint.step} steps of {folder.path} are done; loop.total_steps=MORE continues the run")
        return _adapted(prepared, checkpoint, changes)


def _branch(prepared: PreparedRun, named: Path, note: Note) -> tuple[RunFolder, Checkpoint]:
    """A new run from this checkpoint. Repeating the command continues the run that it started."""
    from covey.training.folder import find_unfinished, new_folder, parent_of, require_run

    output, run = Path(prepared.config.logging.output_dir), run_of(named)
    require_run(run)
    checkpoint = _named_checkpoint(named)
    found = find_unfinished(output, *_names(prepared), note, parent_of(run, checkpoint))
    if found is not None:
        return found, _resumed(prepared, found, note)
    return _begin_branch(prepared, named, checkpoint, note, lambda: new_folder(output))


def _begin_branch(
    prepared: PreparedRun, named: Path, checkpoint: Checkpoint, note: Note, make: Callable[[], RunFolder]
) -> tuple[RunFolder, Checkpoint]:
    from covey.training.folder import begin_branch

    run = run_of(named)
    changes = changes_since(prepared, run, checkpoint)
    _check_fits(prepared, run, checkpoint, changes)
    folder = make()
    try:
        mine = begin_branch(folder, run, checkpoint, start_info(prepared, folder.path))
    except BaseException:
        folder.abandon()
        raise
    note(f"{folder.path} starts after step {checkpoint.step} of {run}")
    _report_changes(folder.path, checkpoint, changes, note)
    return folder, _adapted(prepared, mine, changes)


def _named_checkpoint(named: Path) -> Checkpoint:
    from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint, step_folders

    path = checkpoint_folder(named)
    if not path.is_dir():
        existing = ", ".join(folder.name for folder in step_folders(path.parent)) or "none"
        raise InputError(f"resume={named}: no such checkpoint\n  that run has: {existing}")
    try:
        return open_checkpoint(path)
    except DamagedCheckpoint as error:
        raise InputError(f"{error}\n  name another one of {path.parent}") from error


def _no_checkpoint(run: Path) -> InputError:
    return InputError(f"resume={run}: that run has no checkpoint to continue from")


@contextmanager
def _unlock_on_error(folder: RunFolder) -> Iterator[None]:
    """Release the lock on an InputError, so that a retry can acquire it."""
    try:
        yield
    except InputError:
        folder.release()
        raise


def _note_similar_run(prepared: PreparedRun, output: Path, note: Note) -> None:
    """Mention the unfinished run with the fewest different settings: the user may have meant to continue it."""
    from covey.training.folder import other_unfinished, read_info

    project, experiment, _ = _names(prepared)
    similar: list[tuple[int, Path, list[Change]]] = []
    for run in other_unfinished(output, project, experiment):
        try:
            differing = changes_since(prepared, run, None)
        except InputError:  # damaged, so it cannot be continued either
            continue
        changes = [change for change in differing if not matches(change.key, NOT_IN_FINGERPRINT)]
        other = any(change.effect == "fixed" or change.key == "model.name" for change in changes)
        if read_info(run).get("kind", "rl") == _kind(prepared) and not other and 0 < len(changes) <= NEAR:
            similar.append((len(changes), run, changes))
    if similar:
        _, run, changes = min(similar, key=lambda item: item[0])  # the newest among equals
        named = ", ".join(f"{change.key} {change.values}" for change in changes)
        note(f"{run} is unfinished, but differs ({named}): starting a new run; to continue that one: resume={run}")


def _report_changes(run: Path, checkpoint: Checkpoint, changes: Sequence[Change], note: Note) -> None:
    if not changes:
        return
    note(f"{run} continues after step {checkpoint.step} with other settings:")
    for change in changes:
        if change.effect == "free":
            note(f"  {change}")
    training = [change for change in changes if change.effect == "training"]
    if training:
        note("  warning: these change training; results before and after are not comparable:")
    for change in training:
        note(f"  {change}")


# -- Compatibility of a checkpoint -------------------------------------------------------------------------------------


def _kind(prepared: PreparedRun) -> str:
    return "sft" if prepared.command == "sft" else "rl"


def _check_fits(prepared: PreparedRun, run: Path, checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Raise an InputError that names the settings that the checkpoint cannot continue with."""
    from covey.training.folder import read_info

    info, config = read_info(run), prepared.config
    if info.get("kind", "rl") != _kind(prepared):
        command = "sft" if info.get("kind") == "sft" else "train"
        raise InputError(f"{run} is a run of covey {command}\n  start from its weights:  model={run}")
    if checkpoint.step > prepared.total_steps:
        raise InputError(
            f"{run}: {checkpoint.step} steps are done, more than loop.total_steps={prepared.total_steps}\n"
            f"  raise it, or start from an earlier checkpoint:  resume={run}/checkpoints/step-…"
        )
    fixed = [change for change in changes if change.effect == "fixed"]
    if config.cluster.name == "local":
        fixed += _other_precision(config, info, changes)
    if prepared.algorithm.needs.values:
        without = checkpoint.state["learner"].get("critic") is None
        keys = ("algorithm.name",) if without else ("critic.shared", "critic.model")
        fixed += [change for change in changes if change.key in keys]
    if fixed:
        lines = [f"{checkpoint.folder} cannot continue with other values of", *(f"  {change}" for change in fixed)]
        raise InputError("\n".join([*lines, f"  keep them, or start a new run from its weights:  model={run}"]))
    _check_model(prepared, checkpoint, changes)


def _other_precision(config: Any, info: dict[str, Any], changes: Sequence[Change]) -> list[Change]:
    """Device and precision, if they differ from those that `auto` chose for the run."""
    from covey.models.loading import pick_device, pick_dtype

    device = pick_device(config.model.device)
    here = {"model.device": device.type, "model.dtype": str(pick_dtype(config.model.dtype, device))}
    there = {"model.device": info["device"], "model.dtype": info["dtype"]}
    by_key = {change.key: change for change in changes}
    return [by_key.get(key, Change(key, there[key], here[key])) for key in here if here[key] != there[key]]


def _check_model(prepared: PreparedRun, checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Compare the configuration in the checkpoint's folder with that of the model."""
    from transformers import AutoConfig

    from covey.models.adapters import check_adapter_fits

    source = prepared.model
    if source is None:  # a check without the model
        return
    named = next((f"{change}\n  " for change in changes if change.key == "model.name"), "")
    fix = "fix: name the model that the run started from, or start a new run with resume=disable"
    if (checkpoint.model / "adapter_config.json").is_file():
        try:
            check_adapter_fits(checkpoint.model, source.config, trusted=prepared.config.model.trust_remote_code)
        except InputError as error:
            raise InputError(f"{named}{error}") from error
        return
    there = AutoConfig.from_pretrained(checkpoint.model, trust_remote_code=False).get_text_config(decoder=True)
    here = source.config.get_text_config(decoder=True)
    for key in MODEL_SHAPE:
        found, expected = getattr(there, key, None), getattr(here, key, None)
        if found != expected and None not in (found, expected):  # not every model type has all of them
            raise InputError(
                f"{named}checkpoint {checkpoint.folder} is of another model than {source.name}: {key} is {found}, "
                f"not {expected}\n  {fix}"
            )


def _adapted(prepared: PreparedRun, checkpoint: Checkpoint, changes: Sequence[Change]) -> Checkpoint:
    """The checkpoint without state that belongs to the former settings: groups sampled ahead, the algorithm's state
    for other rewards, and a best score that later scores are not comparable with."""
    keys, state = {change.key for change in changes}, dict(checkpoint.state)
    if any(change.effect == "training" for change in changes):
        observed = state.get("source", {}).get("curriculum")
        keep = observed is not None and not keys & {"training tasks", "rewards"}
        state["source"] = {"curriculum": observed | {"drawn": {}}} if keep else {}
    mine, saved = prepared.algorithm.state_dict(), state["algorithm"]
    if keys & {"algorithm.name", "algorithm.loss", "rewards"}:
        saved = {}
    elif "algorithm.kl_coef" in keys:  # the new coefficient, not the one that the controller adapted
        saved = {name: values for name, values in saved.items() if name != "kl"}
    state["algorithm"] = {name: saved.get(name, values) for name, values in mine.items()} if keys else saved
    if state["best"] is not None and any(matches(key, SCORE_KEYS) for key in keys):
        state["best"] = state["best"] | {"value": None}
    return dataclasses.replace(checkpoint, state=state)


def find_model(name: str) -> Path:
    """The folder with the weights: a run's best checkpoint, a named checkpoint (verified), or a model folder."""
    path = checkpoint_folder(Path(name).expanduser())
    if not path.is_dir():
        raise InputError(f"there is no folder {name}\n  name a run (outputs/DATE/TIME) or one of its checkpoints")
    if is_run(name) and path == run_of(path):
        return best_model(path)
    return named_model(path) if (path / "manifest.json").is_file() else path
