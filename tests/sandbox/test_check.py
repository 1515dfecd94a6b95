"""Hidden tests: right solutions pass, wrong ones do not, and no trick makes a wrong one pass."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

import pytest

from covey.errors import InputError
from covey.sandbox import Asserts, Cases, Function, Limits, Sandbox, Verdict, hidden_tests
from covey.sandbox.hidden_tests import solution_names
from covey.sandbox.inside.values import Unsupported, dumps, loads
from covey.sandbox.tiers import interpreter
from tests.sandbox.conftest import quickest_isolated, run, sandbox_of

ADD = Asserts(("assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"))


def reasons(verdict: Verdict) -> list[str]:
    return [result.reason for result in verdict.detail]


# -- Honest solutions ------------------------------------------------------------------------------------------------


def test_each_assert_counts(sandbox: Sandbox) -> None:
    verdict = run(
        sandbox.check("def add(a, b): return a + b if a else 0", Asserts((*ADD.tests, "assert add(0, 1) == 1")))
    )
    assert (verdict.passed, verdict.total) == (2, 3)
    assert [(result.passed, result.reason) for result in verdict.detail] == [
        (True, ""),
        (True, ""),
        (False, "assertion failed"),
    ]


def test_a_prompt_with_its_check(sandbox: Sandbox) -> None:
    prompt = 'import math\n\ndef helper(x):\n    return x + 1\n\ndef twice(x):\n    """Twice x."""\n'
    test = "def check(candidate):\n    assert candidate(helper(1)) == 4\n    assert candidate(math.inf) == math.inf\n"
    tests = Function(prompt, "twice", test)
    for solution in (
        "    return 2 * x\n",
        "def twice(x):\n    return x + x\n",
        "twice = lambda x: (helper(x) - 1) * 2\n",
    ):
        assert run(sandbox.check(solution, tests)).passed == 1, solution
    assert reasons(run(sandbox.check("    return x\n", tests))) == ["assertion failed"]


def test_a_helper_of_the_prompt_is_the_tests_own(isolated: Sandbox) -> None:
    """A solution that redefines it does not affect the tests."""
    tests = Function(
        "def helper(x):\n    return x\n\ndef f(x):\n    pass\n", "f", "def check(c):\n    assert helper(c(1)) == 2\n"
    )
    assert run(isolated.check("def helper(x):\n    return 2\ndef f(x):\n    return 1\n", tests)).passed == 0
    assert run(isolated.check("def f(x):\n    return 2\n", tests)).passed == 1


def test_programs_that_read_and_print(sandbox: Sandbox) -> None:
    cases = Cases((("2 3\n", "5\n"), ("1 1", "2"), ("1 2\n", "4\n"), ("x", "0")))
    verdict = run(sandbox.check("a, b = map(int, input().split())\nprint(a + b, '\\n')", cases))
    assert [result.passed for result in verdict.detail] == [True, True, False, False]
    assert reasons(verdict)[2:] == [
        "printed something else",
        "exit code 1: ValueError: invalid literal for int() with base 10: 'x'",
    ]


def test_a_long_output_can_be_right() -> None:
    sandbox = quickest_isolated(limits=Limits(output_bytes=1000), max_concurrent=1)
    lines = "12345678\n" * 400
    cases = Cases((("", lines), ("", "1\n")))
    right = run(sandbox.check("print('12345678  \\n' * 400)", cases))
    assert [(result.passed, result.reason) for result in right.detail] == [(True, ""), (False, "killed: output")]
    assert reasons(run(sandbox.check("print('12345678' * 1200)", cases))) == ["killed: output"] * 2


def test_a_function_may_be_called_like_a_module(isolated: Sandbox) -> None:
    tests = Asserts(("assert bisect([1, 3], 2) == 1", "assert math.isclose(bisect([1], 2), 1.0)"))
    assert run(isolated.check("def bisect(xs, x): return sum(y < x for y in xs)", tests)).passed == 2


def test_a_waiting_check_holds_no_resources(isolated: Sandbox) -> None:
    sandbox = Sandbox(isolated.tier, max_concurrent=1)

    async def waiting() -> tuple[int, int, int]:
        async with sandbox.gate:
            before = len(os.listdir("/proc/self/fd"))
            tasks = [asyncio.create_task(sandbox.check("x = 1", ADD)) for _ in range(8)]
            await asyncio.sleep(0.01)
            during = len(os.listdir("/proc/self/fd"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return before, during, len(os.listdir("/proc/self/fd"))

    before, during, after = run(waiting())
    assert before == during == after


def test_more_tests_than_unread_reports_allowed(isolated: Sandbox) -> None:
    tests = Asserts(("assert len('a')",) * 3000, functions=())
    assert run(isolated.check("", tests)).passed == 3000


def test_objects_stay_in_the_solution_and_can_be_used() -> None:
    sandbox = sandbox_of("namespaces")
    setup = "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)"
    tests = Asserts(
        (
            "assert depth(root) == 3",
            "assert root.left.value == 2",
            "assert list(count(3)) == [0, 1, 2]",
            "assert not empty()",
            "assert same(root) == root",
        ),
        setup,
    )
    code = """
