"""Supervised fine-tuning on demonstrations.

    demonstrations → rows → pack → −log π → update

Learner, packing, checkpoints and run folder are those of reinforcement learning, without sampling. A demonstration is
stored as an episode, whose turns are trained on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.algorithms.likelihood import Likelihood
from covey.config.schema import Config
from covey.errors import InputError, RunFailed
from covey.learner.learner import Learner, NonFiniteError
from covey.learner.token_scores import TokenQuery
from covey.protocols import Metrics
from covey.tasks import batch_for_step
from covey.telemetry import Telemetry, write_report
from covey.training.checkpoint import Best, Checkpoint, CheckpointStore, best_of
from covey.training.folder import RunFolder
from covey.training.interrupts import TimeLimit, freeze_garbage, time_limit
from covey.training.metrics import merge_updates
from covey.training.run import close_run
from covey.training.samples import episode_rows, minibatches, to_samples
from covey.training.warnings import NonFiniteUpdates
from covey.types import Collected, Episode, Group, Samples

EVAL_BATCH = 256  # demonstrations per forward batch of an evaluation, by default
# Metrics that compare the policy with the one that sampled. Demonstrations were not sampled.
MEANINGLESS = ("policy/ratio_mean", "policy/ratio_max", "policy/kl_old", "policy/ess")


@dataclass
class SftRun:
    """A run of `covey sft`."""

    config: Config
    folder: RunFolder
    learner: Learner
    algorithm: Likelihood
    telemetry: Telemetry
    checkpoints: CheckpointStore
    tokenizer: Any
    demonstrations: Sequence[Episode]
    validation: Sequence[Episode]
    total_steps: int
    first_step: int = 0
    resumed: bool = False  # from a checkpoint; if that is of step 0, the evaluation before training is recorded already
    best: Best | None = None  # the lowest validation loss among the checkpoints
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)
    terminated: bool = False  # SIGTERM ended it before its last step
    limit: TimeLimit = field(default_factory=lambda: TimeLimit(None))
    nonfinite: NonFiniteUpdates = field(init=False)

    @property
    def path(self) -> Path:
        return self.folder.path

    def train(self) -> SftRun:
        status = "failed"
        self.nonfinite = NonFiniteUpdates(
            self.path,
            limit=self.config.learner.max_skipped,
            skipped=self.learner.skipped,
            warn=self.telemetry.warn,
        )
        try:
            outcome = "finished" if self._all_steps() else "interrupted"
            write_report(self.path, outcome)  # the status is stored after it, so a run killed in between resumes
            status = outcome
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except InputError as error:  # a user's mistake that only shows in a step
            raise RunFailed(str(error)) from error
        finally:
            close_run(self.folder, self.telemetry, status)
        return self

    def _all_steps(self) -> bool:
        """Make all steps. False if `loop.max_minutes` or SIGTERM ended the run before its last step, with a
        checkpoint."""
        with time_limit(self.config.loop.max_minutes) as self.limit, freeze_garbage():
            if self.resumed:  # the previous process may have been killed before it deleted old checkpoints
                self.checkpoints.delete_old(self.first_step, self.best)
            if self.config.eval.before and not self.resumed:
                self.evaluate(0)
                if self.limit.terminated:
                    self.terminated = True
                    self._save(0, planned=False)
                    return False
            for index in range(self.first_step, self.total_steps):
                self._step(index)
                self.terminated = self.limit.terminated  # also in the last step: nothing may follow this run
                if self.limit.reached and index + 1 < self.total_steps:
                    return False
        return True

    def _step(self, index: int) -> None:
        epoch, episodes = self._batch(index)
        samples = as_samples(episodes)
        with self.telemetry.stage("update"):
            try:
                metrics = self._update(samples)
            except NonFiniteError as error:
                self.nonfinite.run_failed(index, [episode.task for episode in episodes], error)
                raise
        counts = {
            "sft/epoch": float(epoch),
            "sft/demonstrations": float(len(episodes)),
            "sft/tokens": float(samples.mask_RT.sum()),
            "perf/read_tokens": float(sum(row.length for row in samples.rows)),
        }
        with self.limit.shield_writes():
            self.telemetry.step(index, metrics | counts, None, ())
        self.nonfinite.after_step(index, metrics["optim/skipped"], [episode.task for episode in episodes])
        done, every, save = index + 1, self.config.eval.every, self.config.loop.save_every
        last = done == self.total_steps
        if (last and self.config.eval.after) or (every and done % every == 0):
            self.evaluate(done)
        planned = (last and self.config.loop.save_final) or bool(save and done % save == 0)
        if planned:
            self._save(done, planned=True)
        # Checked last, so that a signal during the evaluation or checkpoint does not allow another step.
        if self.limit.passed() and not planned and not last:
            self._save(done, planned=False)

    def _save(self, done: int, *, planned: bool) -> None:
        with self.limit.shield_writes(), self.telemetry.stage("checkpoint"):
            self.checkpoint(done, planned=planned)

    def _batch(self, index: int) -> tuple[int, list[Episode]]:
        data = self.config.data
        return batch_for_step(
            self.demonstrations, index, data.train_batch_size, seed=self.config.seed, shuffle=data.shuffle
        )

    def _update(self, samples: Samples) -> Metrics:
        advantages, plan = self.algorithm.advantages(samples), self.config.learner
        batches = minibatches(samples, advantages, groups_per_batch=plan.mini_batch_size, epochs=plan.epochs)
        metrics = merge_updates([self.learner.update(batch, self.algorithm)[0] for batch in batches])
        return {name: value for name, value in metrics.items() if name not in MEANINGLESS}

    def evaluate(self, done: int) -> Metrics:
        """The loss on held-out demonstrations, after `done` updates."""
        if not self.validation:
            return {}
        with self.telemetry.stage("evaluate"):
            metrics = likelihood(self.learner, self.validation, self.config.eval.batch_size or EVAL_BATCH)
        with self.limit.shield_writes():
            self.telemetry.evaluation(done, metrics, None)
        self.evaluations.append((done, metrics))
        return metrics

    def checkpoint(self, done: int, *, planned: bool) -> Checkpoint:
        """Write a checkpoint. `planned`: due by the settings, not because of a time limit or SIGTERM. Only planned
        checkpoints can be the best one, so that it does not depend on interruptions."""
        if planned and self.evaluations and self.evaluations[-1][0] == done:
            self.best = best_of(self.best, done, self.evaluations[-1][1]["eval/loss"], lower_is_better=True)
        metrics_offset, episodes_offset = self.telemetry.offsets()
        state = {
            "metrics_offset": metrics_offset,
            "episodes_offset": episodes_offset,
            "best": self.best,
            "algorithm": self.algorithm.state_dict(),
        }
        return self.checkpoints.save(done, self.learner, self.tokenizer, state)


def as_samples(episodes: Sequence[Episode]) -> Samples:
    """Demonstrations as the samples of a step: each is its own group, without rewards. The temperature is 1, whatever
    the model is sampled with later."""
    collected = Collected(tuple(Group(episode.task, (episode,)) for episode in episodes))
    return to_samples(collected, {}, temperature=1.0)


def likelihood(learner: Learner, episodes: Sequence[Episode], batch_size: int) -> Metrics:
    """Mean −log π of the demonstrated tokens, and the share that is the model's most likely token."""
    loss, correct, count = 0.0, 0.0, 0
    for start in range(0, len(episodes), batch_size):
        rows = [row for at, e in enumerate(episodes[start : start + batch_size]) for row in episode_rows(e, at)]
        out = learner.outputs(rows, 1.0, TokenQuery(is_argmax=True))
        assert out.is_argmax is not None
        count += sum(sum(row.mask) for row in rows)
        loss -= float(out.logprobs.double().sum())  # zero outside the mask
        correct += float(out.is_argmax.sum())
    return {"eval/loss": loss / count, "eval/token_accuracy": correct / count, "eval/tokens": float(count)}
