"""Supervised fine-tuning: the same learner, packing, checkpoints and folder as reinforcement learning, and nothing to
sample. A demonstration is an episode that somebody else played; its turns are learned from as they stand.

    demonstrations → rows → pack → −log π → update
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.algorithms.likelihood import Likelihood
from covey.config.schema import Config
from covey.learner.learner import Ask, Learner, NonFiniteError
from covey.loop.checkpoint import Checkpoint, CheckpointStore
from covey.loop.folder import RunFolder
from covey.loop.limit import TimeLimit, time_limit
from covey.loop.samples import episode_rows, minibatches, to_samples
from covey.loop.step import merge
from covey.protocols import Metrics
from covey.redact import hide_known
from covey.tasks import batch_for_step
from covey.telemetry import Telemetry, write_report
from covey.types import Collected, Episode, Group, Samples

AT_ONCE = 256  # demonstrations whose figures are held at once
# Of a policy that sampled what it learns from; a demonstration was sampled by nobody.
MEANINGLESS = ("policy/ratio_mean", "policy/ratio_max", "policy/kl_old", "policy/ess")


@dataclass
class SftRun:
    """Everything that a run of `covey sft` is made of."""

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
    best: dict[str, float] | None = None  # the lowest validation loss among the checkpoints
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder.path

    def train(self) -> SftRun:
        status = "failed"
        try:
            if self.config.eval.before and self.first_step == 0:
                self.evaluate(0)
            status = "finished" if self._all_steps() else "interrupted"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self.telemetry.close(status)
            self.folder.set_status(status)
            self.folder.release()
        write_report(self.path)
        return self

    def _all_steps(self) -> bool:
        """Whether all were made, or `loop.max_minutes` or SIGTERM ended them, with a checkpoint to go on from."""
        with time_limit(self.config.loop.max_minutes) as limit:
            for index in range(self.first_step, self.total_steps):
                self._step(index, limit)
                if limit.reached and index + 1 < self.total_steps:
                    return False
        return True

    def _step(self, index: int, limit: TimeLimit) -> None:
        epoch, episodes = self._batch(index)
        samples = as_samples(episodes)
        with self.telemetry.stage("update"):
            try:
                metrics = self._update(samples)
            except NonFiniteError:
                self._save_offenders(index, episodes)
                raise
        figures = {
            "sft/epoch": float(epoch),
            "sft/demonstrations": float(len(episodes)),
            "sft/tokens": float(samples.mask_RT.sum()),
            "perf/read_tokens": float(sum(row.length for row in samples.rows)),
        }
        self.telemetry.step(index, metrics | figures, None, ())
        done, every, save = index + 1, self.config.eval.every, self.config.loop.save_every
        last, over = done == self.total_steps, limit.passed()
        if (last and self.config.eval.after) or (every and done % every == 0):
            self.evaluate(done)
        if (last and self.config.loop.save_final) or (save and done % save == 0) or (over and not last):
            with self.telemetry.stage("checkpoint"):
                self.checkpoint(done)

    def _batch(self, index: int) -> tuple[int, list[Episode]]:
        data = self.config.data
        return batch_for_step(
            self.demonstrations, index, data.train_batch_size, seed=self.config.seed, shuffle=data.shuffle
        )

    def _update(self, samples: Samples) -> Metrics:
        advantages, plan = self.algorithm.advantages(samples), self.config.learner
        batches = minibatches(samples, advantages, groups_per_batch=plan.mini_batch_size, epochs=plan.epochs)
        metrics = merge([self.learner.update(batch, self.algorithm)[0] for batch in batches])
        return {name: value for name, value in metrics.items() if name not in MEANINGLESS}

    def evaluate(self, done: int) -> Metrics:
        """The loss on demonstrations that are not trained on, after `done` updates."""
        if not self.validation:
            return {}
        with self.telemetry.stage("evaluate"):
            found = likelihood(self.learner, self.validation, self.config.eval.batch_size or AT_ONCE)
        self.telemetry.evaluation(done, found, None)
        self.evaluations.append((done, found))
        return found

    def checkpoint(self, done: int) -> Checkpoint:
        if self.evaluations and self.evaluations[-1][0] == done:
            loss = self.evaluations[-1][1]["eval/loss"]
            if self.best is None or loss < self.best["value"]:
                self.best = {"step": done, "value": loss}
        metrics_offset, episodes_offset = self.telemetry.offsets()
        state = {
            "metrics_offset": metrics_offset,
            "episodes_offset": episodes_offset,
            "best": self.best,
            "algorithm": self.algorithm.state_dict(),
        }
        return self.checkpoints.save(done, self.learner, self.tokenizer, state)

    def _save_offenders(self, index: int, episodes: Sequence[Episode]) -> None:
        """The demonstrations of the step that broke, so that they can be looked at."""
        shown = [{"id": episode.task.id, "messages": list(episode.messages)} for episode in episodes]
        (self.path / f"nonfinite-step-{index:06d}.json").write_text(
            hide_known(json.dumps(shown, indent=1, default=str))
        )


def as_samples(episodes: Sequence[Episode]) -> Samples:
    """Demonstrations as a step's samples: each is a group of its own, and no reward is known. The temperature is 1,
    whatever the model will be sampled with."""
    collected = Collected(tuple(Group(episode.task, (episode,)) for episode in episodes))
    return to_samples(collected, {}, temperature=1.0)


def likelihood(learner: Learner, episodes: Sequence[Episode], at_once: int) -> Metrics:
    """Mean −log π of the demonstrated tokens, and how many of them the model would have chosen itself."""
    loss, right, count = 0.0, 0.0, 0
    for start in range(0, len(episodes), at_once):
        rows = [row for at, e in enumerate(episodes[start : start + at_once]) for row in episode_rows(e, at)]
        out = learner.outputs(rows, 1.0, Ask(first_choice=True))
        assert out.first_choice is not None
        count += sum(sum(row.mask) for row in rows)
        loss -= float(out.logprobs.double().sum())  # zero where the mask is
        right += float(out.first_choice.sum())
    return {"eval/loss": loss / count, "eval/token_accuracy": right / count, "eval/tokens": float(count)}
