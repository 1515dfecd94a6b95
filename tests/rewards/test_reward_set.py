"""Rewards as users write them: arguments by name, what they may return, and what goes wrong."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.protocols import Reward
from covey.rewards import REWARDS, RewardError, RewardSet, resolve_rewards, reward
from covey.rewards.function import RewardFunction
from covey.types import Episode, Failure, Task

EXAMPLE = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
TASK = Task("t1", (*EXAMPLE, {"role": "user", "content": "2+2"}), "4", {"level": 3})


def attempt(*replies: str, failure: Failure | None = None) -> Episode:
    written = tuple({"role": "assistant", "content": reply} for reply in replies)
    return Episode(TASK, (), (*TASK.messages, *written), failure=failure)


def score(*functions: Any, task: Task = TASK, reply: str = "4") -> dict[str, float | None]:
    return asyncio.run(resolve_rewards(functions, None, {})(task, attempt(reply)))


def group(functions: Any, episodes: list[Episode]) -> list[dict[str, float | None]]:
    return asyncio.run(resolve_rewards(functions, None, {}).group(TASK, episodes))


def mistake(*names: Any, default: str | None = None, weights: dict[str, float] | None = None) -> str:
    with pytest.raises(InputError) as caught:
        resolve_rewards(names, default, weights or {})
    return str(caught.value)


# Arguments


def test_arguments_are_given_by_name() -> None:
    seen: dict[str, Any] = {}

    def look(
        answer: Any, final_answer: str, episode: Any, task: Any, question: str, completion: str, level: int
    ) -> float:
        seen.update(locals())
        return 1.0

    episode = attempt("Hm.", "4")
    assert asyncio.run(resolve_rewards(look, None, {})(TASK, episode)) == {"look": 1.0}
    seen.pop("seen")
    assert seen == {
        "answer": "4",
        "final_answer": "4",
        "episode": episode,
        "task": TASK,
        "question": "2+2",
        "completion": "Hm.\n4",  # without the worked example
        "level": 3,
    }


def test_defaults_replace_missing_columns() -> None:
    def shift(level: int, offset: float = 0.5, *, answer: Any = "none") -> float:
        return level + offset + len(answer)

    assert score(shift) == {"shift": 4.5}
    assert score(shift, task=Task("t", TASK.messages, None, {"level": 3, "offset": 2})) == {"shift": 9.0}


def test_kwargs_take_everything() -> None:
    def count(**kwargs: Any) -> float:
        own = {"answer", "completion", "episode", "final_answer", "level", "question", "task"}
        return float(set(kwargs) == own | {"final_response", "prediction", "prompt", "trajectory"})

    assert score(count) == {"count": 1.0}


def test_names_of_other_projects() -> None:
    """The minimal GVPO script's (prompt, completion), and AgentFly's."""
    task = Task("0", ({"role": "user", "content": "2 + 2 ?"},), "4", {"prediction": "a column"})
    episode = Episode(task, (), (*task.messages, {"role": "assistant", "content": "it is 4"}))
    seen: dict[str, Any] = {}

    def script(prompt: str, completion: str) -> float:
        seen.update(prompt=prompt, completion=completion)
        return 1.0

    def agentfly(final_response: str, answer: str, trajectory: list[dict[str, str]], prediction: str) -> float:
        seen.update(final_response=final_response, trajectory=trajectory, prediction=prediction)
        return 0.5

    for function in (script, agentfly):
        RewardFunction.of(function).check(task)
    result = [asyncio.run(RewardFunction.of(function).score(task, episode)) for function in (script, agentfly)]
    assert result == [{"script": 1.0}, {"agentfly": 0.5}]
    assert seen == {
        "prompt": "2 + 2 ?",
        "completion": "it is 4",
        "final_response": "it is 4",
        "trajectory": [{"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": "it is 4"}],
        "prediction": "a column",
    }


def test_async_rewards_overlap() -> None:
    running: list[int] = []

    async def slow(final_answer: str) -> float:
        running.append(1)
        await asyncio.sleep(0)
        return float(len(running))  # all have started before the first goes on

    assert group(slow, [attempt("4")] * 3) == [{"slow": 3.0}] * 3


# Names


def test_decorator() -> None:
    @reward
    def plain(answer: str) -> float:
        return float(answer)

    @reward()
    def called(answer: str) -> float:
        return float(answer)

    @reward(name="renamed")
    async def other(answer: str) -> float:
        return float(answer)

    assert plain(answer="5") == 5.0  # it stays a plain function
    assert score(plain, called, other) == {"plain": 4.0, "called": 4.0, "renamed": 4.0}


def test_weights_are_one_unless_given() -> None:
    result = resolve_rewards(["format", "exact"], None, {"format": 0.25})
    assert result.names == ("format", "exact")
    assert result.weights == {"format": 0.25, "exact": 1.0}
    assert isinstance(result, Reward)


@pytest.mark.parametrize(("default", "expected"), [("sorted", "sorted"), (None, "exact")])
def test_auto_is_the_tasks_own_reward(default: str | None, expected: str) -> None:
    assert resolve_rewards("auto", default, {}).names == (expected,)
    assert resolve_rewards(["format", "auto"], default, {}).names == ("format", expected)


def test_unknown_reward() -> None:
    assert mistake("exat") == (f"unknown reward  exat\n  did you mean   exact?\n  known: {', '.join(sorted(REWARDS))}")


def test_no_reward() -> None:
    assert mistake() == "reward.name is empty\n  fix: name a reward, or leave it at auto"


@pytest.mark.parametrize("value", [3, [3], ["exact", None]])
def test_what_is_not_a_reward_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="a reward must be a name, a function or a list of these, got"):
        resolve_rewards(value, None, {})


def test_the_same_reward_twice() -> None:
    message = "two rewards are called exact\n  fix: name it once, or rename one with @covey.reward(name=...)"
    assert mistake("exact", "auto") == message


def test_weight_of_an_unknown_reward() -> None:
    assert mistake("exact", "format", weights={"exakt": 1.0}) == (
        "unknown reward in reward.weights  exakt\n  did you mean   exact?\n  known: exact, format"
    )


# What a reward returns


def returns(value: Any) -> Callable[[], Any]:
    def mine() -> Any:
        return value

    return mine


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, {"mine": 1.0}),
        (True, {"mine": 1.0}),
        (None, {"mine": None}),
        (Fraction(1, 4), {"mine": 0.25}),
        ({"reward": 0.5, "f1": 1, "seen": None}, {"mine": 0.5, "mine/f1": 1.0, "mine/seen": None}),
        ({"f1": 1, "mine": 0.5}, {"mine": 0.5, "mine/f1": 1.0}),
        ({"reward": 1, "mine": 0.5}, {"mine": 1.0, "mine/mine": 0.5}),
    ],
)
def test_values(value: Any, expected: dict[str, float | None]) -> None:
    result = score(returns(value))
    assert result == expected
    assert all(type(number) in (float, type(None)) for number in result.values())


def test_extras_come_after_all_rewards() -> None:
    assert list(score(returns({"reward": 1, "f1": 1}), "exact")) == ["mine", "exact", "mine/f1"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "mine is nan, a reward must be finite"),
        (float("-inf"), "mine is -inf, a reward must be finite"),
        ("1.0", "mine must be a number or None, got '1.0'"),
        ([1.0], "mine must be a number or None, got [1.0]"),
        ({"reward": 1, "f1": "x"}, "mine/f1 must be a number or None, got 'x'"),
        ({"f1": 1}, "the dict it returned has no 'reward' (keys: f1)"),
    ],
)
def test_invalid_values(value: Any, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        score(returns(value))
    assert str(caught.value) == f"reward mine on task t1: {message}"


def test_an_exception_names_reward_and_task() -> None:
    def broken(answer: str) -> float:
        return 1 / (int(answer) - 4)

    with pytest.raises(RewardError) as caught:
        score("exact", broken)
    error = caught.value
    assert (error.name, error.task_id, error.cause) == ("broken", "t1", "reward")
    assert error.why.startswith("ZeroDivisionError: division by zero at ")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# Groups


def test_group_scores_each_attempt() -> None:
    assert group("exact", [attempt("4"), attempt("5")]) == [{"exact": 1.0}, {"exact": 0.0}]


def test_a_failed_attempt_is_never_scored() -> None:
    failed = attempt("4", failure=Failure("timeout", "too slow"))
    assert group("exact", [failed, attempt("4")]) == [{"exact": None}, {"exact": 1.0}]
    assert group("exact", [failed]) == [{"exact": None}]


def test_the_group_form_sees_all_valid_attempts_at_once() -> None:
    sizes: list[int] = []

    def shortest(episodes: list[Episode], level: int) -> list[Any]:
        sizes.append(len(episodes))
        lengths = [len(episode.final_answer) for episode in episodes]
        return [{"reward": length == min(lengths), "level": level} for length in lengths]

    failed = attempt("", failure=Failure("timeout", "too slow"))
    assert group([shortest, "exact"], [attempt("4"), failed, attempt("four")]) == [
        {"shortest": 1.0, "exact": 1.0, "shortest/level": 3.0},
        {"shortest": None, "exact": None},
        {"shortest": 0.0, "exact": 0.0, "shortest/level": 3.0},
    ]
    assert sizes == [2]
    assert score(shortest) == {"shortest": 1.0, "shortest/level": 3.0}  # alone: a group of one


def test_groupwise_says_whether_a_reward_compares_attempts() -> None:
    async def ranks(episodes: list[Episode]) -> list[float]:
        return [0.0 for _ in episodes]

    assert not resolve_rewards("exact", None, {}).groupwise
    assert resolve_rewards(["exact", ranks], None, {}).groupwise


@pytest.mark.parametrize("value", [[1.0], 1.0, "ab", None])
def test_a_group_reward_returns_one_value_for_each(value: Any) -> None:
    def ranks(episodes: list[Episode]) -> Any:
        return value

    with pytest.raises(RewardError) as caught:
        group(ranks, [attempt("4"), attempt("5")])
    assert str(caught.value) == (
        "reward ranks on task t1: a group reward returns a list with one value for each of 2 episodes"
    )


# Checks before training


def check(function: Any, task: Task = TASK) -> str:
    rewards: RewardSet = resolve_rewards(function, None, {})
    with pytest.raises(InputError) as caught:
        rewards.check(task)
    return str(caught.value)


def test_a_column_that_the_data_lack() -> None:
    def by_level(lvel: int, completion: str) -> float:
        return 0.0

    assert check(by_level) == (
        "reward by_level asks for `lvel`, which task t1 does not have\n"
        "  did you mean   level?\n"
        "  columns of the data: level\n"
        "  always there: answer, completion, episode, final_answer, question, task"
    )


def test_a_task_without_an_answer() -> None:
    assert check("exact", Task("t2", TASK.messages, None, {"answers": ["4"]})) == (
        "reward exact asks for `answer`, which task t2 does not have\n"
        "  did you mean   answers?\n"
        "  columns of the data: answers\n"
        "  always there: completion, episode, final_answer, question, task"
    )


def test_a_group_reward_that_asks_for_one_final_answer() -> None:
    def ranks(episodes: list[Episode], final_answer: str) -> list[float]:
        return []

    assert check(ranks) == (
        "reward ranks asks for `final_answer`, which task t1 does not have\n"
        "  fix: a group reward looks at its `episodes`: [e.final_answer for e in episodes]\n"
        "  columns of the data: level\n"
        "  always there: answer, question, task"
    )


def test_check_passes_if_all_columns_exist() -> None:
    resolve_rewards(["exact", "format"], None, {}).check(TASK)
    resolve_rewards("sorted", None, {}).check(Task("t", TASK.messages, None, {"numbers": [2, 1]}))


def test_a_task_that_alone_lacks_a_column_fails_when_scored() -> None:
    with pytest.raises(RewardError, match="it asks for `numbers`, which this task does not have"):
        score("sorted")


def test_positional_only_parameters() -> None:
    assert mistake("math:sqrt") == ("reward sqrt has positional-only parameters\n  fix: arguments are given by name")


# A user's own file or module


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_file_and_module(in_folder: Path) -> None:
    (in_folder / "neighbour.py").write_text("VALUE = 0.5\n")
    (in_folder / "my_file.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour import VALUE\n"
        "calls = []\n"
        "@dataclass\nclass Settings:\n    scale: float = 2.0\n"
        "def half(answer):\n    calls.append(1)\n    return VALUE\n"
        "def calls_so_far():\n    return len(calls)\n"
    )
    assert score("my_file.py:half", "exact") == {"half": 0.5, "exact": 1.0}
    assert score("my_file.py:calls_so_far") == {"calls_so_far": 1.0}  # loaded once
    (in_folder / "covey_test_module.py").write_text("def one():\n    return 1\n")
    assert score("covey_test_module:one", f"{in_folder}/my_file.py:half") == {"one": 1.0, "half": 0.5}


def test_files_of_one_name_do_not_collide(in_folder: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (in_folder / folder).mkdir()
        (in_folder / folder / "r.py").write_text(f"def in_{folder}():\n    return {value}\n")
    assert score("a/r.py:in_a", "b/r.py:in_b") == {"in_a": 1.0, "in_b": 2.0}


def test_missing_file(in_folder: Path) -> None:
    (in_folder / "rewards.py").write_text("")
    assert mistake("reward.py:exact") == "reward reward.py:exact: no such file reward.py\n  did you mean   rewards.py?"


def test_missing_function(in_folder: Path) -> None:
    (in_folder / "r.py").write_text("from pathlib import Path\ndef exact(): ...\ndef f1(): ...\ndef _hidden(): ...\n")
    assert mistake("r.py:exat") == (
        "reward r.py:exat: no function exat in r.py\n  did you mean   r.py:exact?\n  functions there: exact, f1"
    )


def test_file_without_a_function_name() -> None:
    assert mistake("r.py") == "reward r.py names no function\n  fix: r.py:FUNCTION"


def test_file_that_does_not_run(in_folder: Path) -> None:
    (in_folder / "r.py").write_text("1 / 0\n")
    assert mistake("r.py:exact") == (
        f"reward r.py:exact: running {in_folder}/r.py failed "
        "(ZeroDivisionError: division by zero at r.py, line 1: 1 / 0)"
    )


def test_missing_module(in_folder: Path) -> None:
    assert mistake("no_such_module:f") == (
        "reward no_such_module:f: importing no_such_module failed "
        "(ModuleNotFoundError: No module named 'no_such_module')"
    )


def test_a_rewards_own_check_sees_each_task_before_training() -> None:
    def has_level(task: Task) -> None:
        if task.columns["level"] > 2:
            raise InputError(f"task {task.id} is too hard")

    @reward(check=has_level)
    def easy(level: int) -> float:
        return 1.0

    result = resolve_rewards(easy, None, {})
    result.check(Task("t2", TASK.messages, "4", {"level": 2}))
    with pytest.raises(InputError, match="task t1 is too hard"):
        result.check(TASK)
    with pytest.raises(InputError, match="asks for `level`"):  # the missing column comes first
        result.check(Task("t3", TASK.messages, "4"))
