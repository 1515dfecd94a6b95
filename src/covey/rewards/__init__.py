"""Rewards: (Task, Episode) → {name: float}."""

from covey.rewards.builtin import REWARDS, Votes, votes_of
from covey.rewards.function import RewardError, reward
from covey.rewards.rewardset import RewardSet, only_if, resolve_rewards

__all__ = ["REWARDS", "RewardError", "RewardSet", "Votes", "only_if", "resolve_rewards", "reward", "votes_of"]