class Node:
    def __init__(self, value): self.value, self.left, self.right = value, None, None
    def __eq__(self, other): return True
class Empty:
    def __len__(self): return 0
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def count(n): yield from range(n)
def empty(): return Empty()
def same(x): return x
"""
    verdict = run(sandbox.check(code, tests))
    assert [result.passed for result in verdict.detail] == [True, True, True, True, False]
    assert reasons(verdict)[-1] == "the solution returned a Node, which cannot be compared outside its process"


@pytest.mark.parametrize(
    "expression",
    [
        "None", "True", "7", "-(2 ** 5000)", "0.1", "-0.0", "float('inf')", "'é\\ud800'", "b'\\x00'", "[1, [2]]",
        "(1, (2,))",
        "{1: 'a', (1, 2): {3}}", "{'$': 'int', 'v': '0x1'}", "frozenset({1})", "1 + 2j", "range(1, 9, 2)", "int",
        "__import__('decimal').Decimal('0.10')", "__import__('fractions').Fraction(1, 3)",
        "__import__('collections').Counter('aab')", "__import__('collections').deque([1])",
        "__import__('collections').OrderedDict(a=1)", "__import__('datetime').datetime(2024, 2, 29, 1)",
        "__import__('datetime').timedelta(1, 2, 3)",
    ],
)  # fmt: skip
def test_values_round_trip(expression: str) -> None:
    value = eval(expression)
    back = loads(dumps(value, _nothing), _nothing)
    assert (back, type(back), repr(back)) == (value, type(value), repr(value))


def _nothing(value: Any) -> Any:
    raise Unsupported(type(value).__name__)


def test_nan_round_trips() -> None:
    back = loads(dumps([float("nan")], _nothing), _nothing)
    assert back[0] != back[0]


def test_subclasses_arrive_as_their_base_type() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    back = loads(dumps([Sly(3)], _nothing), _nothing)
    assert type(back[0]) is int and back != [4]


@pytest.mark.parametrize(
    "text", ['{"$": "os.system", "v": "x"}', '{"v": 1}', "{", '{"$": "set", "v": [[1]]}', "[" * 10**5]
)
def test_invalid_messages_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text, _nothing)


@pytest.mark.parametrize(
    ("tests", "setup", "names"),
    [
        (["assert f(1) == 2"], "", ("f",)),
        (["assert set(f([1])) == set([1])"], "", ("f",)),
        (["assert math.isclose(f(x=1), 1)"], "import math", ("f",)),
        (["assert sum(10, 15) == 6"], "", ("sum",)),
        (["assert g(root) == [y for y in range(3)]"], "root = Node(1)", ("Node", "g")),
        (["assert f(lambda q: q)"], "def helper(z): return z", ("f",)),
    ],
)
def test_names_that_the_solution_defines(tests: list[str], setup: str, names: tuple[str, ...]) -> None:
    assert solution_names(tests, setup) == names


def test_rows_of_data_sets() -> None:
    assert hidden_tests({"test_list": ["assert f()"], "test_imports": ["import math"], "text": ""}) == Asserts(
        ("assert f()",), "import math\n"
    )
    assert hidden_tests({"prompt": "p", "entry_point": "f", "test": "t"}) == Function("p", "f", "t")
    assert hidden_tests({"cases": [{"input": "1", "output": "2"}]}) == Cases((("1", "2"),))
    with pytest.raises(InputError, match="no tests in a row with the columns answer, question"):
        hidden_tests({"question": "", "answer": ""})
    with pytest.raises(InputError, match="not Python"):
        solution_names(["assert ("], "")


# -- Honest failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("def other(): pass", "NameError: the solution does not define add"),
        ("def add(a, b): return (", "the solution does not load: SyntaxError: '(' was never closed"),
        ("raise KeyError('x')", "the solution does not load: KeyError: 'x'"),
        ("def add(a, b): raise TypeError('no')", "TypeError: no"),
        ("class Odd(Exception): pass\ndef add(a, b): raise Odd('no')", "Odd: no"),
        (
            "def add(a, b): return lambda: 0",
            "the solution returned a function, which cannot be compared outside its process",
        ),
        (
            "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
            "the solution returned a value nested too deeply, or in itself",
        ),
        (
            "def add(a, b): return 'x' * 2 ** 25",
            "the solution's process sent an invalid answer, or one that is too long",
        ),
        ("import sys\nsys.exit(0)", "the solution does not load: SystemExit: 0"),
    ],
)
def test_reasons(isolated: Sandbox, solution: str, reason: str) -> None:
    verdict = run(isolated.check(solution, ADD))
    assert (verdict.passed, reasons(verdict)[0]) == (0, reason)


def test_a_test_cannot_pass_its_own_functions(isolated: Sandbox) -> None:
    verdict = run(isolated.check("def f(g): return g(1)", Asserts(("assert f(lambda x: x) == 1",))))
    assert reasons(verdict) == ["a test passes a function, which cannot be passed to the solution"]


def test_results_before_the_deadline_count(sandbox: Sandbox) -> None:
    code = "def f(x):\n    while x: pass\n    return x"
    verdict = run(sandbox.check(code, Asserts(("assert f(0) == 0", "assert f(1) == 1", "assert f(0) == 0")), seconds=1))
    assert [(result.passed, result.reason) for result in verdict.detail] == [
        (True, ""),
        (False, "not done after 1 s"),
        (False, "not done after 1 s"),
    ]


# -- Tricks ----------------------------------------------------------------------------------------------------------

FORGE = """
import os
PASSED = '"passed": true, "reason": ""}'
for line in ('{"test": 0, ' + PASSED, '{"test": 1, ' + PASSED, '{"value": "5"}'):
    for f in range(3, 64):
        try: os.write(f, line.encode() + b"\\n")
        except OSError: pass
