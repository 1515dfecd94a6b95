"""Prepares and builds a run of covey sft: demonstrations, chat template and learner."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.build import Note, open_telemetry
from covey.app.checks import check_sizes, check_training, check_vision
from covey.app.models import PLANNING, LongestRow, make_learner, plan_memory
from covey.app.parts import RUNS_CODE, lazy_sandbox
from covey.app.prepare import MissingResources, open_model, total_steps
from covey.app.resume import open_run, with_model_folder
from covey.app.run_files import PreparedRun, at_original_revision, store, threads_for, write_run_files
from covey.config import Composed, fingerprint
from covey.config.schema import Config
from covey.config.validate import UNUSED_BY_SFT, matches
from covey.errors import Absent, InputError, unknown
from covey.redact import hide_settings
from covey.rollout.templates import use_template
from covey.tasks.demonstrations import DemonstrationSet, load_demonstrations
from covey.telemetry import RunInfo, check_logging, report_activity
from covey.types import Demonstration, Episode, Messages, Task

if TYPE_CHECKING:
    from covey.algorithms.likelihood import Likelihood
    from covey.models.loading import ModelSource
    from covey.training.checkpoint import Checkpoint
    from covey.training.folder import RunFolder
    from covey.training.sft import SftRun

Schemas = Sequence[Mapping[str, Any]]
Write = Callable[[Messages, Schemas], tuple[Messages, Schemas | None]]  # → arguments of the chat template


@dataclass(frozen=True, kw_only=True)
class PreparedSft(PreparedRun):
    """A run of covey sft."""

    command = "sft"

    description: str
    train: tuple[Episode, ...]
    validation: tuple[Episode, ...]
    algorithm: Likelihood
    steps_known: bool = True  # False: epochs of demonstrations that are not on this machine

    @property
    def task_count(self) -> int:
        return len(self.train)

    @property
    def longest_row(self) -> LongestRow:
        lengths = (len(turn.prompt_ids) + len(turn.completion_ids) for each in self.train for turn in each.turns)
        images = max(sum(span.length for span in turn.images) for each in self.train for turn in each.turns)
        return LongestRow(0, max(lengths), "model.context_length", sampled=False, images=images)

    def info(self, path: Path, first_step: int) -> RunInfo:
        logging = self.config.logging
        return RunInfo(
            folder=path,
            title=f"{logging.project}/{logging.experiment}",
            algorithm="sft",
            model=self.config.model.name,
            task=self.description.split(":")[0],
            total_steps=self.total_steps,
            first_step=first_step,
            config=hide_settings(self.tree),
            kind="sft",
        )


def prepare_sft(composed: Composed, *, tolerate_absent: bool = False) -> PreparedSft:
    """Check everything that can be checked from the configuration and the files. With `tolerate_absent`, missing files,
    packages and devices are warnings."""
    from covey.algorithms.likelihood import Likelihood

    composed = with_model_folder(composed)
    config, warnings = composed.config, [*composed.warnings, *_unused(composed)]
    missing = MissingResources()
    missing.collect(lambda: check_logging(config.logging))
    if config.cluster.name != "local":
        raise InputError(
            f"covey sft runs in one process: cluster={config.cluster.name} is not supported\n  leave it out"
        )
    if config.learner.tensor_parallel > 1:
        raise InputError("covey sft runs in one process: learner.tensor_parallel is not supported\n  leave it out")
    loaded = missing.collect(lambda: load_demonstrations(config.data, config.seed))
    found = loaded or DemonstrationSet((), (), "(files not here)")
    source = missing.collect(lambda: open_model(config))
    if source is not None:
        adapter = source.adapter is not None
        missing.collect(lambda: check_training(config, adapter=adapter))
    warnings += [*found.warnings, *check_sizes(config, found.train, found.validation, "demonstrations")]
    check_vision(config, source, [(one.place, one.messages) for one in (*found.train, *found.validation)])
    train: tuple[Episode, ...] = ()
    validation: tuple[Episode, ...] = ()
    if source is not None:
        use_template(source.tokenizer, config.agent.template)
        renderer = DemonstrationRenderer(config, source, found)
        train = missing.collect(lambda: renderer.render_all("training", found.train)) or ()
        validation = missing.collect(lambda: renderer.render_all("validation", found.validation)) or ()
        warnings += renderer.warnings
    contents = {"training tasks": _digest(train), "validation tasks": _digest(validation)}
    warnings += missing.warnings(tolerate=tolerate_absent)
    return PreparedSft(
        config=config,
        tree=composed.tree,
        overrides=composed.overrides,
        fingerprint=fingerprint(composed.tree | {"command": "sft"} | contents),
        contents=contents,
        description=found.description,
        train=train,
        validation=validation,
        algorithm=Likelihood(),
        model=source,
        total_steps=total_steps(config, len(train or found.train)),
        warnings=tuple(warnings),
        absent=tuple(missing.messages),
        rejected=composed.rejected,
        steps_known=loaded is not None or config.loop.total_steps is not None,
    )


def build_sft(prepared: PreparedSft, *, note: Note) -> SftRun:
    """Load the model, from the checkpoint on resume, and assemble the run."""
    folder, checkpoint = open_run(prepared, note)
    try:
        return _assemble(prepared, folder, checkpoint)
    except BaseException as error:
        folder.abandon(error)  # the lock is released, so a retry can acquire it
        raise


def _assemble(prepared: PreparedSft, folder: RunFolder, checkpoint: Checkpoint | None) -> SftRun:
    import torch

    from covey.training.sft import SftRun

    config, source = prepared.config, prepared.model
    assert source is not None
    if checkpoint is not None:
        source = at_original_revision(source, config, folder)
        assert source is not None
        prepared = dataclasses.replace(prepared, model=source)
    threads = threads_for(config, folder if checkpoint is not None else None)
    torch.set_num_threads(threads)
    with report_activity(f"loading {prepared.config.model.name}", prepared.config.logging):
        learner = make_learner(prepared, checkpoint)
    with report_activity(PLANNING, prepared.config.logging):
        plan_memory(prepared, learner)
    write_run_files(prepared, folder, learner, threads, checkpoint)
    telemetry = open_telemetry(prepared, folder.path, checkpoint)
    telemetry.note(learner.memory_note())
    return SftRun(
        config=config,
        folder=folder,
        learner=learner,
        algorithm=prepared.algorithm,
        telemetry=telemetry,
        checkpoints=store(config, folder.path),
        tokenizer=source.tokenizer,
        demonstrations=prepared.train,
        validation=prepared.validation,
        total_steps=prepared.total_steps,
        first_step=checkpoint.step if checkpoint is not None else 0,
        resumed=checkpoint is not None,
        best=checkpoint.state["best"] if checkpoint is not None else None,
    )


class DemonstrationRenderer:
    """Renders demonstrations as episodes of this model: with its chat template and its tool-call format."""

    def __init__(self, config: Config, source: ModelSource, found: DemonstrationSet) -> None:
        from covey.models.folder import check_ids
        from covey.rollout.rendering import Renderer

        self.renderer = Renderer(source.tokenizer, vision=source.vision)
        self.check_ids = partial(check_ids, source.name, source.tokenizer, source.config)
        self.eos_ids = source.eos_ids()
        self.limit = config.model.context_length or source.context_length
        self.schemas = _schemas(config, found)
        self.write = _writer(config, source, found, self.schemas)
        self.warnings: list[str] = []

    def render_all(self, split: str, demonstrations: Sequence[Demonstration]) -> tuple[Episode, ...]:
        """Episodes of all demonstrations that fit into the model's context. The others are counted in a warning."""
        from covey.training.samples import episode_rows

        episodes: list[Episode] = []
        long: list[str] = []
        for demonstration in demonstrations:
            episode = self.render(demonstration)
            rows = episode_rows(episode, 0)
            self.check_ids(id for row in rows for ids in (row.prompt_ids, row.response_ids) for id in ids)
            length = max(row.length for row in rows)
            if self.limit is None or length <= self.limit:
                episodes.append(episode)
            else:
                long.append(f"{demonstration.place} ({length} tokens)")
        if long:
            text = f"{len(long)} of {len(demonstrations)} {split} demonstrations are longer than the "
            text += f"context of {self.limit} tokens and skipped, the first: {long[0]}"
            if not episodes:
                raise InputError(f"{text}\n  shorten them, or raise model.context_length if the model supports it")
            self.warnings.append(text)
        return tuple(episodes)

    def render(self, demonstration: Demonstration) -> Episode:
        from covey.rollout.rendering import render_demonstration

        schemas = self.schemas if demonstration.tools is None else demonstration.tools
        try:
            _check_calls(demonstration, schemas)
            messages, tools = self.write(demonstration.messages, schemas)
            turns = render_demonstration(self.renderer, messages, tools, self.eos_ids)
        except Absent:
            raise
        except InputError as error:
            raise InputError(f"{demonstration.place}: {error}") from error
        first = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
        return Episode(Task(demonstration.id, tuple(messages[:first])), turns, tuple(messages), stop=turns[-1].stop)


