"""python_executor (= code_interpreter): runs the model's code in a sandbox, with one interpreter per episode.

Errors of the code, timeouts included, are shown to the model. Errors of the sandbox are failures of the episode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from covey.agents.tools.session import NO_OUTPUT
from covey.agents.tools.tool import Kind, Tool, ToolFailure, ToolMistake, tool
from covey.errors import InputError
from covey.replies import PYTHON, unfenced
from covey.sandbox import Outcome, Sandbox

SESSION = "python_executor"  # its key in the episode's state
TAIL = 600  # characters of the output before an error, so that the error itself is not cut off
KILLED: dict[str, tuple[Kind, str]] = {
    "deadline": ("deadline", "the code ran for too long and was stopped"),
    "cpu": ("deadline", "the code used too much CPU time and was stopped"),
    "memory": ("raised", "the code used too much memory and was stopped"),
    "output": ("raised", "the code printed too much and was stopped"),
}


@dataclass(frozen=True)
class PythonOptions:
    timeout: float | None = None  # seconds per execution; null: sandbox.seconds


def make_python(options: PythonOptions, sandbox: Sandbox | None) -> Tool:
    if sandbox is None:
        raise InputError("tool python_executor needs a sandbox\n  fix: resolve_tools(..., sandbox=Sandbox.of(config))")
    if options.timeout is not None and not options.timeout > 0:
        raise InputError(f"python_executor: timeout must be more than 0 seconds, got {options.timeout}")

    async def python_executor(code: str, state: dict[str, Any]) -> str:
        """Run Python code and return what it prints. Variables and imports are kept for the next call.

        Args:
            code: The Python code to run.
        """
        try:
            if SESSION not in state:
                state[SESSION] = await sandbox.session()
            outcome = await state[SESSION].execute(without_fence(code), options.timeout)
        except Exception as error:
            raise ToolFailure("sandbox", f"python_executor: {type(error).__name__}: {error}") from error
        return outcome_text(outcome)

    return replace(tool(python_executor), inline=True)


def without_fence(code: str) -> str:
    """Models often put ```python around code, even in an argument that holds nothing else."""
    block = unfenced(code, ("", *PYTHON))
    return code if block is None else block


def outcome_text(outcome: Outcome) -> str:
    """The output of the code; or a `ToolMistake` with the error and the end of the output before it."""
    if outcome.killed is None and outcome.exit_code == 0:
        return _join(outcome.stdout, outcome.stderr) or NO_OUTPUT
    kind, reason = KILLED.get(outcome.killed or "", ("raised", ""))
    if outcome.killed is None and not outcome.stderr.strip():
        reason = f"the code ended with exit code {outcome.exit_code}"
    printed = outcome.stdout if len(outcome.stdout) <= TAIL else f"[…]{outcome.stdout[-TAIL:]}"
    raise ToolMistake(kind, _join(printed, outcome.stderr[-2 * TAIL :], f"error: {reason}" if reason else ""))


def _join(*parts: str) -> str:
    return "\n".join(part.strip("\n") for part in parts if part.strip())