"""
TRICKS = {  # name: (wrong solution, whether it fools a runner that simply puts the tests after it)
    "exit at once": ("import os\nos._exit(0)", True),
    "exit when called": ("import os\ndef add(a, b): os._exit(0)", True),
    "SystemExit when called": ("import sys\ndef add(a, b): sys.exit(0)", True),
    "equal to everything": ("class E:\n  def __eq__(self, o): return True\ndef add(a, b): return E()", True),
    "a number equal to everything": (
        "class E(int):\n  def __eq__(self, o): return True\ndef add(a, b): return E()",
        True,
    ),
    "text equal to everything": ("class E(str):\n  def __eq__(self, o): return True\ndef add(a, b): return E()", True),
    "a list equal to everything": (
        "class E(list):\n  def __eq__(self, o): return True\ndef add(a, b): return E()",
        True,
    ),
    "a lying type": (
        "class M(type):\n  def __eq__(c, o): return True\n  __hash__ = type.__hash__\n"
        "class E(metaclass=M):\n  __class__ = int\n  def __eq__(self, o): return True\ndef add(a, b): return E()",
        True,
    ),
    "exit handlers": ("import atexit, os\natexit.register(os._exit, 0)", True),
    "another exit hook": ("import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b): return 0", True),
    "patched AssertionError": (
        "import builtins, os\ndef add(a, b): raise SystemExit(0)\nbuiltins.AssertionError = SystemExit",
        True,
    ),
    "frames of the caller": (
        "import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n"
        "    for v in list(f.f_locals.values()) + list(f.f_globals.values()):\n"
        "      if isinstance(v, str) and '== 5' in v: return 5 if a == 2 else 'ab'\n    f = f.f_back\n  return 0",
        False,
    ),
    "all objects in memory": (
        "import gc\ndef add(a, b):\n  for o in gc.get_objects():\n"
        "    if isinstance(o, dict):\n      for v in list(o.values()):\n"
        "        if isinstance(v, str) and '== ' + '5' in v and len(v) < 200: return 5 if a == 2 else 'ab'\n  return 0",
        False,
    ),
    "forged verdicts on every descriptor": (FORGE + "\ndef add(a, b): return 0", False),
    "forged verdicts when called": ("def add(a, b):\n" + FORGE.replace("\n", "\n    ") + "\n    return 0", False),
    "printed success": ("print('{\"test\": 0, \"passed\": true}', '2 passed', 'OK')\ndef add(a, b): return 0", False),
    "patched server": (
        "import json, sys\nd = json.dumps\n"
        "json.dumps = lambda v, *a, **k: d({'test': 0, 'passed': True, 'reason': ''})\ndef add(a, b): return 0",
        False,
    ),
    "patched server of ours": (
        "import sys\nfor n, m in list(sys.modules.items()):\n  if 'inside' in n:\n"
        '    m.dumps = lambda v, r: \'{"$": "reference", "v": [0, "int"]}\'\ndef add(a, b): return 0',
        False,
    ),
    "memory of the tests": (
        "import os, re\ndef add(a, b):\n  for p in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if int(p) == os.getpid(): continue\n    try:\n      for l in open(f'/proc/{p}/maps'):\n"
        "        lo, hi = (int(x, 16) for x in l.split()[0].split('-'))\n"
        "        with open(f'/proc/{p}/mem', 'rb') as m:\n          m.seek(lo)\n"
        "          if b'assert ' + b'add' in m.read(hi - lo): return 5 if a == 2 else 'ab'\n"
        "    except Exception: pass\n  return 0",
        False,
    ),
    "files of the tests": (
        "import os\ndef add(a, b):\n  for root, _, names in os.walk('/tmp'):\n    for n in names:\n"
        "      if 'assert ' + 'add' in open(os.path.join(root, n)).read(): return 5 if a == 2 else 'ab'\n"
        "  for f in os.listdir('/proc/self/fd'):\n    try:\n"
        "      if b'assert ' + b'add' in os.pread(int(f), 10**6, 0): return 5 if a == 2 else 'ab'\n"
        "    except OSError: pass\n  return 0",
        False,
    ),
    "kill everybody": (
        "import os\ndef add(a, b):\n  try: os.kill(-1, 9)\n  except OSError: pass\n  os.kill(os.getpid(), 9)",
        False,
    ),
    "answers in advance": (
        "import os\nfor f in range(3, 64):\n"
        "  try: os.write(f, b'{\"loaded\": 1}\\n' * 9)\n  except OSError: pass\ndef add(a, b): return 0",
        False,
    ),
    "an answer without end": (
        "import os\ndef add(a, b):\n  for f in range(3, 64):\n    try:\n"
        "      while True: os.write(f, b'[' * 65536)\n    except OSError: pass",
        False,
    ),
    "builtins of the tests": ("def add(a, b): return 0\ndef isinstance(*a): return True\ndef str(*a): return 5", False),
    "a thread that goes on": (
        "import threading, os, time\ndef late():\n  time.sleep(0.05)\n  os._exit(0)\n"
        "threading.Thread(target=late).start()\n"
        "def add(a, b):\n  time.sleep(1)\n  return 0",
        True,
    ),
}


YES = """
class Yes:
    def __getattr__(self, name): return lambda *a, **k: True
    def __sub__(self, other): return self
    __abs__ = __round__ = lambda self, *a: self
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __eq__ = __lt__
    def __float__(self): return 5.0
    def __iter__(self): return iter([])
    def __len__(self): return 1
