"""(Task, Episode) → {name: float}: what an attempt is worth."""

from covey.rewards.builtin import REWARDS
from covey.rewards.condition import only_if
from covey.rewards.function import RewardError, reward
from covey.rewards.rewardset import RewardSet, resolve_rewards
from covey.rewards.votes import Votes, votes_of

__all__ = ["REWARDS", "RewardError", "RewardSet", "Votes", "only_if", "resolve_rewards", "reward", "votes_of"]
