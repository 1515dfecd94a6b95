"""Self-play: past policies of the run play some roles of its episodes (`agent.opponents`).

    pool      files of earlier weights in the run's folder: of every n-th step, the last few, and the first one
    engine    one more embedded engine, whose module has its own copy of the trained weights; the others are shared

Before a step samples, one policy is drawn from the pool, by the stream of (seed, step). It plays these roles in all
episodes of the step, so that attempts at a task are compared against the same opponent. Evaluations play against the
first policy of the run, so that they can be compared with each other. Tokens of these roles are not trained on.

The draw of a step depends on the seed, the step and the pool, which a checkpoint has: its folder `opponents` holds
links to the files, or copies where the file system has no links.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from covey.errors import RunFailed, unknown
from covey.protocols import Metrics
from covey.ranges import Range, check_ranges
from covey.storage import format_bytes, writing
from covey.streams import stream
from covey.weights.files import write_weights
from covey.weights.names import load_weights, trained_weights

if TYPE_CHECKING:
    from covey.config.schema import AgentConfig
    from covey.rollout.embedded import EmbeddedEngine

FOLDER = "opponents"
DRAWS = ("uniform", "recent")
OPTIONS = ("every", "keep", "draw")


@dataclass(frozen=True)
class OpponentOptions:
    """`agent.opponent_options`. The table of docs/agents.md explains them."""

    every: Annotated[int, Range(1, 1_000_000)] = 10
    keep: Annotated[int, Range(1, 1000)] = 5
    draw: str = "uniform"

    def __post_init__(self) -> None:
        check_ranges(self, "agent.opponent_options.")
        if self.draw not in DRAWS:
            raise unknown("value of agent.opponent_options.draw", self.draw, DRAWS)


def opponent_options(agent: AgentConfig) -> OpponentOptions:
    for name in agent.opponent_options:
        if name not in OPTIONS:
            raise unknown("option of agent.opponent_options", name, OPTIONS)
    return OpponentOptions(**agent.opponent_options)


class Opponents:
    """The pool of past policies, and the engine that samples from one of them."""

    def __init__(
        self,
        roles: Sequence[str],
        options: OpponentOptions,
        engine: EmbeddedEngine,
        policy: Any,
        folder: Path,
        *,
        seed: int,
    ) -> None:
        """`engine` samples with a copy of `policy`, the module that is trained. `folder`: where the pool is kept."""
        assert engine.model is not policy, "the opponent's module is a copy"
        self.roles = frozenset(roles)
        self.options = options
        self.engine = engine
        self.policy = policy
        self.folder = folder
        self.seed = seed

    # -- The pool ------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Path | None) -> None:
        """Begin with the pool of a checkpoint's folder, or with an empty one."""
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed run may have left later policies
        if checkpoint is not None and (checkpoint / FOLDER).is_dir():
            _link_all(checkpoint / FOLDER, self.folder)

    def save(self, checkpoint: Path) -> None:
        """Add the pool to the folder of a checkpoint."""
        _link_all(self.folder, checkpoint / FOLDER)

    def policy_updated(self, step: int) -> None:
        """Add the policy after `step` updates if it is due, and delete those that are too old."""
        known = self._steps()
        if step in known or (known and step % self.options.every):
            return
        write_weights(trained_weights(self.policy), self.folder, step)
        for old in self._steps()[1 : -self.options.keep]:
            self._file(old).unlink()

    def pool(self) -> tuple[int, ...]:
        """The policies that may be drawn, by the number of their updates. The first one leaves the pool too."""
        return self._steps()[-self.options.keep :]

    def _steps(self) -> tuple[int, ...]:
        files = self.folder.glob("version-*.safetensors")
        return tuple(sorted(int(file.stem.removeprefix("version-")) for file in files))

    def _file(self, step: int) -> Path:
        return self.folder / f"version-{step}.safetensors"

    # -- Drawing -------------------------------------------------------------------------------------------------------

    def draw(self, step: int) -> int:
        """The policy that the episodes of this step play against."""
        pool = self.pool()
        weights = [1] * len(pool) if self.options.draw == "uniform" else range(1, len(pool) + 1)
        return stream(self.seed, "opponent", step).choices(pool, weights)[0]

    async def use(self, step: int) -> Metrics:
        """Load the policy that is drawn for a step. Returns metrics of it."""
        drawn = self.draw(step)
        await self._load(drawn)
        return {"opponent/version": float(drawn), "opponent/age": float(step - drawn)}

    async def use_first(self) -> None:
        """Load the first policy of the run, for an evaluation."""
        await self._load(self._steps()[0])

    async def _load(self, drawn: int) -> None:
        from safetensors.torch import load_file

        await self.engine.pause()
        try:
            load_weights(self.engine.model, await asyncio.to_thread(load_file, self._file(drawn)))
        except OSError as error:
            raise RunFailed(f"the past policy of step {drawn} cannot be read: {error}") from error
        # Cached keys and values are dropped also if the weights are the same: a resumed run would not have them.
        await self.engine.publish(self.engine.model, version=drawn)
        await self.engine.resume()

    def memory_note(self) -> str:
        size = sum(weight.nbytes for _, weight in trained_weights(self.engine.model))
        kept = self.options.keep + 1
        return (
            f"agent.opponents: {', '.join(sorted(self.roles))} played by past policies; a second copy of the trained "
            f"weights takes {format_bytes(size)} of memory, and up to {kept} files {format_bytes(kept * size)} of disk"
        )

    def close(self) -> None:
        self.engine.close()


def _link_all(source: Path, target: Path) -> None:
    """The files of a folder in another one, without copying them where the file system allows it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("version-*.safetensors")):
        with writing(target / file.name, needs=file.stat().st_size):
            try:
                os.link(file, target / file.name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(file, target / file.name)