def f(*a): return Yes()
"""


@pytest.mark.parametrize(
    "test",
    [
        "f(1).startswith('abc')", "f(1).endswith('c')", "f(1).isupper()", "f(1).issubset({1})", "f(1).issuperset({1})",
        "f(1).is_integer()", "abs(f(2) - 5) < 1e-6", "f(2) < 3", "3 in f(1)", "float(f(1)) == 5.0", "f(1) == f(1)",
        "isinstance(f(1), str)", "round(f(1), 2) <= 2", "f(1) in (1, 2)", "max(f(1), 2) == 2",
    ],
)  # fmt: skip
def test_an_object_equal_to_everything_does_not_pass(isolated: Sandbox, test: str) -> None:
    code = YES + f"\nassert {test}"
    simple = subprocess.run([interpreter(), "-I", "-S", "-c", code], capture_output=True, timeout=20)
    honest = {"isinstance(f(1), str)"}  # which no object can fake
    assert (simple.returncode == 0) or test in honest or "max" in test
    verdict = run(isolated.check(YES, Asserts((f"assert {test}",))))
    assert verdict.passed == 0 and all(reasons(verdict))


@pytest.fixture(scope="module")
def tricked() -> dict[str, Verdict]:
    """The verdict on each trick."""
    sandbox = quickest_isolated(max_concurrent=3)

    async def judge() -> list[Verdict]:
        return await asyncio.gather(*(sandbox.check(solution, ADD, seconds=8) for solution, _ in TRICKS.values()))

    return dict(zip(TRICKS, run(judge()), strict=True))


@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_passes(trick: str, tricked: dict[str, Verdict]) -> None:
    verdict = tricked[trick]
    assert (verdict.passed, verdict.total) == (0, 2), verdict
    assert all(reasons(verdict))


@pytest.mark.parametrize("trick", [name for name, (_, fools) in TRICKS.items() if fools])
def test_it_would_have_fooled_a_simple_runner(trick: str) -> None:
    simple = "\n".join([TRICKS[trick][0], *ADD.tests])
    assert subprocess.run([interpreter(), "-I", "-S", "-c", simple], capture_output=True, timeout=20).returncode == 0


def test_the_right_solution_still_passes_where_tricks_are_tried(isolated: Sandbox) -> None:
    """The tricks above fail because they are wrong, not because nothing passes."""
    assert run(isolated.check("def add(a, b): return a + b", ADD, seconds=8)).passed == 2


def test_expected_output_never_enters_a_sandbox(isolated: Sandbox) -> None:
    code = "import os, sys\nprint([f for f in os.listdir('/proc/self/fd') if int(f) > 2], len(sys.stdin.read()))"
    outcome = run(isolated.run(code, stdin="abc"))
    assert outcome.stdout == "['3'] 3\n"  # 3: the folder that is being listed