def _schemas(config: Config, found: DemonstrationSet) -> Schemas:
    """Tool schemas for demonstrations without their own: of agent.tools, or of the generated data."""
    names = config.agent.tools or found.tools
    if not names:
        return ()
    from covey.agents.tools.toolset import resolve_tools

    # Only their descriptions are needed: nothing is run, so any tier will do.
    sandbox = lazy_sandbox(dataclasses.replace(config, sandbox=dataclasses.replace(config.sandbox, allow_weak=True)))
    runs_code = any(name in RUNS_CODE for name in names)
    tools = resolve_tools(names, config.agent.tool_options, sandbox=sandbox() if runs_code else None)
    return tools.schemas()


def _writer(config: Config, source: ModelSource, found: DemonstrationSet, schemas: Schemas) -> Write:
    """The function that writes tools and calls in the agent's format. Without tools, messages stay unchanged."""
    if not schemas and not any(map(_uses_tools, (*found.train, *found.validation))):
        return lambda messages, tools: (messages, None)
    from covey.agents.formats.detect import FORMATS, choose_format
    from covey.agents.render_demonstrations import render_messages

    # agent=react and agent=code have formats of their own.
    name = config.agent.name if config.agent.name in FORMATS else config.agent.format
    format = choose_format(name, source.tokenizer, source.config.model_type, schemas)
    return lambda messages, tools: render_messages(messages, tools, format)


