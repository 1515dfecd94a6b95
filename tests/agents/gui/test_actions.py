"""Actions from replies, and their coordinates. No browser is needed."""

from __future__ import annotations

import json

import pytest

from covey.agents.gui.actions import ACTION_WORDS, FORMATS, Action, Mistake, Screen, computer_use_schema, key_names
from tests.agents.gui.browsing import call

COMPUTER, CALLS = FORMATS["computer_use"], FORMATS["thought_action"]


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (call("left_click", coordinate=[10, 20]), Action("click", (10, 20))),
        (call("double_click", coordinate=[10.5, 20]), Action("double_click", (10.5, 20))),
        (call("right_click", coordinate=[1, 2]), Action("right_click", (1, 2))),
        (call("left_click", coordinate=[10, 20, 30, 60]), Action("click", (20, 40))),  # a box: its centre
        (call("left_click_drag", coordinate=[5, 6]), Action("drag", to=(5, 6))),
        (call("type", text='say "hi"\n'), Action("type", text='say "hi"\n')),
        (call("key", keys=["ctrl", "a"]), Action("key", keys=("Control", "a"))),
        (call("key", text="ctrl+Return"), Action("key", keys=("Control", "Enter"))),
        (call("scroll", pixels=-300), Action("scroll", scroll=(0.0, 300.0))),  # negative scrolls down
        (call("scroll", pixels=50, coordinate=[7, 8]), Action("scroll", (7, 8), scroll=(0.0, -50.0))),
        (call("hscroll", pixels=20), Action("scroll", scroll=(20.0, 0.0))),
        (call("wait", time=2), Action("wait", seconds=2.0)),
        (call("wait", time=1000), Action("wait", seconds=5.0)),  # at most five seconds
        (call("back"), Action("back")),
        (call("answer", text="42"), Action("finish", text="42")),
        (call("terminate", status="success"), Action("finish")),
    ],
)
def test_computer_use(reply: str, action: Action) -> None:
    assert COMPUTER.parse(f"I see a page. {reply}") == action


@pytest.mark.parametrize(
    ("reply", "kind", "part"),
    [
        ("I would click the button.", "malformed", "no action"),
        ("<tool_call>\n{'name': \n</tool_call>", "malformed", "JSON"),
        (call("left_click", coordinate=[1, 2]).replace("computer_use", "computer"), "unknown_tool", "computer_use"),
        (call("left_clik", coordinate=[1, 2]), "bad_arguments", "did you mean left_click"),
        (call("left_click"), "bad_arguments", "needs `coordinate`"),
        (call("left_click", coordinate="middle"), "bad_arguments", "[x, y] in pixels"),
        (call("left_click", coordinate=[1, True]), "bad_arguments", "[x, y] in pixels"),
        (call("type"), "bad_arguments", "needs `text`"),
        (call("type", text="x" * 3000), "bad_arguments", "at most 2000"),
        (call("key", keys=["contrl"]), "bad_arguments", "no key 'contrl'"),
        (call("key", keys=[]), "bad_arguments", "one to four keys"),
        (call("scroll", pixels="many"), "bad_arguments", "`pixels` must be a number"),
        (call("scroll", pixels=1e9), "bad_arguments", "`pixels` must be a number"),
        (call("wait", time=-1), "bad_arguments", "-1 seconds"),
    ],
)
def test_a_mistake_says_what_is_wrong(reply: str, kind: str, part: str) -> None:
    step = COMPUTER.parse(reply)
    assert isinstance(step, Mistake) and step.kind == kind and part in step.text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click(start_box='(100,200)')", Action("click", (100, 200))),
        ("click(start_box='<|box_start|>(100,200)<|box_end|>')", Action("click", (100, 200))),
        ("click(point='<point>100 200</point>')", Action("click", (100, 200))),
        ("click(start_box='[10, 20, 30, 40]')", Action("click", (20, 30))),
        ("left_double(start_box='(1,2)')", Action("double_click", (1, 2))),
        ("right_single(start_box='(1,2)')", Action("right_click", (1, 2))),
        ("drag(start_box='(1,2)', end_box='(3,4)')", Action("drag", (1, 2), (3, 4))),
        ("hotkey(key='ctrl shift t')", Action("key", keys=("Control", "Shift", "t"))),
        ("type(content='it\\'s\\n')", Action("type", text="it's\n")),
        ("type(content='it's fine')", Action("type", text="it's fine")),  # an unescaped quote
        ("scroll(direction='down')", Action("scroll", scroll=(0.0, 400.0))),
        ("scroll(start_box='(9,8)', direction='left')", Action("scroll", (9, 8), scroll=(-400.0, 0.0))),
        ("wait()", Action("wait", seconds=1.0)),
        ("back()", Action("back")),
        ("finished(content='done')", Action("finish", text="done")),
        ("finished()", Action("finish")),
    ],
)
def test_thought_action(text: str, action: Action) -> None:
    assert CALLS.parse(f"Thought: I see a button.\nAction: {text}") == action


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Thought: nothing", "malformed"),
        ("Action: click the button", "malformed"),
        ("Action: clik(start_box='(1,2)')", "unknown_tool"),
        ("Action: click()", "bad_arguments"),
        ("Action: click(start_box='here')", "bad_arguments"),
        ("Action: scroll(direction='away')", "bad_arguments"),
        ("Action: __import__('os').system('true')", "malformed"),
        ("Action: type(content=open('/etc/passwd'))", "malformed"),
        ("Action: " + "(" * 5000, "malformed"),
    ],
)
def test_a_call_that_cannot_be_used_is_a_mistake(text: str, kind: str) -> None:
    step = CALLS.parse(text)
    assert isinstance(step, Mistake) and step.kind == kind


def test_only_the_first_action_counts() -> None:
    reply = call("left_click", coordinate=[1, 2]) + call("left_click", coordinate=[3, 4])
    assert COMPUTER.parse(reply) == Action("click", (1, 2))


def test_points_are_converted_from_the_image_that_the_model_sees_to_the_page() -> None:
    """A page of 480x400 is seen as 476x392 by a model with tokens of 28x28 pixels."""
    screen = Screen((480, 400), (476, 392))
    moved = screen.to_page(Action("drag", (238, 196), (119, 98)))
    assert moved == Action("drag", (240, 200), (120, 100))


@pytest.mark.parametrize("point", [(476, 0), (0, 392), (-1, 5)])
def test_a_point_outside_the_screen_is_a_mistake(point: tuple[float, float]) -> None:
    step = Screen((480, 400), (476, 392)).to_page(Action("click", point))
    assert isinstance(step, Mistake) and "outside the screen of 476x392" in step.text


def test_keys_have_the_names_that_models_write() -> None:
    assert key_names(["Return"]) == ("Enter",) and key_names(["page_down"]) == ("PageDown",)
    assert key_names(["ALT", "left"]) == ("Alt", "ArrowLeft") and key_names(["é"]) == ("é",)


def test_the_schema_names_every_action_and_the_size_of_the_screen() -> None:
    schema = computer_use_schema((476, 392))["function"]
    assert schema["parameters"]["properties"]["action"]["enum"] == list(ACTION_WORDS)
    assert "476x392" in schema["description"] and json.dumps(schema) in COMPUTER.instructions((476, 392))
