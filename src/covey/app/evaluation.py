"""What covey eval measures: every model on every set of tasks, checked before any weights are loaded."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.app.checks import digest_rewards, digest_tasks
from covey.app.compose import Words, compose_words
from covey.app.loaded_model import NAMES_TASKS, compose_for
from covey.app.parts import open_workers, with_workers
from covey.app.prepare import Prepared, prepare
from covey.app.resume import is_run
from covey.config import Composed
from covey.config.schema import Config
from covey.errors import InputError
from covey.evaluation.answers import EvalJob
from covey.evaluation.scores import THRESHOLD, EvalSpec
from covey.evaluation.statistics import powers_up_to
from covey.rewards import votes_of
from covey.tasks import TaskSet, load_tasks
from covey.training.evaluate import eval_sampling
from covey.workers import WorkerPool

FILES = (".json", ".jsonl", ".parquet", ".csv")
# Of the settings, those that change answers. Where and how fast they are sampled may change from one start to the next.
ANSWERS_DEPEND_ON: Mapping[str, tuple[str, ...] | None] = {
    "model": ("dtype", "context_length", "lora"),
    "data": ("name", "options", "val_files", "val_size", "system_prompt"),
    "agent": None,  # all of them
    "reward": None,
    "rollout": ("name", "max_tokens", "stop"),
    "eval": ("modes", "n", "temperature", "top_p", "top_k", "max_tokens"),
}


@dataclass(frozen=True)
class Request:
    """The flags of covey eval."""

    tasks: tuple[str, ...] = ()  # empty: those of the settings
    n: int | None = None
    ks: tuple[int, ...] | None = None
    limit: int | None = None
    threshold: float = THRESHOLD
    out: Path | None = None
    json: Path | None = None

    @classmethod
    def read(cls, words: Words) -> Request:
        out, written = words.text("--out"), words.text("--json")
        tasks = _parts(words, "--tasks")
        if written and (tasks or len(words.places) > 1):
            raise InputError("--json is for one model on its own tasks\n  fix: results.json in --out has all figures")
        if tasks and (given := [word for word in words.settings if word.startswith(NAMES_TASKS)]):
            raise InputError(f"--tasks and {given[0]} contradict each other\n  fix: give one of them")
        if words.text("--n") and (given := [word for word in words.settings if word.startswith("eval.n=")]):
            raise InputError(f"--n and {given[0]} contradict each other\n  fix: give one of them")
        ks = [_whole("--k", part) for part in _parts(words, "--k")]
        return cls(
            tasks=tasks,
            n=_maybe(words, "--n"),
            ks=tuple(sorted(set(ks))) or None,
            limit=_maybe(words, "--limit"),
            threshold=_number(words, "--solved", THRESHOLD),
            out=Path(out).expanduser() if out else None,
            json=Path(written) if written else None,
        )

    def sampled(self, words: Words) -> Words:
        """The same command with --n as settings: one answer is greedy, more are sampled, unless eval.modes is given."""
        if self.n is None:
            return words
        modes = [] if any(word.startswith("eval.modes=") for word in words.settings) else [_mode(self.n)]
        return dataclasses.replace(words, settings=[*words.settings, f"eval.n={self.n}", *modes])

    def ks_for(self, n: int) -> tuple[int, ...]:
        return powers_up_to(n) if self.ks is None else tuple(k for k in self.ks if k <= n)


def _mode(n: int) -> str:
    return "eval.modes=[greedy]" if n == 1 else "eval.modes=[sampled]"


@dataclass(frozen=True)
class Candidate:
    """One model on one set of tasks, in one or two modes."""

    model: str  # as it was named
    task: str
    prepared: Prepared
    measures: tuple[EvalJob, ...]
    tree: Mapping[str, Any]  # of the settings
    workers: WorkerPool | None = None

    def with_workers(self, resources: ExitStack) -> Candidate:
        """With processes for functions of the user's, to be opened before the first model is loaded."""
        workers = open_workers(self.prepared.agent, self.prepared.rewards, resources)
        agent = with_workers(self.prepared.agent, workers)
        return dataclasses.replace(self, prepared=dataclasses.replace(self.prepared, agent=agent), workers=workers)

    def identity(self) -> dict[str, Any]:
        """What answers depend on: two evaluations with the same can go on in one folder."""
        found: dict[str, Any] = {
            section: {k: v for k, v in self.tree[section].items() if keys is None or k in keys}
            for section, keys in ANSWERS_DEPEND_ON.items()
        }
        tasks, rewards = self.prepared.tasks, self.prepared.rewards
        found |= {"seed": self.tree["seed"], "tasks": len(tasks.validation), "weights": self._weights()}
        return found | {
            "digest of tasks": digest_tasks((*tasks.train, *tasks.validation))[:16],
            "digest of rewards": digest_rewards(rewards)[:16],
        }

    def _weights(self) -> dict[str, Any]:
        """Where they are, and of files the size and the time they were written."""
        source = self.prepared.model
        assert source is not None
        folders = [Path(place) for place in (source.path, source.adapter) if place is not None]
        files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
        return {str(folder): "a model of the hub" for folder in folders if not folder.is_dir()} | {
            str(file): f"{file.stat().st_size} bytes, {file.stat().st_mtime_ns}" for file in files
        }


