"""Whatever a model answers: a score in its range, finite, in bounded time; and bad columns are told before training."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from functools import cache
from typing import Any

from hypothesis import strategies as st

from covey.errors import InputError
from covey.rewards import REWARDS, resolve_rewards
from covey.rewards.builtin import VOTES, votes_of
from covey.rewards.function import RewardError
from covey.rewards.ifeval import DETECTING, KINDS
from covey.rewards.judge import read_mark
from covey.rewards.math.algebra import NotAlgebra, parse
from covey.rewards.math.rewards import equal, final_expression
from covey.rewards.math.verify_process import wild
from covey.rewards.rewardset import find_conditions
from covey.sandbox.hidden_tests import hidden_tests, solution_names, used_as_modules
from covey.types import Task
from tests.faults.fuzzing import Target, json_values, mixed, repeated, scalars, suite, texts
from tests.rewards.replies import episode_of, task_of

MATHS = [
    *("\\boxed{", "}", "{", "\\frac", "\\sqrt", "\\frac{1}{2}", "\\sqrt[3]{8}", "^", "10^{10^{10}}", "^{999999}", "9"),
    *("\\text{", "\\left(", "\\right)", "$", "$$", "\\(", "\\)", "(", ")", "[", "]", ",", ".", "-", "+", "*", "/", "!"),
    *("x", "y_", "i", "\\pi", "%", "\\%", "cm", " and ", "\\pm", "\\cup", "\\in", "\\begin{pmatrix}", "&", "\\\\"),
    *("\\end{pmatrix}", "\\overline{3}", "####", "<answer>", "</answer>", "answer is ", "Answer:", "=", "x=", "²", "½"),
    *("1,234", "1 2/3", "0.5", "inches", "^\\circ", "million", "\\infty", "\\{", "\\}", "²", "٣", "½", "because "),
]
TEXTUAL = ["***", "* ", "- ", "<<", ">>", "[", "]", "```json", "```", "P.S.", "U.S.", "Mr.", "...", "?!", "A", "don't"]
CALLS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<response>",
    "</response>",
    "[f(a=1)]",
    "f(",
    "a=",
    "**b",
]
CALLS += [
    '{"name": "f", "parameters": {"a": 1}}',
    '{"name": "f", "arguments": {"a": 1}}',
    '"name"',
    "```",
    "[",
    "(",
    "1,",
]
EXPRESSIONS = ["3", "*", "7", "+", "25", "(", ")", "=", "/", "0", "**", "9", "-", " ", "46", "x", "٣", "²"]
MARKS = ["score", "Score: 7", "7/10", "out of 10", "10", "</think>", "grade", "-", ".", "9", "/", "\n", "1e5"]

maths = st.one_of(texts, mixed(MATHS), repeated(MATHS))
anything = st.one_of(maths, mixed(TEXTUAL + CALLS), repeated(TEXTUAL), repeated(CALLS))

# -- replies to tasks that are sound ---------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["a", "(b*"]},
    "keywords:frequency": {"keyword": "a", "frequency": 2, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["a+", "b"]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 2, "let_relation": "less than"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 2, "relation": "at least"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 5, "relation": "less than"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a"},
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 1},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 1},
    "combination:repeat_prompt": {"prompt_to_repeat": "a"},
    "startend:end_checker": {"end_phrase": "b"},
    "change_case:capital_word_frequency": {"capital_frequency": 1, "capital_relation": "at least"},
}
QUICK = [kind for kind in KINDS if kind not in DETECTING]  # detecting a language takes its time
FOLLOWING = {"instruction_id_list": QUICK, "kwargs": [SETTINGS.get(kind, {}) for kind in QUICK]}
FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "dict",
        "required": ["a"],
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "array", "items": {"type": "dict"}},
            "c": {"type": "dict"},
            "d": {"type": "tuple"},
        },
    },
}
TRUTH = [{"f": {"a": [1], "b": ["", [{"k": [1]}]], "c": ["", {"k": [1]}], "d": ["", [1]]}}]
RLLA = '<think>t</think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
SOUND: dict[str, tuple[Task, float, float]] = {
    "exact": (task_of("1"), 0, 1),
    "number": (task_of("1,234"), 0, 1),
    "math_reward_string_equal": (task_of("#### 72"), 0, 1),
    "sorted": (task_of(None, numbers=[3, 1, 2]), 0, 1),
    "countdown": (task_of(None, numbers=[3, 7, 25], target=46), 0, 1),
    "format": (task_of(), 0, 1),
    "math_equal": (task_of("\\frac{1}{2}"), 0, 1),
    "qa_f1_reward": (task_of(["Paris", ""]), 0, 1),
    "qa_em_reward": (task_of("Paris"), 0, 1),
    "ifeval": (task_of(None, **FOLLOWING), 0, 1),
    "ifeval_composite": (task_of(None, **FOLLOWING), 0, 2.2),
    "length": (task_of(), 0, 1),
    "repetition": (task_of(), 0, 1),
    "bfcl": (task_of(None, function=FUNCTION, category="simple", ground_truth=TRUTH), 0, 1),
    "rlla": (task_of(RLLA), -3, 4),
    "tool_call": (task_of(None, tool_calls=[{"name": "f", "arguments": {"a": 1}}]), 0, 1),
}


@cache
def _reward(name: str) -> Any:
    return resolve_rewards(REWARDS[name], None, {})


def scores(given: tuple[str, str]) -> None:
    name, reply = given
    task, low, high = SOUND[name]
    result = asyncio.run(_reward(name)(task, episode_of(task, reply, tokens=3)))
    assert low <= result[name] <= high, result
    assert all(value is not None and math.isfinite(value) for value in result.values()), result


tool_calls = json_values(["function", "name", "arguments", "a", "f"])
messages_of_calls = st.lists(
    st.one_of(
        tool_calls,
        st.builds(lambda a: {"function": {"name": "f", "arguments": a}}, tool_calls | texts | st.just("[" * 9000)),
    ),
    max_size=3,
)


def scores_calls(given: tuple[str, list[Any]]) -> None:
    name, made = given
    task, low, high = SOUND[name]
    result = asyncio.run(_reward(name)(task, episode_of(task, "", tool_calls=made)))
    assert low <= result[name] <= high


# -- columns of any kind ---------------------------------------------------------------------------------------------

COLUMNS = ["numbers", "target", "instruction_id_list", "kwargs", "function", "category", "ground_truth", "tool_calls"]
COLUMNS += ["answers", "test", "entry_point", "test_list", "cases", "tests", "prompt", "inputs", "outputs"]
cells = st.one_of(
    scalars,
    json_values(["name", "parameters", "text", "input", "output", "properties"]),
    st.sampled_from([list(KINDS)[:2], [{}, {}], "simple", "irrelevance", TRUTH, [FUNCTION], RLLA, "[" * 9000, "1/"]),
)


def checks_columns(given: tuple[str, Any, dict[str, Any]]) -> None:
    """What a reward cannot score is told before training; what passes costs an episode at most."""
    name, answer, changed = given
    sound = SOUND[name][0] if name in SOUND else task_of()
    columns = {**sound.columns, **{key: changed.get("*") for key in sound.columns if "*" in changed}, **changed}
    columns.pop("*", None)
    task = task_of(sound.answer if answer == "sound" else answer, **columns)
    try:
        _reward(name).check(task)
    except InputError as error:
        assert len(str(error)) < 20_000
        return
    with suppress(RewardError):
        asyncio.run(_reward(name)(task, episode_of(task, "7")))


# -- mathematics -----------------------------------------------------------------------------------------------------

leaves = st.sampled_from(["1", "2", "12", "0.5", "x", "y", "\\pi", "\\sqrt{2}", "3.25", "a_1", "100"])
formulas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds("\\frac{{{}}}{{{}}}".format, inner, inner),
        st.builds("({}+{})".format, inner, inner),
        st.builds("{}-{}".format, inner, inner),
        st.builds("({}){}".format, inner, inner),
        st.builds("({})^{{{}}}".format, inner, st.integers(-9, 99)),
        st.builds("({}, {})".format, inner, inner),
        st.builds("\\{{{}, {}\\}}".format, inner, inner),
    ),
    max_leaves=8,
)


def equals_itself(text: str) -> None:
    assert equal(text, text) is True


def compares(given: tuple[str, str]) -> None:
    gold, reply = given
    assert equal(gold, reply) in (True, False, None)
    assert isinstance(final_expression(reply), str)
    wild(reply)


def parses_algebra(text: str) -> None:
    try:
        value = parse(text)
    except NotAlgebra:
        return
    try:
        assert value == value
        value.approximate()
    except NotAlgebra:
        pass


def votes(given: tuple[str, str, str]) -> None:
    name, one, other = given
    result = votes_of(name)
    assert result is not None
    first, second = result.final(one), result.final(other)
    assert result.same(first, first) and isinstance(result.same(first, second), bool)


# -- the rest --------------------------------------------------------------------------------------------------------


def reads_marks(given: tuple[str, float]) -> None:
    reply, scale = given
    mark = read_mark(reply, scale)
    assert mark is None or 0 <= mark <= scale


def reads_conditions(given: dict[str, Any]) -> None:
    try:
        find_conditions([], given, ["a", "b"])
    except InputError as error:
        assert "reward.only_if" in str(error)


def reads_tests(given: tuple[dict[str, Any], str]) -> None:
    columns, source = given
    with suppress(InputError):
        hidden_tests(columns)
    for read in (lambda: solution_names([source], ""), lambda: used_as_modules([source], "")):
        with suppress(InputError):
            read()


PROGRAMS = [
    "assert f(1) == 2",
    "(",
    ")",
    "[",
    "lambda: ",
    "not ",
    "-",
    "f(",
    "\n",
    "    ",
    "x = 1",
    "\x00",
    "await ",
    "'",
]
columns = st.dictionaries(st.sampled_from([*COLUMNS, "*"]) | texts, cells, max_size=3)
TARGETS = [
    Target(
        "scorers/replies",
        st.tuples(st.sampled_from(list(SOUND)), st.one_of(anything, mixed(EXPRESSIONS), repeated(EXPRESSIONS))),
        scores,
        200,
    ),
    Target("scorers/calls", st.tuples(st.sampled_from(["tool_call", "bfcl"]), messages_of_calls), scores_calls, 100),
    Target(
        "scorers/columns",
        st.tuples(st.sampled_from([*SOUND, "code_reward"]), cells | st.just("sound"), columns),
        checks_columns,
        200,
    ),
    Target("scorers/equal", st.tuples(maths | formulas, maths), compares, 30),
    Target("scorers/equals-itself", formulas, equals_itself, 100),
    Target("scorers/algebra", st.one_of(mixed(MATHS), formulas, repeated(MATHS, 300)), parses_algebra, 200),
    Target("scorers/votes", st.tuples(st.sampled_from(list(VOTES)), anything, anything), votes, 60),
    Target(
        "scorers/judge",
        st.tuples(st.one_of(texts, mixed(MARKS), repeated(MARKS)), st.sampled_from([1.0, 10.0, 0.5])),
        reads_marks,
        60,
    ),
    Target(
        "scorers/conditions",
        st.dictionaries(
            st.sampled_from("ab") | texts,
            scalars | mixed(["a", "b", ">=", "1", "--", "e"]) | st.sampled_from(["b>=--", "a>=1e", "b>=1"]),
            max_size=2,
        ),
        reads_conditions,
        60,
    ),
    Target(
        "scorers/tests", st.tuples(columns, st.one_of(mixed(PROGRAMS), repeated(PROGRAMS, 20_000))), reads_tests, 60
    ),
]
test_fuzz = suite(TARGETS)
