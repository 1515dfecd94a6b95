"""The reward for code, with a sandbox that only remembers what it was asked."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import covey.replies
import covey.sandbox
from covey.errors import InputError
from covey.rewards import RewardError
from covey.rewards.code import code_reward, last_code
from covey.sandbox import SandboxError
from covey.types import Task
from tests.rewards.replies import episode_of, scored, task_of

REAL = pytest.mark.skipif(not hasattr(covey.sandbox, "Sandbox"), reason="covey.sandbox is not part of this tree")


@dataclass
class Verdict:
    passed: int
    total: int


@dataclass
class Remembers:
    verdict: Verdict | Exception
    asked: list[Any] = field(default_factory=list)

    async def check(self, solution: str, tests: Any, *, seconds: float | None = None) -> Verdict:
        self.asked.append((solution, tests, seconds))
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.fixture(autouse=True)
def plain_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are their columns, unless the real sandbox judges."""
    if "real" not in request.node.name:
        monkeypatch.setattr(covey.sandbox, "hidden_tests", dict, raising=False)


def score(reply: str, sandbox: Any, task: Task | None = None, **options: Any) -> dict[str, float | None]:
    task = task or task_of(test_list=["assert f() == 1"])
    return scored("code_reward", task, episode_of(task, reply), sandbox=sandbox, **options)


DOCSTRING = '''def f(a):
    """Add one.

    ```
    f(1) == 2
    ```
    """
    return a + 1
'''


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nand done", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```py\nx = 1\n```\nIt prints\n```text\n1\n```", "x = 1\n"),  # Python before other blocks
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\nwhile", "x = 1\nwhile"),  # cut off
        ("    return x", "    return x"),  # continues a function
        ("```Python title='a'\n    return x\n```", "    return x\n"),
        ('```python\ns = "```"\ny = 2\n```', 's = "```"\ny = 2\n'),  # a fence stands on a line of its own
        ("- so:\n  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. a\n\n   - b\n\n     ```python\n     if x:\n         y()\n     ```\n", "if x:\n    y()\n"),
        ("- ```python\n  x = 1\n\n  y = 2\n  ```", "x = 1\n\ny = 2\n"),  # on the line of the list's mark
        ("1. so\n\t```python\n\tx = 1\n\t```", "x = 1\n"),
        ("  ```python\ndef f():\n  return 1\n  ```", "def f():\n  return 1\n"),  # only the fence is indented
        ("  ```python\n      return x\n  ```", "    return x\n"),
        ("Here:\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\nDone.\r\n", "x = 1\ny = 2\n"),
        ("````python\nx = 1\n````", "x = 1\n"),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~python\ns = '''\n```\n'''\n~~~~", "s = '''\n```\n'''\n"),
        ("```{.python}\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n`````\nthen ``` is no fence", "x = 1\n"),
        ("```python\nx = 1\n      ```\nDone.", "x = 1\n"),  # a fence that is indented too far, where there is no other
        ("Use ```python x = 1``` so.", "Use ```python x = 1``` so."),  # not a fence
        ("```python\n" + DOCSTRING + "```\nIt adds.", DOCSTRING),
        ('```python\n"""\n```\nf(1)\n```\n"""\nx = 1\n```', '"""\n```\nf(1)\n```\n"""\nx = 1\n'),
        ("```python\nx = (\n```\nor\n```text\n1\n```", "x = (\n"),  # wrong, and still only the first block
        ("<think>easy</think>```python\nx = 1\n```", "x = 1\n"),
        ("<think>\n```python\nx = 0\n```\n</think>\n\n```python\nx = 1\n```", "x = 1\n"),
        ("<think>```python\nx = 0\n```</think>x = 1", "x = 1"),  # thinking is not the answer
        ("easy\n</think>\n```python\nx = 1\n```", "x = 1\n"),  # the prompt opened it
        ("```python\ns = '</think>'\n```", "s = '</think>'\n"),
        ("```python\nx = 0\n```\n</think>\nx = 1", "\nx = 1"),
        ("<think>\n```python\nx = 1\n```", "x = 1\n"),  # thinking that never ends
        ("```text\na\n    ```\nb\n```", "a\n    ```\nb\n"),  # four spaces: not a fence
        ("```text\na\n   ```\nb\n```", "a\n"),  # three are one, and the last one opens nothing
        ("```python\nx = 1\n```\n```", "x = 1\n"),
        ("```text\na\n      ```\nb", "a\n"),  # unless there is no other
        ("- x\n\n  ```text\n  a\n      ```\n  b\n  ```", "a\n    ```\nb\n"),
        ("```python\nx = 1\r\ny = 2\n```", "x = 1\r\ny = 2\n"),  # not a reply with CRLF
        ("", ""),
    ],
)
def test_the_last_block_of_python(reply: str, code: str) -> None:
    assert last_code(reply) == code


