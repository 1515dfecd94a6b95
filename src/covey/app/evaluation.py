"""covey eval: plans every model on every set of tasks, samples the answers that are missing, and reports the results.

The plan is checked completely before the first weights are loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from covey.app.build import make_collector
from covey.app.checks import SAMPLED_MODE, digest_rewards, digest_tasks, unused_by_greedy
from covey.app.compose import CommandLine, compose_command, whole_number
from covey.app.loaded_model import TASK_KEYS, compose_for
from covey.app.models import make_engine
from covey.app.parts import open_rewards, open_workers, service_of, with_workers
from covey.app.prepare import Prepared, prepare
from covey.app.resume import is_run
from covey.config import Composed, literal
from covey.config.schema import OWN_TASKS
from covey.errors import InputError, RunFailed
from covey.evaluation.answers import EvalFolder, EvalJob, Key
from covey.evaluation.report import Report
from covey.evaluation.scores import THRESHOLD, Answer, EvalSpec, Scores, compare_all, compute_scores
from covey.evaluation.statistics import powers_up_to
from covey.protocols import RolloutEngine
from covey.rewards import votes_of
from covey.tasks import TaskSet, load_tasks
from covey.tasks.files import find_files
from covey.tasks.reading import SUFFIXES
from covey.telemetry.progress import ProgressLine
from covey.training.evaluate import eval_sampling
from covey.workers import WorkerPool

# Section → settings that change answers. All others (devices, speed) may change when an evaluation is resumed.
ANSWERS_DEPEND_ON: Mapping[str, tuple[str, ...] | None] = {
    "model": ("dtype", "context_length", "lora"),
    "data": ("name", "options", "val_files", "val_size", "system_prompt"),
    "agent": None,  # None: all settings of the section
    "reward": None,
    "rollout": ("name", "max_tokens", "stop"),
    "eval": ("modes", "n", "temperature", "top_p", "top_k", "min_p", "max_tokens"),
}


@dataclass(frozen=True)
class EvalOptions:
    """The flags of covey eval."""

    tasks: tuple[str, ...] = ()  # empty: those of the settings
    n: int | None = None
    ks: tuple[int, ...] | None = None
    limit: int | None = None
    threshold: float = THRESHOLD
    out: Path | None = None
    json: Path | None = None

    @classmethod
    def read(cls, args: CommandLine) -> EvalOptions:
        out, json, tasks = args.value("--out"), args.value("--json"), args.names("--tasks")
        if json and (tasks or len(args.positional) > 1):
            raise InputError("--json is for one model on its own tasks\n  fix: results.json in --out has all figures")
        for flag, keys in (("--tasks", TASK_KEYS), ("--n", ("eval.n=",))):
            clash = [word for word in args.settings if word.startswith(keys)]
            if args.value(flag) and clash:
                raise InputError(f"{flag} and {clash[0]} contradict each other\n  fix: give one of them")
        ks = {whole_number("--k", part) for part in args.names("--k")}
        return cls(
            tasks=tasks,
            n=None if args.value("--n") is None else args.integer("--n", 1),
            ks=tuple(sorted(ks)) or None,
            limit=None if args.value("--limit") is None else args.integer("--limit", 1),
            threshold=args.number("--solved", THRESHOLD),
            out=Path(out).expanduser() if out else None,
            json=Path(json) if json else None,
        )

    def with_n(self, args: CommandLine) -> CommandLine:
        """The command line with --n as settings: 1 is greedy, more are sampled, unless eval.modes is set."""
        if self.n is None:
            return args
        mode = "eval.modes=[greedy]" if self.n == 1 else "eval.modes=[sampled]"
        modes = [] if any(word.startswith("eval.modes=") for word in args.settings) else [mode]
        return dataclasses.replace(args, settings=[*args.settings, f"eval.n={self.n}", *modes])

    def ks_for(self, n: int) -> tuple[int, ...]:
        return powers_up_to(n) if self.ks is None else tuple(k for k in self.ks if k <= n)


@dataclass(frozen=True)
class PlannedEval:
    """One model on one set of tasks, in one or two modes."""

    model: str  # as named on the command line
    task: str
    prepared: Prepared
    jobs: tuple[EvalJob, ...]
    tree: Mapping[str, Any]  # of the settings
    workers: WorkerPool | None = None

    @property
    def title(self) -> str:
        return f"{self.model} on {self.task}"

    def with_workers(self, resources: ExitStack) -> PlannedEval:
        """The plan with processes for the user's functions. Open them before the first model is loaded."""
        workers = open_workers(self.prepared.agent, self.prepared.rewards, resources)
        agent = with_workers(self.prepared.agent, workers)
        return dataclasses.replace(self, prepared=dataclasses.replace(self.prepared, agent=agent), workers=workers)

    def identity(self) -> dict[str, Any]:
        """Everything that answers depend on. Two evaluations with the same identity may share a folder."""
        sections: dict[str, Any] = {
            section: {k: v for k, v in self.tree[section].items() if keys is None or k in keys}
            for section, keys in ANSWERS_DEPEND_ON.items()
        }
        tasks, rewards = self.prepared.tasks, self.prepared.rewards
        sections |= {"seed": self.tree["seed"], "tasks": len(tasks.validation), "weights": self._weights()}
        return sections | {
            "digest of tasks": digest_tasks((*tasks.train, *tasks.validation))[:16],
            "digest of rewards": digest_rewards(rewards)[:16],
        }

    def _weights(self) -> dict[str, Any]:
        """The location of the weights; for local files also size and time of the last change."""
        source = self.prepared.model
        assert source is not None
        folders = [Path(place) for place in (source.path, source.adapter) if place is not None]
        files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
        return {str(folder): "a model of the hub" for folder in folders if not folder.is_dir()} | {
            str(file): f"{file.stat().st_size} bytes, {file.stat().st_mtime_ns}" for file in files
        }


