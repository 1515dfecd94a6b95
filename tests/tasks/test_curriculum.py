"""Task samplers: their weights by hand, their draws by theory, and their state in a run."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks.curriculum import (
    OF_ALL,
    OPTIONS,
    Curriculum,
    SamplerOptions,
    sampler_options,
    task_buckets,
    unused_levels,
)
from covey.types import Episode, Failure, Group, StopReason, Task, Turn
from tests.training.test_resume import outcome, train_here


def tasks(count: int, **columns: list[Any]) -> list[Task]:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    return [Task(f"t{i}", ({"role": "user", "content": str(i)},), columns=rows[i]) for i in range(count)]


def group(task: Task, *scores: float | None, failed: int = 0) -> Group:
    episodes = [Episode(task, (), (), {"right": score}) for score in scores]
    lost = [Episode(task, (), (), {"right": 0.0}, failure=Failure("agent", ""))] * failed
    return Group(task, (*episodes, *lost))


def curriculum(sampler: str, count: int = 4, batch_size: int = 2, seed: int = 0, **options: Any) -> Curriculum:
    data = DataConfig(sampler=sampler, sampler_options={"half_life": 10, "explore": 0.0} | options)
    return Curriculum(tasks(count), data, batch_size, seed=seed, steps=100, reward="right")


def test_the_band_prefers_tasks_near_the_target() -> None:
    made = curriculum("band", target=0.5, width=0.25, prior=4.0)
    made.observe(0, [group(made.tasks[0], 1, 1, 1, 1), group(made.tasks[1], 1, 0, 1, 0)])
    # Ten steps later, four observations count as two: (4 · 0.5 + 2) / (4 + 2) = 2/3, 1/6 above the target.
    solved = math.exp(-0.5 * ((1 / 6) / 0.25) ** 2)
    total = solved + 3
    assert made.probabilities(10) == pytest.approx([solved / total, 1 / total, 1 / total, 1 / total])


def test_uncertainty_is_the_variance_of_an_attempt() -> None:
    made = curriculum("uncertainty", prior=2.0, explore=0.2)
    made.observe(0, [group(made.tasks[0], 0, 0, failed=3), group(made.tasks[1], 0.5, 7.0, None)])
    # At once: (2 · ½ + 0) / (2 + 2) = ¼; the second task's 7 is clipped to 1: (1 + 1.5) / 4; the others ½.
    weights = [0.25 * 0.75, 0.625 * 0.375, 0.25, 0.25]
    expected = [0.8 * weight / sum(weights) + 0.2 / 4 for weight in weights]
    assert made.probabilities(0) == pytest.approx(expected)


def test_observations_of_a_task_fade_and_add_up() -> None:
    made = curriculum("uncertainty", prior=2.0)
    made.observe(0, [group(made.tasks[0], 1, 1)])
    made.observe(10, [group(made.tasks[0], 1, 0)])
    seen = made.observed[0]
    assert (seen.count, seen.success, seen.deviation, seen.rate) == pytest.approx((3, 2, 1, 0.5))


def test_rewards_of_roles_are_observed_one_by_one() -> None:
    """In a zero-sum game they cancel. The deviation is within a role, as advantages are. A role that is not trained
    does not count, and a `reward` beside those of the roles is the outcome itself."""

    def played(trained: Sequence[str], *rewards: tuple[float, float], total: float | None = None) -> Group:
        task = made.tasks[0]
        turns = tuple(
            Turn((), (1,), (0.0,), (0,), StopReason.EOS, role=role, trained=role in trained) for role in ("a", "b")
        )
        tables = [{"right": a + b if total is None else total, "right/a": a, "right/b": b} for a, b in rewards]
        return Group(task, tuple(Episode(task, turns, (), table) for table in tables))

    def seen(trained: Sequence[str], *rewards: tuple[float, float], total: float | None = None) -> tuple[float, ...]:
        made.observed.clear()
        made.observe(0, [played(trained, *rewards, total=total)])
        found = made.observed[0]
        return found.count, found.success, found.deviation, found.rate

    made = curriculum("priority")
    assert seen("ab", (1, -1), (-1, 1)) == (4, 2, 2, 0.5)
    assert seen("ab", (1, -1), (1, -1)) == (4, 2, 0, 0.5)
    assert seen("b", (1, -1), (-1, 1), (-1, 1), (-1, 1)) == (4, 3, 1.5, 0.75)
    assert seen("ab", (0.5, 0.25), (0.5, 0), total=1.0) == (2, 2, 0, 1)


def test_priority_mixes_the_size_of_advantages_and_the_time_since_a_visit() -> None:
    made = curriculum("priority", count=3, prior=2.0, staleness=0.25)
    made.observe(0, [group(made.tasks[0], 1, 0)])  # |x − ½| = ½ twice
    made.observe(1, [group(made.tasks[1], 1, 1)])
    fade = [2 ** (-2 / 10), 2 ** (-1 / 10)]
    sizes = [(1 + fade[0]) / (2 + 2 * fade[0]), 1 / (2 + 2 * fade[1]), 0.5]
    ages = [2, 1, 3]
    expected = [0.75 * m / sum(sizes) + 0.25 * age / 6 for m, age in zip(sizes, ages, strict=True)]
    assert made.probabilities(2) == pytest.approx(expected)
    oldest = curriculum("priority", count=3, prior=2.0, staleness=1.0)
    oldest.observe(0, [group(oldest.tasks[0], 1, 0)])
    assert oldest.probabilities(3) == pytest.approx([3 / 11, 4 / 11, 4 / 11])


def test_buckets_join_by_step_and_later_ones_fill_a_batch() -> None:
    level = ["hard", "easy", "easy", "middle"]
    options = {"column": "level", "levels": ["easy", "middle", "hard"], "starts": [0, 5, 9]}
    data = DataConfig(sampler="buckets", sampler_options=options)
    made = Curriculum(tasks(4, level=level), data, 2, seed=0, steps=20, reward="right")
    assert made.probabilities(4) == [0, 0.5, 0.5, 0]
    assert made.probabilities(5) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert made.probabilities(9) == [0.25] * 4
    larger = Curriculum(tasks(4, level=level), data, 3, seed=0, steps=20, reward="right")
    assert {"t1", "t2"} < {task.id for task in larger.batch(0)}


def test_numbers_are_split_into_equal_buckets_and_ties_stay_together() -> None:
    options = SamplerOptions(column="d")
    assert task_buckets(tasks(8, d=[1, 2, 3, 4, 5, 6, 7, 8]), options, 80) == (
        [0, 0, 1, 1, 2, 2, 3, 3],
        (0, 10, 20, 30),
    )
    ties, _ = task_buckets(tasks(4, d=[5, 1, 5, 5]), options, 80)
    assert ties[0] == ties[2] == ties[3] > ties[1]


def test_levels_may_be_numbers() -> None:
    options = SamplerOptions(column="d", levels=[1, 2, 3])
    assert task_buckets(tasks(4, d=[3, 1, 2, "1"]), options, 60) == ([2, 0, 1, 0], (0, 10, 20))
    assert unused_levels(tasks(2, d=[1, 3]), options) == ["data.sampler_options.levels: no task has the level 2"]


def test_first_draws_have_the_stated_probabilities() -> None:
    """A batch of one task, over many seeds: within four standard errors."""
    draws, count = 4000, Counter[str]()
    for seed in range(draws):
        made = curriculum("uncertainty", batch_size=1, seed=seed, prior=1.0)
        made.observe(0, [group(made.tasks[0], 1, 1, 1)])
        count[made.batch(1)[0].id] += 1
    for share, task in zip(made.probabilities(1), made.tasks, strict=True):
        assert abs(count[task.id] / draws - share) < 4 * math.sqrt(share * (1 - share) / draws)


def test_a_step_never_draws_a_task_twice_and_replacements_are_new() -> None:
    made = curriculum("band", count=6, batch_size=3)
    batch = [task.id for task in made.batch(0)]
    fresh = [task.id for task in made.fresh(0, 0, 10, batch)]
    assert sorted(batch + fresh) == sorted(task.id for task in made.tasks)
    assert [task.id for task in made.batch(0)] == batch


def test_draws_depend_on_seed_step_and_results_alone() -> None:
    first, again = curriculum("band", count=20), curriculum("band", count=20)
    for made in (first, again):
        for step in range(5):
            made.observe(step, [group(task, step % 2, 1) for task in made.batch(step)])
    assert first.batch(5) == again.batch(5)
    restored = curriculum("band", count=20)
    restored.restore(json.loads(json.dumps(first.state({4, 5}))))
    assert restored.observed == first.observed and restored.drawn == {4: first.drawn[4], 5: first.drawn[5]}
    assert restored.batch(6) == first.batch(6)
    assert curriculum("band", count=20, seed=1).batch(0) != curriculum("band", count=20).batch(0)


def test_metrics_describe_the_last_groups() -> None:
    made = curriculum("uncertainty", count=8)
    first, second, third = (group(made.tasks[i], *scores) for i, scores in enumerate([(1, 1), (0, 0), (1, 0)]))
    found = made.observe(0, [first, second, third])
    assert found["curriculum/coverage"] == 3 / 8
    thirds = (found["curriculum/solved"], found["curriculum/unsolved"], found["curriculum/in_band"])
    assert thirds == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    shares = made.probabilities(1)
    assert found["curriculum/effective_tasks"] == pytest.approx(1 / sum(p * p for p in shares))
    assert 7 < found["curriculum/effective_tasks"] < 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "data.sampler_options.column names none\n  columns of the first task: level"),
        ({"column": "levle"}, "column=levle: no task has such a column\n  columns of the data: level"),
        ({"column": "level"}, "column level, is 'easy', not a number"),
        ({"column": "level", "levels": ["hard"]}, "not one of data.sampler_options.levels"),
        ({"column": "level", "levels": ["easy", "hard"], "starts": [0]}, "has 1 steps for the 2 levels"),
    ],
)
def test_mistakes_in_buckets_are_explained(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        task_buckets(tasks(1, level=["easy"]), SamplerOptions(**options), 10)


def test_a_level_that_no_task_has_is_warned_of() -> None:
    options = SamplerOptions(column="level", levels=["easy", "medium", "hard"])
    (text,) = unused_levels(tasks(2, level=["easy", "hard"]), options)
    assert text == "data.sampler_options.levels: no task has the level medium"
    assert unused_levels(tasks(2, level=["medium", "hard"]), SamplerOptions(column="level")) == []


def test_starts_that_fall_are_refused() -> None:
    with pytest.raises(InputError, match="start with 0 and never fall"):
        SamplerOptions(starts=[0, 9, 3])


def test_options_of_another_sampler_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"unknown option of data.sampler=uncertainty  target\n.*known: explore, half_life"
    ):
        sampler_options(DataConfig(sampler="uncertainty", sampler_options={"target": 0.3}))
    with pytest.raises(InputError, match=r"options.target has no effect: data.sampler=uniform has no options"):
        sampler_options(DataConfig(sampler_options={"target": 0.3}))
    with pytest.raises(InputError, match=r"data.sampler_options.explore must be a number from 0 to 1, got 2"):
        sampler_options(DataConfig(sampler="band", sampler_options={"explore": 2}))


def test_the_page_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs/curriculum.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    defaults = {name: str(value).replace("None", "") for name, value in vars(SamplerOptions()).items()}
    assert {name: rows.get(name) for name in defaults} == defaults
    assert set(defaults) == {name for names in OPTIONS.values() for name in names} > set(OF_ALL)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("data.sampler=band",), ("data.sampler=priority", "algorithm=dapo")])
def test_a_run_in_parts_equals_one_run(tmp_path: Path, tiny_model_folder: Path, settings: tuple[str, ...]) -> None:
    """Also with dynamic sampling (dapo), whose replacements are drawn by the same sampler."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    train_here(whole, tiny_model_folder, *settings)
    train_here(parts, tiny_model_folder, *settings, "loop.max_minutes=0")
    train_here(parts, tiny_model_folder, *settings, "loop.max_minutes=100")
    expected = outcome(whole)
    assert outcome(parts) == expected
    steps = [record["metrics"] for record in expected["records"] if record["kind"] == "step"]
    assert steps[-1]["curriculum/coverage"] > steps[0]["curriculum/coverage"] > 0


@pytest.mark.slow
def test_an_asynchronous_run_resumes_with_its_draws(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["data.train_batch_size=2", "rollout.group_size=4", "rollout.max_tokens=6", "data.sampler=uncertainty"]
    settings += ["eval.before=false", "eval.after=false", "algorithm=grpo", "loop.total_steps=6", "data.val_size=4"]
    settings += ["mode=async", "mode.max_staleness=2", "mode.max_uses=2"]
    assert main(["train", f"model={tiny_model_folder}", *settings, "loop.max_minutes=0"]) == 0
    (run,) = tmp_path.glob("outputs/*/*")
    kept = json.loads((run / "checkpoints/step-000001/state.json").read_text())["source"]
    waiting = {number // 1 for number, *_ in kept["window"]["tickets"]} | {int(number) for number in kept["former"]}
    assert {int(step) for step in kept["curriculum"]["drawn"]} == waiting != set()
    assert main(["train", f"model={tiny_model_folder}", *settings, "loop.max_minutes=100"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(6))
