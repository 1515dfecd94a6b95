"""A whole training run: evaluate, step by step, checkpoint, finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.config.schema import Config
from covey.errors import InputError, LearnerLost, RunFailed
from covey.learner.learner import NonFiniteError
from covey.protocols import Learner, Metrics, RolloutEngine
from covey.rollout.collector import TrainingSource
from covey.storage import StorageFailed
from covey.telemetry import Telemetry, curve_figure, html_summary, read_history, write_report
from covey.training.callbacks import Callbacks
from covey.training.checkpoint import Best, Checkpoint, CheckpointStore, best_of
from covey.training.evaluate import Evaluator
from covey.training.folder import RunFolder
from covey.training.interrupts import TimeLimit, set_aside, signals_to, uninterrupted
from covey.training.record import Step, episode_view, step_episodes, step_metrics, step_view
from covey.training.step import Pipeline, StepResult, publish, sample, update
from covey.training.warnings import Offenders, StepWarnings
from covey.types import Collected, Episode, Sampling, Task


@dataclass(repr=False)
class Run:
    """Everything a run is made of, wired together by the command line (or by `covey.train`)."""

    config: Config
    folder: RunFolder
    pipeline: Pipeline
    learner: Learner
    engine: RolloutEngine
    source: TrainingSource
    evaluator: Evaluator | None
    telemetry: Telemetry
    checkpoints: CheckpointStore
    tokenizer: Any
    total_steps: int
    first_step: int = 0
    resumed: bool = False  # from a checkpoint, which may be of step 0: the evaluation before training is then recorded
    best: Best | None = None  # the best evaluation among the checkpoints
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)
    terminated: bool = False  # SIGTERM ended it before its last step
    restarts_left: int = 0  # how often it is started again after the loss of a learner
    services: Sequence[AbstractAsyncContextManager[Any]] = ()  # open as long as the run is: a server, for example
    resources: ExitStack = field(default_factory=ExitStack)  # what else ends with the run: workers, rewards' models
    callbacks: Callbacks = field(default_factory=Callbacks)
    done: int = field(init=False)  # steps whose update was made
    limit: TimeLimit = field(init=False)
    offenders: Offenders = field(init=False)  # tasks whose updates were left out
    warnings: StepWarnings = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.first_step
        self.limit = TimeLimit(self.config.loop.max_minutes)
        self._opened = AsyncExitStack()
        self._is_open = self._is_evaluated_before = self._is_concluded = self._is_closed = False
        self._stopping = False  # the step in progress is the last: `stop` was called
        self._made: tuple[Step, StepResult] | None = None  # a step whose update was made and that is not yet recorded
        self._recorded: Step | None = None  # a step whose evaluation and checkpoint are still due
        self._newest: Metrics = {}  # of the newest step
        self._is_sampling = False
        self._saved: int | None = None  # steps done at the newest checkpoint of this process
        self.warnings = StepWarnings(
            self.telemetry.warn,
            rewards=[name for name, weight in self.pipeline.schedule.weights.items() if weight],
            total_steps=self.total_steps,
            limits={
                "rollout.max_tokens": self.config.rollout.max_tokens,
                "agent.max_response_tokens": self.config.agent.max_response_tokens,
                "model.context_length": self.config.model.context_length,
                "agent.max_turns": self.config.agent.max_turns,
            },
            single=self.config.rollout.group_size == 1,
        )

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def finished(self) -> bool:
        return self.done >= self.total_steps or self._stopping

    @property
    def over(self) -> bool:
        """Whether no further step follows."""
        return self._made is None and self._recorded is None and (self.finished or self.limit.reached)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Of every step, also of those before a resume: metrics.jsonl, with the step's index as "step"."""
        return [{"step": record.step, **record.metrics} for record in read_history(self.path).steps]

    def __repr__(self) -> str:
        parts = [str(self.path), f"{self.done} of {self.total_steps} steps"]
        if self._newest:
            parts.append(f"reward/mean {self._newest['reward/mean']:.4g}")
        if self.evaluations:
            shown = {k: v for k, v in self.evaluations[-1][1].items() if k == "eval/accuracy"}
            parts += [f"{key} {value:.4g}" for key, value in shown.items()]
        return f"Run({', '.join(parts)})"

    def plot(self) -> Any:
        """The learning curve: a matplotlib Figure, which a notebook shows."""
        return curve_figure(self.path)

    def _repr_html_(self) -> str:
        return html_summary(self.path)

    async def train(self) -> Run:
        """All steps, and the end."""
        failure: BaseException | None = None
        try:
            while await self.step() is not None:
                pass
        except BaseException as error:
            failure = error
            raise
        finally:
            await self.close(failure)
        return self

    async def step(self) -> Step | None:
        """One step with the evaluation and the checkpoint that are due after it; None where no further step follows.

        A call that was cancelled is taken up by the next one where it left off: sampling and evaluation begin again,
        an update is never made twice. Before the first step comes the evaluation of the start model."""
        try:
            return await self._next_step()
        except InputError as error:  # a mistake that only a step could show: the run had started
            raise RunFailed(str(error)) from error

    async def _next_step(self) -> Step | None:
        await self.open()
        if self._recorded is None and self._made is None:
            if not await self._before_step():
                return None
            await self._make_step(self.done)
        if self._recorded is None:
            self._recorded = await self._record()
        await self._follow_up()
        self.terminated = self.limit.terminated  # also in the last step: what would follow this run does not
        made, self._recorded = self._recorded, None
        return made

    async def open(self) -> None:
        """Open what lasts as long as the run, and give the engine its weights."""
        if not self._is_open:
            await uninterrupted(self._open())

    async def _open(self) -> None:
        for service in self.services:
            await self._opened.enter_async_context(service)
        self._opened.enter_context(signals_to(self.limit))
        self._opened.enter_context(set_aside())
        self.offenders = Offenders(
            self.path,
            limit=self.config.learner.max_skipped,
            skipped=self.learner.counters()["skipped"],
            warn=self.telemetry.warn,
        )
        if self.resumed:
            # The earlier process may have been killed before it deleted old checkpoints.
            self.checkpoints.delete_old(self.first_step, self.best)
        await publish(self.pipeline, self.first_step)
        self._is_open = True

    async def _before_step(self) -> bool:
        """Whether another step follows: not after the last, nor after loop.max_minutes, SIGTERM or `stop`."""
        if not self._is_evaluated_before:
            if self.config.eval.before and not self.resumed and self.done == 0 and not self._is_evaluated():
                await self.evaluate()
            self._is_evaluated_before = True
            if self.limit.terminated:
                self.terminated = self.limit.reached = True
                await self._save(planned=False)
                return False
        if self._stopping and not self._is_concluded:
            await self._follow_up()
        return not self.over

    async def _make_step(self, index: int) -> None:
        tokens_before = self.engine.generated_tokens
        self._show_progress(self.source.attempts * self.config.data.train_batch_size, "answers")
        async with self._sampling():
            collected = await sample(self.pipeline)
        await uninterrupted(self._learn(index, collected, tokens_before))

    async def _learn(self, index: int, collected: Collected, tokens_before: int) -> None:
        try:
            result = await update(self.pipeline, collected, index)
        except NonFiniteError as error:
            self.offenders.end(index, self.source.taken, error)
            raise
        metrics = step_metrics(result) | self.engine.metrics()
        metrics["perf/generated_tokens"] = float(self.engine.generated_tokens - tokens_before)
        self._made = Step(index, self.telemetry.measure(metrics), collected.groups), result
        self.done = index + 1

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        """What was sampled in vain must not be found in the engine's cache: each step would depend on it."""
        if self._is_sampling:
            await self.engine.publish(self.learner.weights(), version=self.engine.version)
        self._is_sampling = True
        yield
        self._is_sampling = False

    async def _follow_up(self) -> None:
        """The evaluation and the checkpoint that are due after the newest step."""
        done, every, save = self.done, self.config.eval.every, self.config.loop.save_every
        if ((self.finished and self.config.eval.after) or (every and done % every == 0)) and not self._is_evaluated():
            await self.evaluate()
        planned = (self.finished and self.config.loop.save_final) or bool(save and done % save == 0)
        if planned and self._saved != done:
            await self._save(planned=True)
        # Only now: a signal during the evaluation or the checkpoint must not cost another step.
        if self.limit.passed() and not planned and not self.finished:
            await self._save(planned=False)

    def _is_evaluated(self) -> bool:
        return bool(self.evaluations) and self.evaluations[-1][0] == self.done

    def stop(self) -> None:
        """The step in progress, or the newest one, is the last: the run then ends as if it had no more."""
        self._stopping = True

    async def conclude(self) -> None:
        """Write the report and the status, and release the folder. The engine stays, for questions and evaluations."""
        if not self._is_concluded:
            status = "failed"
            try:
                status = await self._report()
            finally:
                self._end(status)

    async def close(self, error: BaseException | None = None) -> None:
        """The end, of a run that came to it or of one that failed. Closing twice is closing once."""
        if self._is_closed:
            return
        self._is_closed = True
        status = "failed"
        try:
            await self._opened.aclose()
            if error is not None:
                status = self._status_after(error)
            elif not self._is_concluded:
                status = await self._report()
        finally:
            self.engine.on_finished = lambda: None  # it refers to this run
            self._end(status, self.source.close, self.engine.close, self.resources.close)

    async def _report(self) -> str:
        """Before the status says so: a run that is killed in between is taken up again. Drawn in the thread that waits
        for the run where there is one: matplotlib keeps fonts open for every thread that ever drew."""
        reached = "finished" if self.finished else "interrupted"
        await self.callbacks.call(lambda: write_report(self.path, reached))
        return reached

    def _status_after(self, error: BaseException) -> str:
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):  # asyncio cancels at the first Ctrl-C
            return "interrupted"
        return "restarting" if isinstance(error, LearnerLost) and self.restarts_left else "failed"

    def _end(self, status: str, *others: Callable[[], None]) -> None:
        if self._is_concluded:
            close_all(*others)
        else:
            self._is_concluded = True
            close_run(self.folder, self.telemetry, status, *others)

    async def _save(self, *, planned: bool) -> Checkpoint:
        with self.telemetry.stage("checkpoint"):
            found = self.checkpoint(planned=planned)
        await self.callbacks.on_checkpoint(found.folder)
        return found

    async def save(self) -> Checkpoint:
        """A checkpoint of the run as it is now, between two steps."""
        self.check_savable()
        await self.open()
        return await self._save(planned=True)

    def check_savable(self) -> None:
        if self._is_concluded:
            raise InputError("the run has ended\n  fix: trainer.save_pretrained(FOLDER) writes its model")
        if self._made is not None:
            raise InputError("a checkpoint cannot be written in on_step\n  fix: write it between two steps")

    async def _record(self) -> Step:
        """The newest step, with what callbacks add to it."""
        assert self._made is not None
        step, result = self._made
        step = replace(step, metrics=step.metrics | await self.callbacks.on_step(step))
        self._made = None
        index, metrics = step.index, step.metrics
        episodes = step_episodes(result, index, self.config.logging.episodes_per_step, self.decode)
        self.telemetry.record(index, metrics, step_view(result, index), episodes)
        self._newest = metrics
        self.offenders.after(index, metrics["optim/skipped"], self.source.taken)
        self.warnings.after(index, result, metrics)
        return step

    async def evaluate(self) -> Metrics:
        """The policy as it is now, on the tasks that are held out."""
        if self.evaluator is None:
            return {}
        await self.open()
        done = self.done
        if self.engine.version != done:
            await self.engine.publish(self.learner.weights(), version=done)
        answers = sum(self.config.eval.n if mode == "sampled" else 1 for mode in self.config.eval.modes)
        async with self._sampling():
            with self.telemetry.stage("evaluate"):
                self._show_progress(answers * len(self.evaluator.tasks), "answers")
                found = await self.evaluator.run()
        # What it left in the engine's cache must not be found by the next step: a resumed run would not find it.
        await self.engine.publish(self.learner.weights(), version=done)
        metrics = found.metrics | await self.callbacks.on_evaluation(found.metrics)
        shown = found.sample
        reward = None if shown is None else shown.rewards.get(self.evaluator.trained_reward)
        self.telemetry.evaluation(done, metrics, None if shown is None else episode_view(shown, reward))
        self.evaluations.append((done, metrics))
        return metrics

    async def answer(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt at a task by the run's agent with the policy as it is now. It is not scored."""
        await self.open()
        if self.engine.version != self.done:
            await self.engine.publish(self.learner.weights(), version=self.done)
        async with self._sampling():
            found = await self.source.collector.answer(task, sampling)
        await self.engine.publish(self.learner.weights(), version=self.done)
        return found

    def checkpoint(self, *, planned: bool) -> Checkpoint:
        """`planned`: not only because time is up; the best is one of those, whether a run was interrupted or not."""
        done = self.done
        if planned and self.evaluations and self.evaluations[-1][0] == done:
            self.best = best_of(self.best, done, self.evaluations[-1][1].get("eval/accuracy", 0.0))
        metrics_offset, episodes_offset = self.telemetry.offsets()
        state = {
            "metrics_offset": metrics_offset,
            "episodes_offset": episodes_offset,
            "best": self.best,
            "algorithm": self.pipeline.algorithm.state_dict(),
            "source": self.source.state(),
        }
        self._saved = done
        return self.checkpoints.save(done, self.learner, self.tokenizer, state)

    def _show_progress(self, total: int, what: str) -> None:
        """Let the console count answers while they are sampled."""
        finished = 0

        def one_more() -> None:
            nonlocal finished
            finished += 1
            self.telemetry.progress(min(finished, total), total, what)

        self.engine.on_finished = one_more
        self.telemetry.progress(0, total, what)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def close_run(folder: RunFolder, telemetry: Telemetry, status: str, *others: Callable[[], None]) -> None:
    """Everything that a run holds, whatever of it fails: first the others, in turn, then its record and its folder. A
    status that a full disk does not take stays `running`, which a resumed run goes on from just as well; the error that
    ended the run is not hidden by this one."""
    close_all(
        *others,
        lambda: telemetry.close(status),
        lambda: _write_status(folder, "running" if status == "restarting" else status),
        folder.release,
    )


def close_all(*parts: Callable[[], None]) -> None:
    """In turn, whatever of it fails."""
    with ExitStack() as ending:
        for close in reversed(parts):
            ending.callback(close)


def _write_status(folder: RunFolder, status: str) -> None:
    try:
        folder.set_status(status)
    except StorageFailed:
        if status == "finished":
            raise
