"""Several roles in one episode, each with a reward of its own.

A reward that returns a dict with names of roles ({"proposer": 1.0, "solver": 0.0}) rewards each role by itself. The
episode then counts once for each role that has trained turns: as an episode that has only this role's turns, in a group
with the same role in the other attempts. Baselines, advantages and averages are so computed within a role, by every
algorithm. What other roles wrote is context. A role that the reward does not name has the reward of the whole episode.

    r_role = the named reward + the rewards that the turns of this role received
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from covey.errors import InputError
from covey.types import Episode, Group, StopReason


def names_roles(groups: Sequence[Group], weights: Mapping[str, float]) -> bool:
    """Whether a reward that is trained on, whose weight is not 0, names a role of some episode."""
    return any(
        f"{name}/{role}" in episode.rewards
        for group in groups
        for episode in group.episodes
        for role in episode.roles
        for name, weight in weights.items()
        if weight != 0
    )


def split_roles(groups: Sequence[Group], weights: Mapping[str, float]) -> tuple[list[Group], list[tuple[int, str]]]:
    """A group for each task and role, and for each of their episodes its number among those of `groups`, and the role.
    Roles without a trained turn, or without any score that is trained on, are skipped."""
    split: list[Group] = []
    owners: list[tuple[int, str]] = []
    first = 0
    for group in groups:
        if any(turn.trained and turn.role is None for episode in group.episodes for turn in episode.turns):
            raise InputError(
                f"{group.task.where}: a reward names roles, but some trained turns have none\n"
                "  fix: policy.ask(..., role=NAME) for every turn, or trained=False"
            )
        for role in dict.fromkeys(role for episode in group.episodes for role in episode.roles):
            views = [(first + at, role_view(episode, role, weights)) for at, episode in enumerate(group.episodes)]
            kept = [(at, view) for at, view in views if is_trained(view, weights)]
            if kept:
                baseline = None if group.baseline is None else role_view(group.baseline, role, weights)
                split.append(Group(group.task, tuple(view for _, view in kept), baseline))
                owners += [(at, role) for at, _ in kept]
        first += len(group.episodes)
    return split, owners


def is_trained(view: Episode, weights: Mapping[str, float]) -> bool:
    scored = any(view.rewards.get(name) is not None for name, weight in weights.items() if weight != 0)
    return scored and any(turn.trained for turn in view.turns)


def role_view(episode: Episode, role: str, weights: Collection[str]) -> Episode:
    """The episode as this role sees it: its turns, and its rewards where it has some of its own. It is cut off if that
    happened to one of its turns, or if no turn was cut off."""
    turns, stop = tuple(turn for turn in episode.turns if turn.role == role), episode.stop
    cut = {turn.role for turn in episode.turns if turn.stop is StopReason.LENGTH}
    if turns and stop is StopReason.LENGTH and cut and role not in cut:
        stop = turns[-1].stop
    own = {name: episode.rewards.get(f"{name}/{role}", episode.rewards.get(name)) for name in weights}
    view = replace(episode, turns=turns, stop=stop, rewards={**episode.rewards, **own})
    if "given" not in own or f"given/{role}" not in episode.rewards or not episode.counts_reported:
        return view
    view = replace(view, given={"reward": own["given"]})
    return replace(view, rewards={**view.rewards, "given": view.reported})  # with the rewards of its turns