@pytest.mark.parametrize(
    ("text", "start"),
    [
        *[("5", 0), ("<think>a</think>5", 16), (" \n<think>a</think>5", 18), ("<think>a", None)],
        *[("a</think>\n5", 9), ("a\n</think> 5", 10), ("a </think> b", 0), ("Say <think>\n</think>\n5", 0)],
    ],
)
def test_thinking_end(text: str, start: int | None) -> None:
    assert covey.replies.thinking_end(text) == start


def test_many_fences_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block looks at a few fences behind it, not at all of them."""
    tried = 0
    parses = covey.replies._parses

    def counted(code: str) -> bool:
        nonlocal tried
        tried += 1
        return parses(code)

    monkeypatch.setattr(covey.replies, "_parses", counted)
    assert last_code("```python\n(\n```\n" * 200) == "(\n"
    assert tried <= 200 * covey.replies.MAX_TRIED


def test_the_share_of_tests_or_all_of_them() -> None:
    sandbox = Remembers(Verdict(3, 4))
    assert score("```python\nx\n```", sandbox) == {
        "code_reward": 0.75,
        "code_reward/passed": 3,
        "code_reward/total": 4,
    }
    assert score("x", sandbox, all=True, seconds=2.5)["code_reward"] == 0
    assert score("x", Remembers(Verdict(4, 4)), all=True)["code_reward"] == 1
    assert score("x", Remembers(Verdict(0, 4)))["code_reward"] == 0
    columns = {"test_list": ["assert f() == 1"]}
    assert sandbox.asked == [("x\n", columns, None), ("x", columns, 2.5)]


def test_a_sandbox_that_fails_is_not_a_wrong_answer() -> None:
    with pytest.raises(RewardError, match="no room") as caught:
        score("x", Remembers(SandboxError("no room")))
    assert isinstance(caught.value.__cause__, SandboxError)
    assert caught.value.cause == "sandbox"  # so it is counted
    with pytest.raises(SandboxError):
        asyncio.run(code_reward("x", task_of(), Remembers(SandboxError())))  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="no hidden tests"):
        score("x", Remembers(Verdict(0, 0)))


def test_sandbox_requests_for_programs_and_functions() -> None:
    sandbox = Remembers(Verdict(1, 1))
    score("x", sandbox, task_of(inputs=["1\n", "2\n"], outputs=["a", "b"]))
    assert sandbox.asked[-1][1]["cases"] == [{"input": "1\n", "output": "a"}, {"input": "2\n", "output": "b"}]
    head = 'def f(x):\n    """Add one."""\n'
    columns = {"entry_point": "f", "test": "def check(c): ..."}
    score("x", sandbox, Task("t", ({"role": "user", "content": head},), None, columns))
    assert sandbox.asked[-1][1]["prompt"] == head
    score("x", sandbox, Task("t", ({"role": "user", "content": "Write f, please."},), None, columns))
    assert "prompt" not in sandbox.asked[-1][1]
    with pytest.raises(InputError, match="task t: 1 inputs and 2 outputs"):
        score("x", sandbox, task_of(inputs=["1"], outputs=["a", "b"]))


@REAL
def test_real_sandbox_and_real_problems(shared: Path) -> None:
    from covey.config.schema import SandboxConfig
    from covey.sandbox import Sandbox  # type: ignore[attr-defined,unused-ignore]

    sandbox = Sandbox.of(SandboxConfig(allow_weak=True))
    mbpp = [json.loads(line) for line in (shared / "data" / "code" / "mbpp.jsonl").open()][10:13]
    for row in mbpp:
        task = task_of(test_list=row["test_list"], test_setup_code=row["test_setup_code"])
        assert score(f"```python\n{row['code']}\n```", sandbox, task)["code_reward"] == 1
        assert score("```python\nraise SystemExit(0)\n```", sandbox, task)["code_reward"] == 0
    with gzip.open(shared / "data" / "code" / "HumanEval.jsonl.gz", "rt") as file:
        row = json.loads(next(file))
    question = ({"role": "user", "content": row["prompt"]},)
    task = Task("h", question, None, {"entry_point": row["entry_point"], "test": row["test"]})
    assert score(row["canonical_solution"], sandbox, task)["code_reward"] == 1
    assert score(f"```python\n{row['prompt']}{row['canonical_solution']}```", sandbox, task)["code_reward"] == 1
    assert score("    return None\n", sandbox, task)["code_reward"] == 0
    doubles = task_of(inputs=["2\n", "5\n"], outputs=["4", "10\n"])
    assert score("print(2 * int(input()))", sandbox, doubles)["code_reward"] == 1
    assert score("print(4)", sandbox, doubles)["code_reward"] == 0.5
    with pytest.raises(InputError, match="task t: no tests"):
        score("x", sandbox, task_of(level=3))
