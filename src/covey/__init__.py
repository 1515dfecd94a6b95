"""Covey: reinforcement learning of language models and agents on groups of sampled answers.

    import covey
    run = covey.train(model="smollm2-135m", tasks="sort", algorithm="gvpo")

Names are loaded when first used, so that importing covey is quick.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "train": "covey.api",
    "Config": "covey.config.schema",
    "Task": "covey.types",
    "reward": "covey.rewards",
    "only_if": "covey.rewards",
    "agent": "covey.agents",
    "Done": "covey.protocols",
    "tool": "covey.agents.tools",
    "ToolFailure": "covey.agents.tools",
    "ToolMistake": "covey.agents.tools",
    "advantages": "covey.algorithms.functional",
    "policy_loss": "covey.algorithms.functional",
    "compute_gvpo_advantage": "covey.algorithms.functional",
    "GVPOLoss": "covey.algorithms.functional",
    "GVPOTrainer": "covey.learner.minimal",
}

__all__ = ["Config", "Done", "GVPOLoss", "GVPOTrainer", "Task", "ToolFailure", "ToolMistake", "__version__"]
__all__ += ["advantages", "agent", "compute_gvpo_advantage", "only_if", "policy_loss", "reward", "tool", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
