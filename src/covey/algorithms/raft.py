"""RAFT++: rejection sampling with the clipped ratio. Only answers with a positive reward are imitated.

Xiong et al. 2025, https://arxiv.org/abs/2504.11343

    A_i = max(R_i, 0)                        the loss is `ppo_clip`, which makes RAFT to RAFT++

There is no baseline: a good answer has the same weight whether the others of its group are good or bad, and no answer
is pushed away. RAFT itself, fine-tuning on the accepted answers, is `loss=policy_gradient`. Group size 1 is fine.

Deviations: A is that of the authors' code; the paper keeps the best answers of each prompt, which is the same for
rewards of 0 and 1, except that a prompt without a correct answer then keeps all. The loss is averaged over all answers,
not over the accepted ones: another factor, the same direction. Shapes: N episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from covey.protocols import Advantages, Needs
from covey.types import Samples


@dataclass(frozen=True, slots=True)
class Raft:
    needs: ClassVar[Needs] = Needs()
    unsupported: ClassVar[Mapping[str, str]] = {
        "kl_in=reward": "accepts answers by the sign of their reward, which a KL in the reward changes",
    }

    def advantages(self, samples: Samples) -> Advantages:
        rewards_N = samples.total_reward()
        accepted = float((rewards_N > 0).double().mean()) if len(rewards_N) else 0.0
        return Advantages(rewards_N.clamp(min=0), metrics={"raft/accepted": accepted})
