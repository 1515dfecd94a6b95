"""All studies by name, and names for several."""

from __future__ import annotations

from studies.agents import CODE, INSTRUCTIONS, SEARCH, TOOLS
from studies.laptop import LARGEST, SUMS_REWARDS
from studies.mathematics import ALGORITHMS, LARGER, LONG, REWARDS, STALENESS
from studies.plan import Study

ON_A_CPU = (LARGEST, SUMS_REWARDS)
ON_A_GPU = (ALGORITHMS, LONG, LARGER, REWARDS, TOOLS, SEARCH, CODE, INSTRUCTIONS, STALENESS)
STUDIES: dict[str, Study] = {study.name: study for study in (*ON_A_CPU, *ON_A_GPU)}
GROUPS = {"agents": (TOOLS.name, SEARCH.name, CODE.name, INSTRUCTIONS.name)}
NAMES = (*STUDIES, *GROUPS)


def chosen(name: str) -> list[Study]:
    """The studies of a name."""
    return [STUDIES[one] for one in GROUPS.get(name, (name,))]
