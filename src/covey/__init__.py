"""Covey: reinforcement learning of language models and agents on groups of sampled answers.

    import covey
    run = covey.train(model="smollm2-135m", tasks="sort", algorithm="gvpo")

Names are loaded when first used, so that importing covey is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; `_HOMES` lists the same names
    from covey.agents.resolve import agent
    from covey.agents.tools.tool import ToolFailure, ToolMistake, tool
    from covey.algorithms.functional import GVPOLoss, advantages, compute_gvpo_advantage, policy_loss
    from covey.algorithms.named import (
        Cispo,
        ClipCov,
        Dapo,
        Dgdo,
        Dppo,
        DrGrpo,
        Gdpo,
        Gigpo,
        Gmpo,
        Gpg,
        Grpo,
        GrpoPassk,
        Gspo,
        Gvpo,
        KlCov,
        Luspo,
        Maxrl,
        OnlineDpo,
        Opo,
        Otb,
        Ppo,
        Raft,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        Remax,
        Rloo,
        Sapo,
        TurnReturns,
        Vespo,
    )
    from covey.config.schema import Config
    from covey.learner.minimal import GVPOTrainer
    from covey.models.loading import model_path
    from covey.protocols import Done, Observation
    from covey.rewards import only_if, reward
    from covey.trainer import Trainer, train
    from covey.training.record import Step
    from covey.training.run import Run
    from covey.types import Episode, Group, Task

__version__ = "0.1.0"

_ALGORITHMS = (
    *("Cispo", "ClipCov", "Dapo", "Dgdo", "Dppo", "DrGrpo", "Gdpo", "Gigpo", "Gmpo", "Gpg", "Grpo", "GrpoPassk"),
    *("Gspo", "Gvpo", "KlCov", "Luspo", "Maxrl", "OnlineDpo", "Opo", "Otb", "Ppo", "Raft", "ReinforcePlusPlus"),
    *("ReinforcePlusPlusBaseline", "Remax", "Rloo", "Sapo", "TurnReturns", "Vespo"),
)
_HOMES = {
    "Trainer": "covey.trainer",
    "train": "covey.trainer",
    "Run": "covey.training.run",
    "Step": "covey.training.record",
    "Config": "covey.config.schema",
    "Task": "covey.types",
    "Episode": "covey.types",
    "Group": "covey.types",
    "reward": "covey.rewards",
    "only_if": "covey.rewards",
    "agent": "covey.agents.resolve",
    "Done": "covey.protocols",
    "Observation": "covey.protocols",
    "tool": "covey.agents.tools.tool",
    "ToolFailure": "covey.agents.tools.tool",
    "ToolMistake": "covey.agents.tools.tool",
    "advantages": "covey.algorithms.functional",
    "policy_loss": "covey.algorithms.functional",
    "compute_gvpo_advantage": "covey.algorithms.functional",
    "GVPOLoss": "covey.algorithms.functional",
    "GVPOTrainer": "covey.learner.minimal",
    "model_path": "covey.models.loading",
    **dict.fromkeys(_ALGORITHMS, "covey.algorithms.named"),
}

__all__ = ["Cispo", "ClipCov", "Config", "Dapo", "Dgdo", "Done", "Dppo", "DrGrpo", "Episode", "GVPOLoss"]
__all__ += ["GVPOTrainer", "Gdpo", "Gigpo", "Gmpo", "Gpg", "Group", "Grpo", "GrpoPassk", "Gspo", "Gvpo", "KlCov"]
__all__ += ["Luspo", "Maxrl", "Observation", "OnlineDpo", "Opo", "Otb", "Ppo", "Raft", "ReinforcePlusPlus"]
__all__ += ["ReinforcePlusPlusBaseline", "Remax", "Rloo", "Run", "Sapo", "Step", "Task", "ToolFailure", "ToolMistake"]
__all__ += ["Trainer", "TurnReturns", "Vespo", "__version__", "advantages", "agent", "compute_gvpo_advantage"]
__all__ += ["model_path", "only_if", "policy_loss", "reward", "tool", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