def find_candidates(words: Words, request: Request) -> list[Candidate]:
    """All of them, model by model. A mistake in any ends the command before the first is loaded."""
    for name in words.places:
        if words.places.count(name) > 1:
            raise InputError(f"{name} is named twice\n  fix: name each model once")
    asked = request.sampled(words)
    found = [_candidate(name, task, asked, request) for name in words.places for task in (request.tasks or (None,))]
    warnings = [text for candidate in found for text in candidate.prepared.tasks.warnings]
    for text in dict.fromkeys([*warnings, *_asked_differently(found)]):
        print(f"warning: {text}", file=sys.stderr)
    return found


def _asked_differently(candidates: Sequence[Candidate]) -> list[str]:
    """Runs bring their own settings: what differs between models that are compared is no merit of theirs."""
    warnings = []
    for candidate in candidates:
        first = next(other for other in candidates if other.task == candidate.task)
        for ours, theirs in zip(candidate.measures, first.measures, strict=False):
            settings = [dataclasses.asdict(measure.sampling) | {"n": measure.spec.n} for measure in (ours, theirs)]
            differing = [key for key in settings[0] if settings[0][key] != settings[1][key]]
            if candidate.prepared.config.agent != first.prepared.config.agent:
                differing.append("agent")
            if differing:
                pair = f"{candidate.model} and {first.model} are asked {candidate.task} differently"
                warnings.append(
                    f"{pair} ({', '.join(differing)}): for a fair comparison give the setting on the command line, "
                    "such as eval.max_tokens=512"
                )
    return warnings


def _candidate(name: str, task: str | None, words: Words, request: Request) -> Candidate:
    composed = compose_for(name, words) if task is None else _compose_tasks(name, task, words)
    tasks = None
    if task is not None:
        loaded = load_tasks(composed.config.data, composed.config.seed)
        tasks = dataclasses.replace(loaded, train=(), validation=_cut(loaded, request))
    prepared = prepare(composed, tasks=tasks, training=False)
    prepared = dataclasses.replace(prepared, tasks=_only_validation(prepared.tasks, request))
    task = task or _own_name(prepared.config)
    if not prepared.tasks.validation:
        raise InputError(
            f"{task} has no validation tasks: there is nothing to ask\n"
            "  fix: give --tasks NAME, data=NAME or data.val_files=FILE"
        )
    measures = tuple(_measure(name, task, mode, prepared, request) for mode in prepared.config.eval.modes)
    _check_ks(request, measures)
    return Candidate(name, task, prepared, measures, composed.tree)


def _compose_tasks(name: str, task: str, words: Words) -> Composed:
    """The settings for a named set of tasks. A run says how its model is asked (agent, lengths); its own tasks and
    rewards stay behind."""
    chosen = f"data.val_files=[{task}]" if task.endswith(FILES) else f"data.name={task}"
    cleared = [f"{key}=null" for key in ("data.train_files", "data.val_files") if not chosen.startswith(key)]
    asked = dataclasses.replace(words, settings=[*words.settings, chosen, *cleared])
    composed = compose_for(name, asked)
    if not is_run(name):
        return composed
    own = compose_words(asked)
    return dataclasses.replace(
        composed,
        config=dataclasses.replace(composed.config, data=own.config.data, reward=own.config.reward),
        tree=composed.tree | {"data": own.tree["data"], "reward": own.tree["reward"]},
    )


def _measure(model: str, task: str, mode: str, prepared: Prepared, request: Request) -> EvalJob:
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
    spec = EvalSpec(model, task, mode, n, reward, same, request.threshold, request.ks_for(n))
    return EvalJob(spec, prepared.tasks.validation, sampling, votes, config.eval.batch_size)


def _check_ks(request: Request, measures: Sequence[EvalJob]) -> None:
    most = max((measure.spec.n for measure in measures), default=0)
    if not measures:
        raise InputError("eval.modes is empty: nothing would be asked\n  fix: eval.modes=[greedy], [sampled] or both")
    if request.ks is not None and request.ks[-1] > most:
        k = request.ks[-1]
        raise InputError(
            f"pass@{k} needs {k} answers to each task, and there are {most}\n  fix: --n {k}, or --k {most}"
        )


def _only_validation(tasks: TaskSet, request: Request) -> TaskSet:
    return dataclasses.replace(tasks, train=(), validation=_cut(tasks, request))


def _cut(tasks: TaskSet, request: Request) -> tuple[Any, ...]:
    return tasks.validation[: request.limit]


def _own_name(config: Config) -> str:
    data = config.data
    if config.agent.name == "verifiers":
        return str(config.agent.environment)
    if data.train_files is None and data.val_files is None:
        return data.name
    files = data.val_files or data.train_files
    return ", ".join(Path(file).name for file in ([files] if isinstance(files, str) else files))


def _parts(words: Words, flag: str) -> tuple[str, ...]:
    parts = (part.strip() for part in (words.text(flag) or "").split(","))
    return tuple(dict.fromkeys(part for part in parts if part))


def _maybe(words: Words, flag: str) -> int | None:
    text = words.text(flag)
    return None if text is None else _whole(flag, text)


def _whole(flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{flag} wants a number from 1, got {text!r}")
    return int(text)


def _number(words: Words, flag: str, default: float) -> float:
    text = words.text(flag)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{flag} wants a number, got {text!r}")
    return value