def _uses_tools(demonstration: Demonstration) -> bool:
    return bool(demonstration.tools) or any(m.get("tool_calls") or m["role"] == "tool" for m in demonstration.messages)


def _check_calls(demonstration: Demonstration, schemas: Schemas) -> None:
    known = [schema["function"]["name"] for schema in schemas]
    for message in demonstration.messages:
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            if not known:
                raise InputError(
                    f"calls the tool {name}, but no tools are known\n"
                    "  give their schemas in a column tools, or name them: agent.tools=[calculator]"
                )
            if name not in known:
                raise unknown("tool", name, known)


def _unused(composed: Composed) -> list[str]:
    """A warning about settings that matter only for sampling."""
    keys = [word.partition("=")[0].lstrip("+") for word in composed.overrides]
    names = [key for key in keys if matches(f"{key}.", UNUSED_BY_SFT)]
    return [f"not used by covey sft, where nothing is sampled: {', '.join(names)}"] if names else []


def _digest(episodes: Sequence[Episode]) -> str:
    """A hash of the tokens and images of all episodes, and of the turns that are not trained on."""
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(repr([(turn.prompt_ids, turn.completion_ids) for turn in episode.turns]).encode())
        if context := [at for at, turn in enumerate(episode.turns) if not turn.trained]:
            digest.update(repr(context).encode())
        if images := [span.image.digest for turn in episode.turns for span in turn.images]:
            digest.update(repr(images).encode())
    return digest.hexdigest()
