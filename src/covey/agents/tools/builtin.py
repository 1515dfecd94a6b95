"""The tools that come with Covey, by the name that users type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from covey.agents.tools.calculator import calculator
from covey.agents.tools.google import GoogleOptions, make_google_search
from covey.agents.tools.python import PythonOptions, Sandbox, make_python
from covey.agents.tools.search import SearchOptions, make_search
from covey.agents.tools.tool import Tool, tool


@dataclass(frozen=True, slots=True)
class Builtin:
    make: Callable[[Any, Sandbox | None], Tool]  # from its options, and where code of the model's runs
    options: type | None = None


@tool(ends=True)
def answer(answer: str) -> str:
    """Give the final answer. This ends the conversation.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer


BUILTIN: dict[str, Builtin] = {
    "calculator": Builtin(lambda _, __: replace(calculator, inline=True)),
    "python_executor": Builtin(make_python, PythonOptions),
    "code_interpreter": Builtin(make_python, PythonOptions),
    "search": Builtin(lambda options, _: make_search(options), SearchOptions),
    "google_search": Builtin(lambda options, _: make_google_search(options), GoogleOptions),
    "answer": Builtin(lambda _, __: replace(answer, inline=True)),
}
SAME = {"code_interpreter": "python_executor"}


def same_tool(one: str, other: str) -> bool:
    return SAME.get(one, one) == SAME.get(other, other)