# -- Planning ----------------------------------------------------------------------------------------------------------


def plan_evaluation(args: CommandLine, options: EvalOptions) -> list[PlannedEval]:
    """All plans, model by model. An error in any of them is raised before the first model is loaded."""
    for name in args.positional:
        if args.positional.count(name) > 1:
            raise InputError(f"{name} is named twice\n  fix: name each model once")
    sampled = options.with_n(args)
    plans = [_plan(name, task, sampled, options) for name in args.positional for task in (options.tasks or (None,))]
    plans = [_renamed(plan, paths) if (paths := _ambiguous_files(plan, plans)) else plan for plan in plans]
    warnings = [text for plan in plans for text in plan.prepared.tasks.warnings]
    warnings += _unused_settings(plans, sampled)
    for text in dict.fromkeys([*warnings, *_setting_mismatches(plans)]):
        print(f"warning: {text}", file=sys.stderr)
    return plans


def _unused_settings(plans: Sequence[PlannedEval], args: CommandLine) -> list[str]:
    """Warnings about given settings of the mode sampled, if no model is sampled in it."""
    if any(job.spec.mode == "sampled" for plan in plans for job in plan.jobs):
        return []
    given = dict.fromkeys(word.partition("=")[0] for word in args.settings if word != "eval.n=1")
    names = [key.removeprefix("eval.") for key in given if key in {f"eval.{name}" for name in SAMPLED_MODE}]
    return unused_by_greedy(names, plans[0].prepared.config.eval.modes)


def _ambiguous_files(plan: PlannedEval, plans: Sequence[PlannedEval]) -> str | None:
    """The paths of the plan's files, if another plan has other tasks in files of the same name. Their ids are the same
    too, so they would be compared."""
    paths = _file_paths(plan)
    for other in plans if paths is not None else ():
        if other.task == plan.task and _file_paths(other) not in (None, paths) and _contents(other) != _contents(plan):
            return paths
    return None


def _file_paths(plan: PlannedEval) -> str | None:
    config = plan.prepared.config
    if config.data.val_files is None or config.agent.name in OWN_TASKS:
        return None
    return ", ".join(map(str, find_files("data.val_files", config.data.val_files)))


def _contents(plan: PlannedEval) -> list[tuple[Any, Any]]:
    return [(task.messages[-1]["content"], task.answer) for task in plan.prepared.tasks.validation]


def _renamed(plan: PlannedEval, task: str) -> PlannedEval:
    jobs = tuple(dataclasses.replace(job, spec=dataclasses.replace(job.spec, task=task)) for job in plan.jobs)
    return dataclasses.replace(plan, task=task, jobs=jobs)


