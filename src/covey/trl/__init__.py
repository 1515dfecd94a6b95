"""TRL's GRPOTrainer on Covey: migrate a script by changing its imports (docs/guides/from-trl.md).

    from covey.trl import GRPOConfig, GRPOTrainer

`config.py` has TRL's arguments and defaults, `translate.py` translates them to settings, `inputs.py` converts data,
rewards and adapters, and `trainer.py` runs the same code as `covey.train`.
"""

from covey.trl.config import GRPOConfig
from covey.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
