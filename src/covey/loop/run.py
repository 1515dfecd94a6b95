"""A whole training run: evaluate, step by step, checkpoint, finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.config.schema import Config
from covey.errors import InputError, LearnerLost, RunFailed
from covey.learner.learner import NonFiniteError
from covey.loop.checkpoint import Best, Checkpoint, CheckpointStore, best_of
from covey.loop.evaluate import Evaluator
from covey.loop.folder import RunFolder
from covey.loop.garbage import set_aside
from covey.loop.limit import TimeLimit, time_limit
from covey.loop.offenders import Offenders
from covey.loop.record import episode_view, step_episodes, step_metrics, step_view
from covey.loop.step import Road, StepResult, publish, step
from covey.loop.warnings import StepWarnings
from covey.protocols import Learner, Metrics, RolloutEngine
from covey.rollout.collector import TrainingSource
from covey.storage import StorageFailed
from covey.telemetry import Telemetry, write_report


@dataclass
class Run:
    """Everything a run is made of, wired together by the command line (or by `covey.train`)."""

    config: Config
    folder: RunFolder
    road: Road
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
    offenders: Offenders = field(init=False)  # tasks whose updates were left out
    warnings: StepWarnings = field(init=False)

    def __post_init__(self) -> None:
        self.warnings = StepWarnings(
            self.telemetry.warn,
            rewards=[name for name, weight in self.road.schedule.weights.items() if weight],
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

    async def train(self) -> Run:
        status = "failed"
        try:
            self.offenders = Offenders(
                self.path,
                limit=self.config.learner.max_skipped,
                skipped=self.learner.counters()["skipped"],
                warn=self.telemetry.warn,
            )
            async with AsyncExitStack() as open_services:
                for service in self.services:
                    await open_services.enter_async_context(service)
                reached = "finished" if await self._all_steps() else "interrupted"
            write_report(self.path, reached)  # who is killed before the status says so comes back for it
            status = reached
        except (KeyboardInterrupt, asyncio.CancelledError):  # asyncio turns the first Ctrl-C into a cancellation
            status = "interrupted"
            raise
        except LearnerLost:
            status = "restarting" if self.restarts_left else "failed"
            raise
        except InputError as error:  # a mistake that only a step could show: the run had started
            raise RunFailed(str(error)) from error
        finally:
            close_run(self.folder, self.telemetry, status, self.source.close, self.engine.close, self.resources.close)
        return self

    async def _all_steps(self) -> bool:
        """False where `loop.max_minutes` or SIGTERM ended the run before its last step, with a checkpoint."""
        with time_limit(self.config.loop.max_minutes) as limit, set_aside():
            if self.resumed:  # the earlier process may have been killed before it deleted old checkpoints
                self.checkpoints.delete_old(self.first_step, self.best)
            await publish(self.road, self.first_step)
            if self.config.eval.before and not self.resumed:
                await self.evaluate(0)
                if limit.terminated:
                    self.terminated = True
                    self._save(0, planned=False)
                    return False
            for index in range(self.first_step, self.total_steps):
                await self._step(index, limit)
                self.terminated = limit.terminated  # also in the last step: what would follow this run does not
                if limit.reached and index + 1 < self.total_steps:
                    return False
        return True

    async def _step(self, index: int, limit: TimeLimit) -> None:
        tokens_before = self.engine.generated_tokens
        self._show_progress(self.source.attempts * self.config.data.train_batch_size, "answers")
        try:
            result = await step(self.road, index)
        except NonFiniteError as error:
            self.offenders.end(index, self.source.taken, error)
            raise
        generated = self.engine.generated_tokens - tokens_before
        self._record(index, result, generated)
        done, every, save = index + 1, self.config.eval.every, self.config.loop.save_every
        last = done == self.total_steps
        if (last and self.config.eval.after) or (every and done % every == 0):
            await self.evaluate(done)
        planned = (last and self.config.loop.save_final) or bool(save and done % save == 0)
        if planned:
            self._save(done, planned=True)
        # Only now: a signal during the evaluation or the checkpoint must not cost another step.
        if limit.passed() and not planned and not last:
            self._save(done, planned=False)

    def _save(self, done: int, *, planned: bool) -> None:
        with self.telemetry.stage("checkpoint"):
            self.checkpoint(done, planned=planned)

    def _record(self, index: int, result: StepResult, generated: int) -> None:
        metrics = step_metrics(result) | self.engine.metrics()
        metrics["perf/generated_tokens"] = float(generated)
        episodes = step_episodes(result, index, self.config.logging.episodes_per_step, self.decode)
        self.telemetry.step(index, metrics, step_view(result, index), episodes)
        self.offenders.after(index, metrics["optim/skipped"], self.source.taken)
        self.warnings.after(index, result, metrics)

    async def evaluate(self, done: int) -> Metrics:
        """After `done` updates."""
        if self.evaluator is None:
            return {}
        if self.engine.version != done:
            await self.engine.publish(self.learner.weights(), version=done)
        answers = sum(self.config.eval.n if mode == "sampled" else 1 for mode in self.config.eval.modes)
        with self.telemetry.stage("evaluate"):
            self._show_progress(answers * len(self.evaluator.tasks), "answers")
            found = await self.evaluator.run()
        # What it left in the engine's cache must not be found by the next step: a resumed run would not find it.
        await self.engine.publish(self.learner.weights(), version=done)
        shown = found.sample
        reward = None if shown is None else shown.rewards.get(self.evaluator.trained_reward)
        self.telemetry.evaluation(done, found.metrics, None if shown is None else episode_view(shown, reward))
        self.evaluations.append((done, found.metrics))
        return found.metrics

    def checkpoint(self, done: int, *, planned: bool) -> Checkpoint:
        """`planned`: not only because time is up; the best is one of those, whether a run was interrupted or not."""
        if planned and self.evaluations and self.evaluations[-1][0] == done:
            self.best = best_of(self.best, done, self.evaluations[-1][1].get("eval/accuracy", 0.0))
        metrics_offset, episodes_offset = self.telemetry.offsets()
        state = {
            "metrics_offset": metrics_offset,
            "episodes_offset": episodes_offset,
            "best": self.best,
            "algorithm": self.road.algorithm.state_dict(),
            "source": self.source.state(),
        }
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
    with ExitStack() as ending:
        ending.callback(folder.release)
        ending.callback(_write_status, folder, "running" if status == "restarting" else status)
        ending.callback(telemetry.close, status)
        for close in reversed(others):
            ending.callback(close)


def _write_status(folder: RunFolder, status: str) -> None:
    try:
        folder.set_status(status)
    except StorageFailed:
        if status == "finished":
            raise