def _setting_mismatches(plans: Sequence[PlannedEval]) -> list[str]:
    """Warnings about models that are compared under different settings, since runs bring their own."""
    warnings = []
    for plan in plans:
        first = next(other for other in plans if other.task == plan.task)
        for ours, theirs in zip(plan.jobs, first.jobs, strict=False):
            settings = [dataclasses.asdict(job.sampling) | {"n": job.spec.n} for job in (ours, theirs)]
            differing = [key for key in settings[0] if settings[0][key] != settings[1][key]]
            if plan.prepared.config.agent != first.prepared.config.agent:
                differing.append("agent")
            if digest_rewards(plan.prepared.rewards) != digest_rewards(first.prepared.rewards):
                differing.append("reward")
            if differing:
                pair = f"{plan.model} and {first.model} are evaluated on {plan.task} with different settings"
                warnings.append(
                    f"{pair} ({', '.join(differing)}): for a fair comparison give the setting on the command line, "
                    "such as eval.max_tokens=512"
                )
    return warnings


def _plan(name: str, task: str | None, args: CommandLine, options: EvalOptions) -> PlannedEval:
    """A model without tasks of its own is evaluated on the first run's tasks with that run's settings."""
    own_settings = args.value("--config") or args.value("--config-name")
    run = None if own_settings else next(filter(is_run, args.positional), None)
    composed = compose_for(name, args, run) if task is None else _compose_tasks(name, task, args)
    tasks = None if task is None else load_tasks(composed.config.data, composed.config.seed)
    if tasks is not None:
        tasks = _validation_only(tasks, options)
    prepared = prepare(composed, tasks=tasks, training=False)
    prepared = dataclasses.replace(prepared, tasks=_validation_only(prepared.tasks, options))
    task = task or _task_name(prepared)
    if not prepared.tasks.validation:
        raise InputError(
            f"{task} has no validation tasks: no tasks to evaluate\n"
            "  fix: give --tasks NAME, data=NAME or data.val_files=FILE"
        )
    jobs = tuple(_job(name, task, mode, prepared, options) for mode in prepared.config.eval.modes)
    if not jobs:
        raise InputError("eval.modes is empty: nothing to evaluate\n  fix: eval.modes=[greedy], [sampled] or both")
    most = max(job.spec.n for job in jobs)
    if options.ks is not None and (k := options.ks[-1]) > most:
        raise InputError(
            f"pass@{k} needs {k} answers to each task, and there are {most}\n  fix: --n {k}, or --k {most}"
        )
    return PlannedEval(name, task, prepared, jobs, composed.tree)


def _validation_only(tasks: TaskSet, options: EvalOptions) -> TaskSet:
    return dataclasses.replace(tasks, train=(), validation=tasks.validation[: options.limit])


def _compose_tasks(name: str, task: str, args: CommandLine) -> Composed:
    """The settings for a named set of tasks. A run keeps its agent and lengths, but not its tasks and rewards."""
    chosen = f"data.val_files={literal([task])}" if task.endswith(SUFFIXES) else f"data.name={task}"
    cleared = [f"{key}=null" for key in ("data.train_files", "data.val_files") if not chosen.startswith(key)]
    args = dataclasses.replace(args, settings=[*args.settings, chosen, *cleared])
    composed = compose_for(name, args)
    if not is_run(name):
        return composed
    own = compose_command(args)
    return dataclasses.replace(
        composed,
        config=dataclasses.replace(composed.config, data=own.config.data, reward=own.config.reward),
        tree=composed.tree | {"data": own.tree["data"], "reward": own.tree["reward"]},
    )


def _job(model: str, task: str, mode: str, prepared: Prepared, options: EvalOptions) -> EvalJob:
    config, reward = prepared.config, prepared.trained_reward
    n = config.eval.n if mode == "sampled" else 1
    longest = config.eval.max_tokens or config.rollout.max_tokens
    try:
        sampling = eval_sampling(config.eval, mode, longest, tuple(config.rollout.stop))
    except ValueError as error:
        raise InputError(f"eval: {error}") from error
    if n > 1 and sampling.temperature == 0:
        raise InputError(
            f"{n} answers with eval.temperature=0 are one answer, {n} times\n  fix: --n 1, or a positive temperature"
        )
    votes = votes_of(reward)
    same = votes.same if votes is not None else None
    spec = EvalSpec(model, task, mode, n, reward, same, options.threshold, options.ks_for(n))
    return EvalJob(spec, prepared.tasks.validation, sampling, votes, config.eval.batch_size)


def _task_name(prepared: Prepared) -> str:
    config, data = prepared.config, prepared.config.data
    if config.agent.name in OWN_TASKS:
        return str(config.agent.environment)
    files = data.val_files or data.train_files
    if files is None:
        return data.name
    return ", ".join(Path(file).name for file in ([files] if isinstance(files, str) else files))


# -- Running -----------------------------------------------------------------------------------------------------------


