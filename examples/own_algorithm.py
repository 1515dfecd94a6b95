"""An algorithm outside of the package: its advantage and its loss.

    python examples/own_algorithm.py
    covey train algorithm=examples/own_algorithm.py:Wins algorithm.penalty=0.2 data=largest

An algorithm is a dataclass with `advantages` (rewards → advantages), `loss` (advantages and log-probs → a loss per
token), or both, as here; a missing one is GRPO's. Its fields are settings. KL, importance correction, overlong shaping
and dynamic sampling work with it as with any other algorithm (docs/algorithms/README.md). The types are defined in
covey/protocols.py and covey/types.py.

    A_i = (wins_i − losses_i) / (k − 1)             against the other k − 1 answers to the same question
    L_t = −r_t A_i + ½ λ (log r_t)²                 r_t = π/π_old of a token, λ: `penalty`

Only the order of the rewards counts, so an extreme reward does not change the advantages of other answers. The penalty
keeps later updates on the same samples (`learner.epochs`) close to the sampling policy; there is no clipping.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import covey
from covey.protocols import Advantages, Couples, Metrics, Needs, TokenOutputs
from covey.ranges import Coefficient, check_ranges
from covey.types import Batch, Samples


@dataclass(frozen=True)
class Wins:
    """Advantage: the answers of the group that an answer beats. Loss: a quadratic penalty instead of clipping."""

    needs: ClassVar[Needs] = Needs(min_group_size=2)
    term: ClassVar[str] = "policy"  # the loss is recorded as policy/loss
    couples: ClassVar[Couples] = "nothing"  # the loss of a token depends on no other token's log-prob
    on_policy_only: ClassVar[bool] = False  # several updates per batch are fine

    penalty: Coefficient = 0.1  # λ, for moving away from the sampling policy

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        """[N], computed over all answers of the step."""
        rewards_N, group_N = samples.total_reward(), samples.group_N
        same_NN = group_N[:, None] == group_N[None, :]
        beats_NN = (rewards_N[:, None] - rewards_N[None, :]).sign() * same_NN  # 1: i beats j, −1: j beats i
        others_N = (same_NN.sum(1) - 1).clamp(min=1)
        return Advantages(beats_NN.sum(1) / others_N)

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        """[R, T]; the mean over tokens and answers is taken elsewhere (`algorithm.aggregation`)."""
        log_ratio_RT = out.logprobs - batch.old_logprobs_RT
        return -log_ratio_RT.exp() * batch.advantages_RT + 0.5 * self.penalty * log_ratio_RT**2

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        log_ratio_RT = (out.logprobs - batch.old_logprobs_RT)[batch.mask_RT]
        return {"policy/log_ratio_max": float(log_ratio_RT.abs().max())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()

    run = covey.train(
        model=args.model,
        tasks="largest",
        algorithm=Wins(penalty=0.2),
        data={"train_batch_size": 8, "val_size": 50},
        rollout={"group_size": 8, "max_tokens": 6},
        learner={"lr": 3e-5, "epochs": 2},
        loop={"total_steps": args.steps},
    )
    for step, metrics in run.evaluations:
        print(f"after {step} steps: accuracy {metrics['eval/accuracy']:.2f}")
