"""TRL's GRPOTrainer on Covey: a script moves over by changing its imports (docs/guides/from-trl.md).

    from covey.trl import GRPOConfig, GRPOTrainer

`config.py` has TRL's arguments and defaults, `translate.py` what they are here, `rewards.py` and `data.py` TRL's forms
of rewards and data, `trainer.py` the trainer, which runs the same code as `covey.train`.
"""

from covey.trl.config import GRPOConfig
from covey.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
