"""All studies by name, and names for several."""

from __future__ import annotations

from studies.agents import CODE, INSTRUCTIONS, SEARCH, TOOLS
from studies.laptop import LARGEST
from studies.mathematics import ALGORITHMS, LARGER, LONG, REWARDS, STALENESS
from studies.plan import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (LARGEST, ALGORITHMS, LONG, LARGER, REWARDS, TOOLS, SEARCH, CODE, INSTRUCTIONS, STALENESS)
}
GROUPS = {"agents": (TOOLS.name, SEARCH.name, CODE.name, INSTRUCTIONS.name)}
NAMES = (*STUDIES, *GROUPS)


def chosen(name: str) -> list[Study]:
    """The studies of a name."""
    return [STUDIES[one] for one in GROUPS.get(name, (name,))]
