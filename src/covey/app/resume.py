"""Run folders and checkpoints that are named in place of a model: `covey eval RUN`, `covey train model=RUN`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.run_files import Startable, beginning, changes_since, store
from covey.config import Composed
from covey.config.compose import NOT_IN_FINGERPRINT
from covey.config.validate import SCORES, Change, within
from covey.errors import InputError

if TYPE_CHECKING:
    from covey.training.checkpoint import Checkpoint
    from covey.training.folder import RunFolder


def run_of(path: Path) -> Path:
    """A run's folder, also when one of its checkpoints was named."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def is_run(name: str) -> bool:
    """Whether a name is a run's folder, or one of its checkpoints."""
    return (run_of(Path(name).expanduser()) / "run.json").is_file()


def checkpoint_folder(path: Path) -> Path:
    """The folder of a checkpoint, also when it was named without leading zeros: step-20 for step-000020."""
    short = re.fullmatch(r"step-(\d{1,5})", path.name)
    return path.with_name(f"step-{int(short[1]):06d}") if short and not path.exists() else path


def model_of(name: str) -> Path:
    """The model folder of a run (its best checkpoint's) or of the checkpoint that was named."""
    path = Path(name).expanduser()
    return best_model(path) if path == run_of(path) else named_model(path)


def named_model(checkpoint: Path) -> Path:
    """Of a checkpoint that was named, once its bytes are checked."""
    from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint

    try:
        return open_checkpoint(checkpoint_folder(checkpoint)).model
    except DamagedCheckpoint as error:
        raise InputError(str(error)) from error


def best_model(run: Path) -> Path:
    """The checkpoint with the best evaluation, or else the last."""
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
    """With the folder of the weights where model.name is a run: the run may write better checkpoints later, and what
    is trained here starts from this one."""
    config = composed.config
    if not is_run(config.model.name):
        return composed
    name = str(model_of(config.model.name))
    tree: dict[str, Any] = composed.tree | {"model": composed.tree["model"] | {"name": name}}
    return dataclasses.replace(
        composed, config=dataclasses.replace(config, model=dataclasses.replace(config.model, name=name)), tree=tree
    )


# -- Where a run is written to, and what it goes on from: resume=auto, resume=RUN, resume=RUN/checkpoints/step-N -------
# auto         the newest unfinished run with the same settings goes on in its folder; otherwise a new run begins
# RUN          that run goes on in its folder from its newest checkpoint, finished or not, also with other settings
# CHECKPOINT   a new run begins there, in a folder of its own; the other run stays as it is

Note = Callable[[str], None]
NEAR = 8  # settings that a run may differ in to be mentioned
MODEL_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def open_run(prepared: Startable, note: Note) -> tuple[RunFolder, Checkpoint | None]:
    """The folder to write to, and the checkpoint to go on from where there is one."""
    from covey.training.folder import find_unfinished, new_folder, open_folder

    config, output = prepared.config, Path(prepared.config.logging.output_dir)
    if prepared.folder is not None:
        return _open_exact(prepared, prepared.folder, note)
    if config.resume == "disable":
        return new_folder(output), None
    if config.resume == "auto":
        found = find_unfinished(output, *_names(prepared), note)
        if found is None:
            _mention_near(prepared, output, note)
            return new_folder(output), None
        return found, _resumed(prepared, found, note)
    named = Path(config.resume).expanduser()
    if named != run_of(named):
        return _branch(prepared, named, note)
    folder = open_folder(named)
    return folder, _resumed(prepared, folder, note)


def check_resume(prepared: Startable, note: Note) -> None:
    """For a check that starts nothing: what `open_run` would refuse is refused, settings that differ are named."""
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
    _tell(run_of(named), checkpoint, changes, note)


def _names(prepared: Startable) -> tuple[str, str, str]:
    logging = prepared.config.logging
    return logging.project, logging.experiment, prepared.fingerprint


def _open_exact(prepared: Startable, path: Path, note: Note) -> tuple[RunFolder, Checkpoint | None]:
    """One of many runs, in a folder of its own: a job that is started again goes on there."""
    from covey.training.checkpoint import step_folders
    from covey.training.folder import exact_folder

    resume = prepared.config.resume
    named = None if resume in ("auto", "disable") else Path(resume).expanduser()
    if named is not None and named == run_of(named) and named.resolve() != path.resolve():
        raise InputError(
            f"resume={named}: the runs of a sweep cannot all go on in one folder\n"
            f"  name a checkpoint, where each of them begins:  resume={named}/checkpoints/step-…"
        )
    folder = exact_folder(path)
    if step_folders(path / "checkpoints"):
        with _released_on_refusal(folder):
            if folder.info()["fingerprint"] != prepared.fingerprint:
                raise InputError(f"{path}: a run with other settings, tasks or rewards is there; take another folder")
        return folder, _resumed(prepared, folder, note)
    if named is None or named == run_of(named):
        return folder, None
    return _begin_branch(prepared, named, _named_checkpoint(named), note, lambda: folder)


