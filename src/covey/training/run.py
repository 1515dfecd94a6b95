"""A training run: steps, evaluations, checkpoints and the report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
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
from covey.telemetry.evaluations import remove_evaluations_after, write_evaluation
from covey.training.callbacks import Callbacks
from covey.training.checkpoint import Best, Checkpoint, CheckpointStore, best_of
from covey.training.evaluate import Evaluator
from covey.training.folder import RunFolder
from covey.training.interrupts import TimeLimit, freeze_garbage, freeze_more, handle_signals, run_to_end
from covey.training.metrics import step_metrics
from covey.training.record import Step, episode_view, step_episodes, step_view
from covey.training.step import Pipeline, StepResult, publish, sample, update
from covey.training.warnings import NonFiniteUpdates, StepWarnings
from covey.types import Collected, Episode, Failure, Sampling, Task


@dataclass(repr=False)
class Run:
    """A training run, assembled by `covey.app.build`.

    It can be driven as a whole (`train`) or step by step (`step`), and cancelled at any time in between.
    """

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
    resumed: bool = False  # from a checkpoint; if that is of step 0, the evaluation before training is recorded already
    best: Best | None = None  # the best evaluation among the checkpoints
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)
    terminated: bool = False  # SIGTERM ended it before its last step
    restarts_left: int = 0  # restarts after the loss of a learner process
    service: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)  # open during the run: a server
    resources: ExitStack = field(default_factory=ExitStack)  # closed with the run: workers, reward models
    callbacks: Callbacks = field(default_factory=Callbacks)
    done: int = field(init=False)  # steps whose update is done
    limit: TimeLimit = field(init=False)
    nonfinite: NonFiniteUpdates = field(init=False)
    warnings: StepWarnings = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.first_step
        self.limit = TimeLimit(self.config.loop.max_minutes)
        self._open_resources = AsyncExitStack()
        self._is_open = self._is_evaluated_before = self._is_concluded = self._is_closed = False
        self._stopping = False  # `stop` was called: the step in progress is the last
        self._updated: tuple[Step, StepResult] | None = None  # a step that is updated but not yet recorded
        self._recorded: Step | None = None  # a step that is recorded, with its evaluation and checkpoint still due
        self._last_metrics: Metrics = {}
        self._is_sampling = False
        self._saved: int | None = None  # steps done at the last checkpoint of this process
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
            group_of_one=self.config.rollout.group_size == 1,
            roles={
                "agent.train_roles": self.config.agent.train_roles,
                "agent.opponents": self.config.agent.opponents,
            },
            rewards_trained=not self.config.teacher.alone,
        )

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def finished(self) -> bool:
        return self.done >= self.total_steps or self._stopping

    @property
    def over(self) -> bool:
        """True if no step follows."""
        return self._updated is None and self._recorded is None and (self.finished or self.limit.reached)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step, also before a resume: metrics.jsonl, with the index of the step as "step"."""
        return [{"step": record.step, **record.metrics} for record in read_history(self.path).steps]

    def __repr__(self) -> str:
        parts = [str(self.path), f"{self.done} of {self.total_steps} steps"]
        if self._last_metrics:
            parts.append(f"reward/mean {self._last_metrics['reward/mean']:.4g}")
        if self.evaluations:
            parts += [f"{key} {value:.4g}" for key, value in self.evaluations[-1][1].items() if key == "eval/accuracy"]
        return f"Run({', '.join(parts)})"

    def plot(self) -> Any:
        """The learning curve, a matplotlib Figure."""
        return curve_figure(self.path)

    def _repr_html_(self) -> str:
        return html_summary(self.path)

    async def train(self) -> Run:
        """Make all steps and close the run."""
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
        """Make one step, and the evaluation and checkpoint that are due after it. None if no step follows.

        The first call also evaluates the start model. After a cancelled call, the next one continues: sampling and
        evaluation start again, but an update is never repeated.
        """
        try:
            return await self._next_step()
        except InputError as error:  # a user's mistake that only shows in a step
            raise RunFailed(str(error)) from error

    async def _next_step(self) -> Step | None:
        await self.open()
        if self._recorded is None and self._updated is None:
            if not await self._before_step():
                return None
            await self._sample_and_update(self.done)
        if self._recorded is None:
            self._recorded = await self._record()
        await self._follow_up()
        self.terminated = self.limit.terminated  # also in the last step: nothing may follow this run
        step, self._recorded = self._recorded, None
        return step

    async def open(self) -> None:
        """Start the service and publish the weights to the engine."""
        if not self._is_open:
            await run_to_end(self._open())

    async def _open(self) -> None:
        await self._open_resources.enter_async_context(self.service)
        self._open_resources.enter_context(handle_signals(self.limit))
        self._open_resources.enter_context(freeze_garbage())
        self.nonfinite = NonFiniteUpdates(
            self.path,
            limit=self.config.learner.max_skipped,
            skipped=self.learner.counters()["skipped"],
            warn=self.telemetry.warn,
        )
        if self.resumed:
            # The previous process may have been killed before it deleted old checkpoints.
            self.checkpoints.delete_old(self.first_step, self.best)
            remove_evaluations_after(self.path, self.first_step)
        await publish(self.pipeline, self.first_step)
        self._is_open = True

    async def _before_step(self) -> bool:
        """Whether another step follows: not after the last one, loop.max_minutes, SIGTERM or `stop`."""
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

    async def _sample_and_update(self, index: int) -> None:
        tokens_before = self.engine.generated_tokens
        self._show_progress(self.source.attempts * self.config.data.train_batch_size, "answers")
        async with self._sampling():
            collected = await sample(self.pipeline)
        await run_to_end(self._update(index, collected, tokens_before))

    async def _update(self, index: int, collected: Collected, tokens_before: int) -> None:
        try:
            result = await update(self.pipeline, collected, index)
        except NonFiniteError as error:
            self.nonfinite.run_failed(index, self.source.taken, error)
            raise
        metrics = step_metrics(result) | self.engine.metrics()
        metrics["perf/generated_tokens"] = float(self.engine.generated_tokens - tokens_before)
        self._updated = Step(index, self.telemetry.measure(metrics), collected.groups), result
        self.done = index + 1
        if index == self.first_step:
            freeze_more()

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        """Clear the engine's cache if the previous sampling was cancelled: results must not depend on it."""
        if self._is_sampling:
            await self.engine.publish(self.learner.weights(), version=self.engine.version)
        self._is_sampling = True
        yield
        self._is_sampling = False

    async def _follow_up(self) -> None:
        """Make the evaluation and the checkpoint that are due after the last step."""
        done, every, save = self.done, self.config.eval.every, self.config.loop.save_every
        if ((self.finished and self.config.eval.after) or (every and done % every == 0)) and not self._is_evaluated():
            await self.evaluate()
        planned = (self.finished and self.config.loop.save_final) or bool(save and done % save == 0)
        if planned and self._saved != done:
            await self._save(planned=True)
        # Checked last, so that a signal during the evaluation or checkpoint does not allow another step.
        if self.limit.passed() and not planned and not self.finished:
            await self._save(planned=False)

    def _is_evaluated(self) -> bool:
        return bool(self.evaluations) and self.evaluations[-1][0] == self.done

    def stop(self) -> None:
        """End the run after the step in progress, as if it were the last."""
        self._stopping = True

    async def conclude(self) -> None:
        """Write the report and the status, and release the folder. The engine can still be used."""
        if not self._is_concluded:
            status = "failed"
            try:
                status = await self._report()
            finally:
                self._end(status)

    async def close(self, error: BaseException | None = None) -> None:
        """End the run, after its last step or because of an `error`. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        status = "failed"
        try:
            await self._open_resources.aclose()
            if error is not None:
                status = self._status_after(error)
            elif not self._is_concluded:
                status = await self._report()
        finally:
            self.source.collector.on_episode = lambda: None  # the callback holds a reference to this run
            self._end(status, self.source.close, self.engine.close, self.resources.close)

    async def _report(self) -> str:
        """Write the report and return the status. The status is stored after it, so a run killed in between resumes.

        The caller's thread draws, because matplotlib keeps fonts open for every thread that has drawn.
        """
        status = "finished" if self.finished else "interrupted"
        await self.callbacks.call(lambda: write_report(self.path, status))
        return status

    def _status_after(self, error: BaseException) -> str:
        if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)):  # asyncio cancels on the first Ctrl-C
            return "interrupted"
        return "restarting" if isinstance(error, LearnerLost) and self.restarts_left else "failed"

    def _end(self, status: str, *resources: Callable[[], None]) -> None:
        if self._is_concluded:
            close_all(*resources)
        else:
            self._is_concluded = True
            close_run(self.folder, self.telemetry, status, *resources)

    async def _save(self, *, planned: bool) -> Checkpoint:
        with self.telemetry.stage("checkpoint"):
            checkpoint = self.checkpoint(planned=planned)
        await self.callbacks.on_checkpoint(checkpoint.folder)
        return checkpoint

    async def save(self) -> Checkpoint:
        """Write a checkpoint now, between two steps."""
        self.check_savable()
        await self.open()
        return await self._save(planned=True)

    def check_savable(self) -> None:
        if self._is_concluded:
            raise InputError("the run has ended\n  fix: trainer.save_pretrained(FOLDER) writes its model")
        if self._updated is not None:
            raise InputError("a checkpoint cannot be written in on_step\n  fix: write it between two steps")

    async def _record(self) -> Step:
        """Record the step, with the metrics that callbacks add."""
        assert self._updated is not None
        step, result = self._updated
        step = replace(step, metrics=step.metrics | await self.callbacks.on_step(step))
        self._updated = None
        index, metrics = step.index, step.metrics
        episodes = step_episodes(result, index, self.config.logging.episodes_per_step, self.decode)
        self.telemetry.record(index, metrics, step_view(result, index), episodes)
        self._last_metrics = metrics
        self.nonfinite.after_step(index, metrics["optim/skipped"], self.source.taken)
        self.warnings.after_step(index, result, metrics)
        return step

    async def evaluate(self) -> Metrics:
        """Evaluate the current policy on the held-out tasks."""
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
                evaluation = await self.evaluator.run()
        # Clears the engine's cache: the next step must not depend on it, since a resumed run would not have it.
        await self.engine.publish(self.learner.weights(), version=done)
        write_evaluation(self.path, done, evaluation.answers)
        saved, self._saved = self._saved, None
        metrics = evaluation.metrics | await self.callbacks.on_evaluation(evaluation.metrics)
        shown = evaluation.sample
        reward = None if shown is None else shown.rewards.get(self.evaluator.trained_reward)
        self.telemetry.evaluation(done, metrics, None if shown is None else episode_view(shown, reward))
        self.evaluations.append((done, metrics))
        if self._saved is None:
            self._saved = saved
        else:  # a callback wrote a checkpoint, which lacks this evaluation
            with self.telemetry.stage("checkpoint"):
                self.checkpoint(planned=True)
        return metrics

    async def answer(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt at a task by the run's agent with the current policy. It is not scored. A mistake in the task is
        a failure of this episode and does not end the run."""
        await self.open()
        if self.engine.version != self.done:
            await self.engine.publish(self.learner.weights(), version=self.done)
        async with self._sampling():
            try:
                episode = await self.source.collector.answer(task, sampling)
            except InputError as error:
                episode = Episode(task, (), task.messages, failure=Failure("question", str(error)))
        await self.engine.publish(self.learner.weights(), version=self.done)
        return episode

    def checkpoint(self, *, planned: bool) -> Checkpoint:
        """Write a checkpoint. `planned`: due by the settings, not because of a time limit or SIGTERM. Only planned
        checkpoints can be the best one, so that it does not depend on interruptions."""
        done = self.done
        if planned and self._is_evaluated() and (value := self.evaluations[-1][1].get("eval/accuracy")) is not None:
            self.best = best_of(self.best, done, value)
        metrics_offset, episodes_offset = self.telemetry.offsets()
        state = {
            "metrics_offset": metrics_offset,
            "episodes_offset": episodes_offset,
            "best": self.best,
            "algorithm": self.pipeline.algorithm.state_dict(),
            "source": self.source.state(),
        }
        self._saved = done
        return self.checkpoints.save(done, self.learner, self.tokenizer, state, more=self.source.save)

    def _show_progress(self, total: int, what: str) -> None:
        """Count episodes on the console as they end."""
        finished = 0

        def one_more() -> None:
            nonlocal finished
            finished += 1
            self.telemetry.progress(min(finished, total), total, what)

        self.source.collector.on_episode = one_more
        self.telemetry.progress(0, total, what)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


def close_run(folder: RunFolder, telemetry: Telemetry, status: str, *resources: Callable[[], None]) -> None:
    """Close all that a run holds, even if some of it fails: the resources in order, then telemetry and the run folder.

    If the disk is full, the status stays `running`; such a run can be resumed too.
    """
    close_all(
        *resources,
        lambda: telemetry.close(status),
        lambda: _write_status(folder, "running" if status == "restarting" else status),
        folder.release,
    )


def close_all(*resources: Callable[[], None]) -> None:
    """Close in order, even if some fail."""
    with ExitStack() as stack:
        for close in reversed(resources):
            stack.callback(close)


def _write_status(folder: RunFolder, status: str) -> None:
    try:
        folder.set_status(status)
    except StorageFailed:
        if status == "finished":  # otherwise this error would hide the one that ended the run
            raise
