"""The built-in rewards by name, and how replies vote under each of them (maj@n).

A vote needs a short final answer that can be compared. Rewards without one (programs, instructions to follow,
expressions of which many are correct) have no entry in VOTES.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.errors import NamedFailure
from covey.imports import LazyTable
from covey.rewards.function import inline, reward
from covey.rewards.text import normalize_answer, short_answer
from covey.types import Episode

if TYPE_CHECKING:
    from covey.rewards.math.numbers import Number


@inline
@reward
def given(episode: Episode) -> dict[str, float | None] | None:
    """The reward that the environment or program reported for the episode: its `reward`, or else the sum of those of
    the roles; plus the rewards of the turns. All are measured as given/NAME. None if it reported nothing."""
    table, paid = episode.given, episode.turn_rewards
    if table is None and not paid:
        return None
    if table and "reward" not in table:
        _check_roles(table, episode.roles)
    turns = {"turns": sum(paid)} if paid else {}
    return {**turns, **(table or {}), "reward": episode.reported}


def _check_roles(table: Mapping[str, object], roles: Collection[str]) -> None:
    """Refuse a table without `reward`, unless it names roles. A role that has not spoken yet is unknown, so other names
    are accepted beside those of all roles that have."""
    if roles and (table.keys() <= set(roles) or set(roles) <= table.keys()):
        return
    spoke = f", and the roles of the episode are {', '.join(roles)}" if roles else ", and the episode has no roles"
    raise NamedFailure(
        "reward",
        f"the reported rewards have no 'reward' (keys: {', '.join(map(str, table))}){spoke}: give 'reward', or a value "
        "for each role",
    )


REWARDS = LazyTable(
    {
        "exact": "covey.rewards.text:exact",
        "number": "covey.rewards.math.numbers:number",
        "math_reward_string_equal": "covey.rewards.math.numbers:math_reward_string_equal",
        "sorted": "covey.rewards.generated:sorted_numbers",
        "countdown": "covey.rewards.generated:countdown",
        "format": "covey.rewards.text:answer_format",
        "math_equal": "covey.rewards.math.rewards:math_equal",
        "math_verify": "covey.rewards.math.rewards:math_verify",
        "qa_f1_reward": "covey.rewards.text:qa_f1_reward",
        "qa_em_reward": "covey.rewards.text:qa_em_reward",
        "code_reward": "covey.rewards.code:code_reward",
        "ifeval": "covey.rewards.ifeval:ifeval",
        "ifeval_composite": "covey.rewards.ifeval:ifeval_composite",
        "click_in_box": "covey.rewards.grounding:click_in_box",
        "box_iou": "covey.rewards.grounding:box_iou",
        "length": "covey.rewards.text:length",
        "repetition": "covey.rewards.text:repetition",
        "tool_call": "covey.rewards.tool_call:tool_call",
        "bfcl": "covey.rewards.bfcl:bfcl",
        "rlla": "covey.rewards.tool_call:rlla",
        "given": "covey.rewards.builtin:given",
        "gui_reward": "covey.rewards.gui:gui_reward",
        "judge": "covey.rewards.judge:Judge",
        "reward_model": "covey.rewards.reward_model:RewardModel",
        "reasoning_gym": "covey.rewards.generated:reasoning_gym",
    }
)


# -- Votes -------------------------------------------------------------------------------------------------------------

MAX_COMPARED = 200  # characters; both expressions of a comparison are the model's, so both may be hostile


@dataclass(frozen=True, slots=True)
class Votes:
    final: Callable[[str], str]  # the final answer of a reply; "" if there is none
    same: Callable[[str, str], bool]  # whether two final answers agree


def votes_of(reward: str) -> Votes | None:
    """How replies to tasks with this reward vote. For a user's own reward, replies vote by their text."""
    return VOTES.get(reward) if reward in REWARDS else TEXT


def _same_text(one: str, other: str) -> bool:
    return one == other


def _same_expression(one: str, other: str) -> bool:
    from covey.rewards.math.rewards import equal

    return one == other or (max(len(one), len(other)) <= MAX_COMPARED and equal(one, other) is True)


def _canonical(value: Number | None) -> str:
    """One spelling of a number: 1,200 and 1200. are both 1200."""
    return "" if value is None else f"{value.size}{'%' * value.percent}"


def _final_expression(reply: str) -> str:
    from covey.rewards.math.rewards import final_expression

    return final_expression(reply)


def _final_number(reply: str) -> str:
    from covey.rewards.math.numbers import whole_number

    return _canonical(whole_number(reply)) or reply.strip()


def _last_number(reply: str) -> str:
    from covey.rewards.math.numbers import last_number

    return _canonical(last_number(reply))


TEXT = Votes(str.strip, _same_text)
MATH = Votes(_final_expression, _same_expression)
QA = Votes(lambda reply: normalize_answer(short_answer(reply)), _same_text)
VOTES = {
    "exact": TEXT,
    "sorted": TEXT,
    "number": Votes(_final_number, _same_text),
    "math_reward_string_equal": Votes(_last_number, _same_text),
    "math_equal": MATH,
    "math_verify": MATH,
    "qa_f1_reward": QA,
    "qa_em_reward": QA,
}