def _resumed(prepared: Startable, folder: RunFolder, note: Note) -> Checkpoint:
    """The newest checkpoint of a run, as these settings go on from it."""
    with _released_on_refusal(folder):
        checkpoint = store(prepared.config, folder.path).latest(note)
        if checkpoint is None:
            raise _no_checkpoint(folder.path)
        changes = changes_since(prepared, folder.path, checkpoint)
        _check_fits(prepared, folder.path, checkpoint, changes)
        told = prepared.config.resume != "auto"
        _tell(folder.path, checkpoint, [c for c in changes if told or not within(c.key, NOT_IN_FINGERPRINT)], note)
        if folder.info()["status"] == "finished" and checkpoint.step == prepared.total_steps:
            note(f"all {checkpoint.step} steps of {folder.path} are made; loop.total_steps=MORE makes more of them")
        return _adapted(prepared, checkpoint, changes)


def _branch(prepared: Startable, named: Path, note: Note) -> tuple[RunFolder, Checkpoint]:
    """A new run from this checkpoint. The same command goes on in the run that it began."""
    from covey.training.folder import find_unfinished, new_folder, parent_of, require_run

    output, run = Path(prepared.config.logging.output_dir), run_of(named)
    require_run(run)
    checkpoint = _named_checkpoint(named)
    found = find_unfinished(output, *_names(prepared), note, parent_of(run, checkpoint))
    if found is not None:
        return found, _resumed(prepared, found, note)
    return _begin_branch(prepared, named, checkpoint, note, lambda: new_folder(output))


def _begin_branch(
    prepared: Startable, named: Path, checkpoint: Checkpoint, note: Note, make: Callable[[], RunFolder]
) -> tuple[RunFolder, Checkpoint]:
    from covey.training.folder import begin_branch

    run = run_of(named)
    changes = changes_since(prepared, run, checkpoint)
    _check_fits(prepared, run, checkpoint, changes)
    folder = make()
    try:
        mine = begin_branch(folder, run, checkpoint, beginning(prepared, folder.path))
    except BaseException:
        folder.abandon()
        raise
    note(f"{folder.path} begins after step {checkpoint.step} of {run}")
    _tell(folder.path, checkpoint, changes, note)
    return folder, _adapted(prepared, mine, changes)


def _named_checkpoint(named: Path) -> Checkpoint:
    from covey.training.checkpoint import DamagedCheckpoint, open_checkpoint, step_folders

    path = checkpoint_folder(named)
    if not path.is_dir():
        there = ", ".join(folder.name for folder in step_folders(path.parent)) or "none"
        raise InputError(f"resume={named}: no such checkpoint\n  that run has: {there}")
    try:
        return open_checkpoint(path)
    except DamagedCheckpoint as error:
        raise InputError(f"{error}\n  name another one of {path.parent}") from error


def _no_checkpoint(run: Path) -> InputError:
    return InputError(f"resume={run}: that run has no checkpoint to go on from")


@contextmanager
def _released_on_refusal(folder: RunFolder) -> Iterator[None]:
    """On failure the lock is released, so that a retry can acquire it."""
    try:
        yield
    except InputError:
        folder.release()
        raise


def _mention_near(prepared: Startable, output: Path, note: Note) -> None:
    """One line about an unfinished run that differs in a few settings: it may be the one that was meant."""
    from covey.training.folder import other_unfinished, read_info

    project, experiment, _ = _names(prepared)
    near: list[tuple[int, Path, list[Change]]] = []
    for run in other_unfinished(output, project, experiment):
        try:
            found = changes_since(prepared, run, None)
        except InputError:  # it cannot be compared, nor continued
            continue
        changes = [change for change in found if not within(change.key, NOT_IN_FINGERPRINT)]
        other = any(change.effect == "fixed" or change.key == "model.name" for change in changes)
        if read_info(run).get("kind", "rl") == _kind(prepared) and not other and 0 < len(changes) <= NEAR:
            near.append((len(changes), run, changes))
    if near:
        _, run, changes = min(near, key=lambda found: found[0])  # the newest among equals
        named = ", ".join(f"{change.key} {change.values}" for change in changes)
        note(f"{run} is unfinished, but differs ({named}): a new run begins; to go on with that one: resume={run}")