def evaluate(plans: Sequence[PlannedEval], options: EvalOptions, command: str) -> tuple[Report, Path]:
    """Sample all missing answers; the report and the folder of the evaluation."""
    with ExitStack() as resources:
        plans = [plan.with_workers(resources) for plan in plans]
        folder = EvalFolder(_eval_path(options, plans), {plan.title: plan.identity() for plan in plans}, command)
        resources.callback(folder.close)
        print_status(f"writing to {folder.path}")
        with _resume_hint_on_failure(command, options, folder):
            _sample_missing(plans, folder)
        return _report(plans, folder, command), folder.path


def _eval_path(options: EvalOptions, plans: Sequence[PlannedEval]) -> Path:
    if options.out is not None:
        return options.out
    output = Path(plans[0].prepared.config.logging.output_dir)
    base = output / "eval" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    numbered = (base.with_name(f"{base.name}-{number}") for number in range(1, 1000))
    return next(path for path in (base, *numbered) if not path.exists())


def _sample_missing(plans: Sequence[PlannedEval], folder: EvalFolder) -> None:
    """One model after the other. A model without missing answers is not loaded."""
    jobs = [job for plan in plans for job in plan.jobs]
    done = folder.done([job.spec for job in jobs])
    total = sum(len(job.tasks) * job.spec.n for job in jobs)
    before = sum(len(done[job.spec.key]) * job.spec.n for job in jobs)
    if before:
        print_status(f"{before} of {total} answers are there already")

    def is_missing(plan: PlannedEval) -> bool:
        return any(len(done[job.spec.key]) < len(job.tasks) for job in plan.jobs)

    with ProgressLine(total, before, unit="answers") as line:
        for model in dict.fromkeys(plan.model for plan in plans):
            if rest := [plan for plan in plans if plan.model == model and is_missing(plan)]:
                asyncio.run(_sample_model(rest, done, folder, line))
                gc.collect()  # frees its weights before the next model is loaded


async def _sample_model(
    plans: Sequence[PlannedEval], done: Mapping[Key, set[int]], folder: EvalFolder, line: ProgressLine
) -> None:
    """All sets of tasks for one model."""
    from covey.models.loading import load_policy

    first = plans[0].prepared
    assert first.model is not None
    policy = load_policy(first.model, first.config.model)
    engine = make_engine(first, policy)
    try:
        await engine.publish(policy, version=0)
        line.start_clock()
        for plan in plans:
            await _sample_tasks(plan, engine, done, folder, line)
    finally:
        engine.close()


async def _sample_tasks(
    plan: PlannedEval, engine: RolloutEngine, done: Mapping[Key, set[int]], folder: EvalFolder, line: ProgressLine
) -> None:
    prepared = plan.prepared

    def record(answers: list[Answer]) -> None:
        folder.append(answers)
        line.advance(len(answers), sum(answer.tokens for answer in answers), plan.title)

    with ExitStack() as resources:
        rewards = open_rewards(prepared.config, prepared.rewards, plan.workers, resources)
        collector = make_collector(prepared, engine, rewards)
        async with service_of(prepared.agent):
            for job in plan.jobs:
                await job.run(collector, done[job.spec.key], record)


def _report(plans: Sequence[PlannedEval], folder: EvalFolder, command: str) -> Report:
    """The report, computed from the answers file alone, so that a resumed evaluation gives the same."""
    subjects = [job.spec for plan in plans for job in plan.jobs]
    order = list(dict.fromkeys((spec.task, spec.mode) for spec in subjects))
    subjects.sort(key=lambda spec: order.index((spec.task, spec.mode)))  # models of one task and mode are adjacent
    answers = folder.answers(subjects)
    results = [compute_scores(spec, answers[spec.key]) for spec in subjects]
    return Report(results, compare_all(subjects, answers), command)


def check_answered(results: Sequence[Scores]) -> None:
    for result in results:
        if not result.answers:
            cause = next(iter(result.failures))
            spec = result.spec
            raise RunFailed(f"No answer of {spec.model} to {spec.task} was scored: {cause}: {result.example}")


@contextmanager
def _resume_hint_on_failure(command: str, options: EvalOptions, folder: EvalFolder) -> Iterator[None]:
    resume = command if options.out is not None else f"{command} --out {shlex.quote(str(folder.path))}"
    try:
        yield
    except InputError:
        folder.abandon()
        raise
    except KeyboardInterrupt:
        print_status(f"\nto continue from here:  {resume}")
        raise
    except RunFailed as error:
        error.add_note(f"  to continue from here:  {resume}")
        raise


def print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
