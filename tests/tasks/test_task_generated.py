"""Generated tasks: right answers, an honest split, and options that are checked."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks import DATASETS, GENERATED, TaskSet, load_tasks
from covey.tasks.demonstrations import load_demonstrations
from covey.types import Demonstration, Task

NAMES = ["sort", "arithmetic", "largest", "countdown", "calculator"]


def load(name: str, seed: int = 0, train: int | None = 300, val: int | None = 100, **options: Any) -> TaskSet:
    return load_tasks(DataConfig(name=name, options=options, train_size=train, val_size=val), seed)


def mistake(name: str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(name, **options)
    return str(caught.value)


def numbers(task: Task) -> list[int]:
    return list(task.columns["numbers"])


def asked(task: Task) -> str:
    return str(task.messages[-1]["content"])


def identity(name: str, task: Task) -> object:
    """What makes a problem the one it is, found from the task and not from the key the code under test uses."""
    if name == "calculator":
        return calculation(task.columns["expression"])
    given = frozenset(Counter(numbers(task)).items())
    if name == "countdown":
        return given, task.columns["target"]
    return (given, task.columns["operation"]) if name == "arithmetic" else given


def calculation(expression: str) -> object:
    """The numbers and signs of an expression, those of its innermost pair in any order."""
    output = re.findall(r"\d+|[-+*]", expression)
    return (frozenset(Counter(output[0:3:2]).items()), output[1], *output[3:])


# The five tasks


def test_sort() -> None:
    for task in load("sort").train:
        given = numbers(task)
        assert len(set(given)) == 3 and all(10 <= n <= 99 for n in given)
        assert asked(task) == f"Sort from smallest to largest: {given[0]} {given[1]} {given[2]}"
        low, middle, high = min(given), sum(given) - min(given) - max(given), max(given)
        assert task.answer == f"{low} {middle} {high}"
    assert load("sort").reward == "sorted"


def test_largest() -> None:
    for task in load("largest", count=4, digits=3).train:
        a, b, c, d = numbers(task)
        assert asked(task) == f"Which is the largest: {a}, {b}, {c} or {d}?"
        assert task.answer == str(max(a, b, c, d)) and min(a, b, c, d) >= 100 and max(a, b, c, d) <= 999
    assert load("largest").reward == "number"
    task = load("largest", count=2).train[0]
    assert asked(task) == f"Which is the largest: {numbers(task)[0]} or {numbers(task)[1]}?"


def test_arithmetic() -> None:
    output = load("arithmetic", operations=["+", "-", "*"])
    for task in output.train:
        a, b = numbers(task)
        results = {"+": a + b, "-": a - b, "*": a * b}
        assert asked(task) == f"What is {a} {task.columns['operation']} {b}?"
        assert task.answer == str(results[task.columns["operation"]]) and not task.answer.startswith("-")
    assert {task.columns["operation"] for task in output.train} == {"+", "-", "*"}
    assert output.reward == "number"


@pytest.mark.parametrize("count", [2, 3, 6])
def test_countdown_can_be_solved(count: int) -> None:
    for task in load("countdown", train=100, val=20, count=count).train:
        given, target, solution = numbers(task), task.columns["target"], task.columns["solution"]
        used = [node.value for node in ast.walk(ast.parse(solution)) if isinstance(node, ast.Constant)]
        assert eval(solution) == target and Counter(used) == Counter(given)
        assert 1 <= target <= 99 and target not in given and task.answer is None
        assert asked(task).startswith(
            f"Using the numbers {', '.join(map(str, given))} and the operations + - * /, make {target}. "
            "Use each number at most once."
        )
    assert load("countdown", train=1).reward == "countdown"


# Messages


def test_a_worked_example_comes_before_the_question() -> None:
    tasks = load("sort")
    system, question, answer, last = tasks.train[0].messages
    assert system == {"role": "system", "content": "Reply with numbers only."}
    assert (question["role"], answer["role"], last["role"]) == ("user", "assistant", "user")
    example = [int(n) for n in question["content"].removeprefix("Sort from smallest to largest: ").split()]
    assert answer["content"] == " ".join(str(n) for n in sorted(example))
    assert all(task.messages[:3] == (system, question, answer) for task in tasks.train + tasks.validation)


@pytest.mark.parametrize("name", ["sort", "arithmetic", "largest"])
def test_examples_are_an_option_and_depend_on_no_seed(name: str) -> None:
    assert [len(load(name, examples=n).train[0].messages) for n in (0, 1, 3)] == [2, 4, 8]
    assert load(name, seed=1).train[0].messages[:3] == load(name, seed=2).train[0].messages[:3]


def test_data_system_prompt_is_for_tasks_without_one() -> None:
    data = DataConfig(name="countdown", train_size=1, val_size=1, system_prompt="Think.")
    assert load_tasks(data, 0).train[0].messages[0] == {"role": "system", "content": "Think."}
    data = DataConfig(name="sort", train_size=1, val_size=1, system_prompt="Think.")
    assert load_tasks(data, 0).warnings == (
        "data.system_prompt is not used: every task brings a system message of its own",
    )


# The split


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_and_without_repeats(name: str) -> None:
    sets = [
        load(name, seed=seed, train=train, val=val) for seed, train, val in ((0, 500, 50), (1, 50, 150), (2, 900, 9))
    ]
    trained_on = {identity(name, task) for tasks in sets for task in tasks.train}
    validated = {identity(name, task) for tasks in sets for task in tasks.validation}
    assert not trained_on & validated
    for tasks in sets:
        for split in (tasks.train, tasks.validation):
            assert len({identity(name, task) for task in split}) == len({task.id for task in split}) == len(split)


@pytest.mark.parametrize("name", ["sort", "arithmetic", "largest"])
def test_no_example_occurs_in_either_split(name: str) -> None:
    # One-digit problems, few enough that all are drawn, and enough examples that some would be validation.
    tasks = load(name, digits=1, examples=15, train=1000, val=1000)
    symbols = "+-" if name == "arithmetic" else " "

    def shape(question: str) -> tuple[list[str], list[str]]:
        return sorted(c for c in question if c.isdigit()), [c for c in symbols if c in question]

    shown = [shape(message["content"]) for message in tasks.train[0].messages[:-1] if message["role"] == "user"]
    asked_for = [shape(asked(task)) for task in tasks.train + tasks.validation]
    assert len(shown) == 15
    assert not [problem for problem in asked_for if problem in shown]
    # sets of three of 9 digits, or unordered pairs of 9 digits with two operations
    assert len(asked_for) == (90 if name == "arithmetic" else 84) - 15


@pytest.mark.parametrize("name", NAMES)
def test_only_training_depends_on_the_seed(name: str) -> None:
    first, again, other = load(name, seed=3), load(name, seed=3), load(name, seed=4)
    assert first == again
    assert first.train != other.train
    assert first.validation == other.validation


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_set_is_a_prefix_of_a_larger_one(name: str) -> None:
    small, large = load(name, train=20, val=10), load(name, train=60, val=30)
    assert (small.train, small.validation) == (large.train[:20], large.validation[:10])


def test_a_fifth_of_all_problems_is_validation() -> None:
    # 90 numbers, 2 at a time: 4005 problems
    tasks = load("sort", count=2, train=4005, val=4005, examples=0)
    assert len(tasks.train) + len(tasks.validation) == 4005
    # 801 expected, standard deviation √(4005 · 0.2 · 0.8) ≈ 25
    assert abs(len(tasks.validation) - 801) < 5 * 25


def test_a_small_space_is_exhausted_with_a_warning() -> None:
    tasks = load("sort", count=2, digits=1, train=None, val=None, examples=0)
    output = {frozenset(numbers(task)) for task in tasks.train + tasks.validation}
    assert output == {frozenset(pair) for pair in combinations(range(1, 10), 2)}
    train, validation = len(tasks.train), len(tasks.validation)
    assert train + validation == 36
    assert tasks.warnings == (
        f"sort has {train} distinct training problems with these options, fewer than the 2000 asked for",
        f"sort has {validation} distinct validation problems with these options, fewer than the 200 asked for",
    )


def test_default_sizes() -> None:
    tasks = load("sort", train=None, val=None)
    assert (len(tasks.train), len(tasks.validation), tasks.warnings) == (2000, 200, ())
    assert (
        tasks.description == "sort (count=3, digits=2, examples=1): 2000 training and 200 validation tasks, generated"
    )


# Demonstrations


def test_calculator() -> None:
    tasks = load("calculator", train=600)
    phrasings = {re.sub(r"\d+", "N", asked(task)) for task in tasks.train}
    assert len(phrasings) == 15 + 9  # three operations in five ways, three pairs of operations in three
    for task in tasks.train:
        expression = task.columns["expression"]
        assert str(eval(expression)) == task.answer and int(task.answer) >= 0
        assert sorted(re.findall(r"\d+", expression)) == sorted(re.findall(r"\d+", asked(task)))
    assert tasks.reward == "number"


def test_word_problems_mean_their_expressions() -> None:
    """Read by hand, for those phrasings whose order of numbers could be mistaken."""
    meant = {
        "Subtract {1} from {0}.": "{0} - {1}",
        "How much more is {0} than {1}?": "{0} - {1}",
        "A school buys {1} boxes of {0} pencils and gives {2} pencils away. How many pencils are left?": (
            "{0} * {1} - {2}"
        ),
        "What is {2} more than {0} times {1}?": "{0} * {1} + {2}",
        "A hall has {1} rows of {0} seats and {2} seats at the side. How many seats are there?": "{0} * {1} + {2}",
    }
    tasks = {asked(task): task.columns["expression"] for task in load("calculator", train=600).train}
    seen = set()
    for question, expression in tasks.items():
        given = re.findall(r"\d+", expression)
        for phrasing, formula in meant.items():
            if question == phrasing.format(*given, ""):
                assert expression == formula.format(*given, "")
                seen.add(phrasing)
    assert seen == set(meant)


def test_calculator_demonstrations_are_never_tasks() -> None:
    shown = load_demonstrations(DataConfig(name="calculator", train_size=500, val_size=100, options={"digits": 1}), 0)
    tasks = load("calculator", train=500, val=200, digits=1)

    def expressions(demonstrations: Sequence[Demonstration]) -> set[object]:
        calls = [d.messages[2]["tool_calls"][0]["function"] for d in demonstrations]
        return {calculation(call["arguments"]["expression"]) for call in calls}

    train, validation = expressions(shown.train), expressions(shown.validation)
    asked_for = {calculation(task.columns["expression"]) for task in (*tasks.train, *tasks.validation)}
    assert len(train) == len(shown.train) > 100 and len(validation) == len(shown.validation) > 20
    assert not train & validation and not (train | validation) & asked_for


def test_a_demonstration_calls_the_calculator_and_repeats_its_result() -> None:
    shown = load_demonstrations(DataConfig(name="calculator", train_size=50, val_size=5), 0)
    assert shown.tools == ("calculator",) and (len(shown.train), len(shown.validation)) == (50, 5)
    for demonstration in shown.train:
        _, question, call, result, answer = demonstration.messages
        (function,) = (one["function"] for one in call["tool_calls"])
        assert question["content"] == f"What is {function['arguments']['expression']}?"
        assert result["content"] == answer["content"] == str(eval(function["arguments"]["expression"]))
        assert (call["content"], result["name"], function["name"]) == ("", "calculator", "calculator")
    assert shown.train[0].messages[0] == load("calculator").train[0].messages[0]
    again = load_demonstrations(DataConfig(name="calculator", train_size=50, val_size=5), 1)
    assert again.validation == shown.validation and again.train != shown.train


def test_tasks_without_demonstrations_say_so() -> None:
    with pytest.raises(InputError, match="data=sort has tasks but no demonstrations"):
        load_demonstrations(DataConfig(name="sort"), 0)


# Mistakes


def test_every_task_of_the_list_is_tested() -> None:
    assert sorted(GENERATED) == sorted([*NAMES, "gui_pages"])  # test_gui_pages.py


def test_unknown_task() -> None:
    names = ", ".join(sorted([*GENERATED, *DATASETS, "reasoning_gym"]))
    assert mistake("sorting") == f"unknown task  sorting\n  did you mean   sort?\n  known: {names}"


def test_unknown_option() -> None:
    assert mistake("sort", digit=3) == (
        "unknown option of task sort  digit\n  did you mean   digits?\n  known: count, digits, examples"
    )


@pytest.mark.parametrize(
    ("name", "options", "expected_message"),
    [
        ("sort", {"digits": 0}, "data.options.digits must be a whole number from 1 to 15, got 0"),
        ("sort", {"count": 1}, "data.options.count must be a whole number from 2 to 100, got 1"),
        ("largest", {"count": "three"}, "data.options.count must be a whole number from 2 to 100, got 'three'"),
        ("largest", {"examples": -1}, "data.options.examples must be a whole number from 0 to 20, got -1"),
        ("arithmetic", {"digits": True}, "data.options.digits must be a whole number from 1 to 15, got True"),
        ("arithmetic", {"operations": ["+", "/"]}, "data.options.operations must be a list of + - *, got ['+', '/']"),
        ("arithmetic", {"operations": []}, "data.options.operations must be a list of + - *, got []"),
        ("arithmetic", {"operations": 5}, "data.options.operations must be a list of + - *, got 5"),
        ("countdown", {"count": 7}, "data.options.count must be a whole number from 2 to 6, got 7"),
        ("countdown", {"target_max": 5}, "data.options.target_max must be a whole number from 10 to 1000000, got 5"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], expected_message: str) -> None:
    assert mistake(name, **options) == expected_message


def test_more_numbers_than_there_are() -> None:
    assert mistake("sort", count=10, digits=1) == (
        "data.options.count=10, but only 9 numbers have 1 digit\n"
        "  fix: data.options.count=9 at most, or more data.options.digits"
    )


def test_more_examples_than_problems() -> None:
    assert mistake("sort", count=9, digits=1, examples=2) == "data.options.examples=2, but sort has 1 problems to show"


def test_an_example_that_uses_up_everything() -> None:
    assert mistake("sort", count=9, digits=1, examples=1) == (
        "sort has no training problems with these options\n  fix: ask for more digits or fewer examples"
    )
