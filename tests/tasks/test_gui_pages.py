"""Generated pages, without a browser. tests/agents/gui/test_generated_pages.py plays them."""

from __future__ import annotations

import pytest

from covey.agents.gui.agent import page_task
from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks import TaskSet, load_tasks
from covey.tasks.gui_pages import HELD_OUT, KINDS, LAYOUTS, THINGS


def pages(seed: int = 0, **options: object) -> TaskSet:
    return load_tasks(DataConfig(name="gui_pages", train_size=120, val_size=40, options=options), seed)


def test_validation_pages_have_layouts_that_no_training_page_has() -> None:
    tasks = pages()
    assert {task.columns["layout"] for task in tasks.train} == {*LAYOUTS}
    assert {task.columns["layout"] for task in tasks.validation} == {*HELD_OUT} and not {*LAYOUTS} & {*HELD_OUT}
    for split in (tasks.train, tasks.validation):
        assert {task.columns["kind"] for task in split} == {*KINDS}


def test_the_seed_gives_other_training_pages_and_the_same_validation_pages() -> None:
    one, same, other = pages(0), pages(0), pages(1)
    assert one.train == same.train and one.validation == other.validation
    assert not {task.id for task in one.train} & {task.id for task in other.train}


def test_every_page_is_a_task_of_the_agent_and_solvable_in_its_turns() -> None:
    for task in pages().train:
        columns = page_task(task)
        assert columns is not None and columns.html and columns.viewport == (480, 400)
        assert columns.max_turns is not None and len(task.columns["solution"]) < columns.max_turns


def test_the_kinds_can_be_chosen() -> None:
    tasks = pages(kinds=["menu", "date"])
    assert {task.columns["kind"] for task in tasks.train} == {"menu", "date"}
    with pytest.raises(InputError, match="did you mean   slider"):
        pages(kinds=["slidr"])


def test_small_pages_with_few_buttons_and_layouts_of_their_own() -> None:
    tasks = pages(kinds=["colour"], buttons=3, viewport=[112, 96], max_turns=2, varied=True)
    seen = {split: {task.columns["layout"] for task in getattr(tasks, split)} for split in ("train", "validation")}
    assert len(seen["train"]) > 100 and not seen["train"] & seen["validation"]
    for task in (*tasks.train, *tasks.validation):
        columns = page_task(task)
        assert columns is not None and columns.html is not None
        assert columns.viewport == (112, 96) and columns.max_turns == 2 and columns.html.count("<button") == 3
        assert task.columns["layout"] in columns.html


def test_few_words_are_used() -> None:
    tasks = pages(kinds=["list", "menu"], words=9)
    html = "".join(str(task.columns["html"]) for task in tasks.train)
    assert THINGS[8] in html and not any(f">{word}<" in html for word in THINGS[9:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": 3}, "data.options.words must be a whole number from 9"),
        ({"buttons": 1}, "data.options.buttons"),
        ({"viewport": [20, 100]}, "data.options.viewport"),
        ({"viewport": [100]}, "width, height"),
        ({"max_turns": 0}, "data.options.max_turns"),
    ],
)
def test_options_that_no_page_can_have(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        pages(**options)
