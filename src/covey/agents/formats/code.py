"""Code as action: a fenced Python block is run, and its output is shown to the model.

    The sum is easy to compute:
    ```python
    print(sum(range(10)))
    ```

The first ```python block (also ```py, ```python3) of a reply is run; state is kept within the episode. Further blocks
are not run, since the model should wait for the output; an observation says so. A reply without such a block is the
final answer, whatever other fences it has. The stop string is the fence of the output: the end of a block (three
backticks) cannot be one, since it may also open a block. Malformed: a block that is empty or not closed.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.agents.formats.base import assistant, call_id, malformed, unclosed_thinking
from covey.replies import OPENING, block_at, is_python, thinking_end
from covey.tool_calls import Call, Parsed, Results, Schemas

TOOLS = ("python_executor", "code_interpreter")  # two names of the same tool
HOW = "Write the code between a line ```python and a line ```"
INSTRUCTIONS = """You can run Python. Write the code in one block, and stop after it:
```python
print(1 + 1)
```
The code is run and what it prints is shown to you. Variables are kept from block to block. Run one block at a time, as
often as you need. When you know the answer, write it without any ```python block."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    tool: str = TOOLS[0]

    name: ClassVar[str] = "code"
    stop: ClassVar[tuple[str, ...]] = ("\n```output",)
    native_tools: ClassVar[bool] = False

    def instructions(self, schemas: Schemas) -> str | None:
        return INSTRUCTIONS

    def parse(self, text: str) -> Parsed:
        message = assistant(text)
        start = thinking_end(text)
        if start is None:
            return unclosed_thinking(text) if _opening(text, 0) else Parsed(message)
        first = _opening(text, start)
        return Parsed(message, self._calls(text, first) if first else ())

    def _calls(self, text: str, first: re.Match[str]) -> tuple[Call, ...]:
        block = block_at(text, first)
        if not block.closed:
            return (malformed(text, first.start(), f"The block of code is not closed. {HOW}", self.tool),)
        code = block.code.removesuffix("\n")
        code = textwrap.dedent(code) if first["indent"] else code
        if not code.strip():
            return (malformed(text, first.start(), f"The block of code is empty. {HOW}", self.tool),)
        call = Call(self.tool, {"code": code}, call_id(code, first.start()))
        more = sum(1 for one in OPENING.finditer(text, block.end) if is_python(one))
        if not more:
            return (call,)
        blocks = "1 more block of your reply was" if more == 1 else f"{more} more blocks of your reply were"
        return call, malformed(text, -1, f"{blocks} not run: only the first one is. Wait for its output.", self.tool)

    def observe(self, results: Results) -> list[dict[str, Any]]:
        if not results:
            return []
        return [{"role": "user", "content": "\n".join(_output(call, text) for call, text in results)}]


def _opening(text: str, start: int) -> re.Match[str] | None:
    return next((one for one in OPENING.finditer(text, start) if is_python(one)), None)


def _output(call: Call, text: str) -> str:
    """The output in a fence that is longer than any fence in it."""
    if call.problem is not None:
        return text
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}output\n{text}\n{fence}"