def _tell(run: Path, checkpoint: Checkpoint, changes: Sequence[Change], note: Note) -> None:
    if not changes:
        return
    note(f"{run} goes on after step {checkpoint.step} with other settings:")
    for change in changes:
        if change.effect == "free":
            note(f"  {change}")
    training = [change for change in changes if change.effect == "training"]
    if training:
        note("  warning: these change what is trained; later results are not those of one experiment:")
    for change in training:
        note(f"  {change}")


# --- whether a checkpoint fits -----------------------------------------------------------------------------------


def _kind(prepared: Startable) -> str:
    return "sft" if prepared.command == "sft" else "rl"


def _check_fits(prepared: Startable, run: Path, checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """Before a model loads: refuse what the checkpoint cannot go on with, and name the settings."""
    from covey.training.folder import read_info

    info, config = read_info(run), prepared.config
    if info.get("kind", "rl") != _kind(prepared):
        command = "sft" if info.get("kind") == "sft" else "train"
        raise InputError(f"{run} is a run of covey {command}\n  start from its weights:  model={run}")
    if checkpoint.step > prepared.total_steps:
        raise InputError(
            f"{run}: {checkpoint.step} steps are made, more than loop.total_steps={prepared.total_steps}\n"
            f"  ask for more, or begin at an earlier checkpoint:  resume={run}/checkpoints/step-…"
        )
    fixed = [change for change in changes if change.effect == "fixed"]
    if config.cluster.name == "local":
        fixed += _other_precision(config, info, changes)
    if prepared.algorithm.needs.values:
        without = checkpoint.state["learner"].get("critic") is None
        keys = ("algorithm.name",) if without else ("critic.shared", "critic.model")
        fixed += [change for change in changes if change.key in keys]
    if fixed:
        lines = [f"{checkpoint.folder} cannot go on with other values of", *(f"  {change}" for change in fixed)]
        raise InputError("\n".join([*lines, f"  keep them, or start a new run from its weights:  model={run}"]))
    _check_model(prepared, checkpoint, changes)


def _other_precision(config: Any, info: dict[str, Any], changes: Sequence[Change]) -> list[Change]:
    """Device or precision, where they are not what `auto` was."""
    from covey.models.loading import pick_device, pick_dtype

    device = pick_device(config.model.device)
    here = {"model.device": device.type, "model.dtype": str(pick_dtype(config.model.dtype, device))}
    there = {"model.device": info["device"], "model.dtype": info["dtype"]}
    asked = {change.key: change for change in changes}
    return [asked.get(key, Change(key, there[key], here[key])) for key in here if here[key] != there[key]]


def _check_model(prepared: Startable, checkpoint: Checkpoint, changes: Sequence[Change]) -> None:
    """The checkpoint's folder says by itself what model it holds, and would be loaded as that."""
    from transformers import AutoConfig

    from covey.models.adapters import check_adapter_fits

    source = prepared.model
    if source is None:  # a check that goes on without it
        return
    named = next((f"{change}\n  " for change in changes if change.key == "model.name"), "")
    fix = "fix: name the model that the run began with, or start anew with resume=disable"
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
        if found != expected and None not in (found, expected):  # not every kind of model has all of them
            raise InputError(
                f"{named}checkpoint {checkpoint.folder} is of another model than {source.name}: {key} is {found}, "
                f"not {expected}\n  {fix}"
            )


# --- what a checkpoint holds, under other settings ---------------------------------------------------------------


def _adapted(prepared: Startable, checkpoint: Checkpoint, changes: Sequence[Change]) -> Checkpoint:
    """Its state without what belongs to the former settings: groups that were sampled ahead, what the algorithm
    remembers of other rewards, and scores that later ones are not compared with."""
    keys, state = {change.key for change in changes}, dict(checkpoint.state)
    if any(change.effect == "training" for change in changes):
        state["source"] = {}
    mine, saved = prepared.algorithm.state_dict(), state["algorithm"]
    if keys & {"algorithm.name", "algorithm.loss", "rewards"}:
        saved = {}
    elif "algorithm.kl_coef" in keys:  # what is asked for now, not what the controller made of the former one
        saved = {name: values for name, values in saved.items() if name != "kl"}
    state["algorithm"] = {name: saved.get(name, values) for name, values in mine.items()} if keys else saved
    if state["best"] is not None and any(within(key, SCORES) for key in keys):
        state["best"] = state["best"] | {"value": None}
    return dataclasses.replace(checkpoint, state=state)
