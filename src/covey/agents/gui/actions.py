"""Actions on a web page, and the two formats in which a model writes them.

`computer_use` is the tool call of Qwen2.5-VL (https://github.com/QwenLM/Qwen3-VL, cookbooks/computer_use.ipynb):

    <tool_call>
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [120, 44]}}
    </tool_call>

`thought_action` is the format of AgentFly's gui agent and of UI-TARS:

    Thought: The button is at the top.
    Action: click(start_box='(120,44)')

Additions to both: `back`, since the page has no buttons of a browser around it. Coordinates are pixels of the image as
the model sees it, after the resizing of its image processor; `Screen` converts them to pixels of the page.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from covey.agents.formats.hermes import HermesFormat
from covey.errors import nearest
from covey.tool_calls import Call

Point = tuple[float, float]

MAX_TEXT = 2000  # characters of one `type`
MAX_WAIT = 5.0  # seconds of one `wait`; a longer one is shortened
MAX_SCROLL = 10_000.0  # pixels
MAX_ACTION = 10_000  # characters of a call in a reply
SCROLL_STEP = 400.0  # pixels of a scroll without an amount


@dataclass(frozen=True, slots=True)
class Action:
    """One action. Points are in pixels of the page once `Screen.to_page` has converted them."""

    # click, double_click, triple_click, right_click, middle_click, move, drag, type, key, scroll, wait, back, finish
    kind: str
    at: Point | None = None  # None: where the mouse is
    to: Point | None = None  # the end of a drag
    text: str = ""  # of `type`; the answer of `finish`
    keys: tuple[str, ...] = ()  # Playwright's names, pressed together
    scroll: Point = (0.0, 0.0)  # right and down, in pixels
    seconds: float = 1.0  # of `wait`

    def describe(self) -> str:
        """click (120, 44), type 'blue', …"""
        where = "" if self.at is None else f" ({self.at[0]:.0f}, {self.at[1]:.0f})"
        match self.kind:
            case "type" | "finish":
                return f"{self.kind} {self.text!r:.80}"
            case "key":
                return f"key {'+'.join(self.keys)}"
            case "scroll":
                return f"scroll{where} by ({self.scroll[0]:.0f}, {self.scroll[1]:.0f})"
            case "drag" if self.to is not None:
                return f"drag{where} to ({self.to[0]:.0f}, {self.to[1]:.0f})"
        return f"{self.kind}{where}"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A reply without a usable action. `kind` is counted; `text` is shown to the model."""

    kind: str  # malformed | unknown_tool | bad_arguments
    text: str


Step = Action | Mistake


class WrongArgument(Exception):
    """An argument of an action that cannot be used."""


# -- Coordinates -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the page, and of its screenshot as the model sees it."""

    page: tuple[int, int]  # width, height
    shown: tuple[int, int]

    def to_page(self, action: Action) -> Step:
        """The action with its points in pixels of the page; a mistake if one is outside the screen."""
        points = [self._point(point) for point in (action.at, action.to)]
        for given, point in zip((action.at, action.to), points, strict=True):
            if given is not None and point is None:
                width, height = self.shown
                return Mistake(
                    "bad_arguments", f"({given[0]:g}, {given[1]:g}) is outside the screen of {width}x{height}"
                )
        return replace(action, at=points[0], to=points[1])

    def _point(self, point: Point | None) -> Point | None:
        if point is None or not (0 <= point[0] < self.shown[0] and 0 <= point[1] < self.shown[1]):
            return None
        return point[0] * self.page[0] / self.shown[0], point[1] * self.page[1] / self.shown[1]


# -- Keys --------------------------------------------------------------------------------------------------------------

KEYS = {
    **{name.lower(): name for name in ("Enter", "Tab", "Escape", "Backspace", "Delete", "Insert", "Home", "End")},
    **{name.lower(): name for name in ("Shift", "Control", "Alt", "Space", "PageUp", "PageDown")},
    **{f"arrow{way}": f"Arrow{way.title()}" for way in ("up", "down", "left", "right")},
    **{way: f"Arrow{way.title()}" for way in ("up", "down", "left", "right")},
    **{"ctrl": "Control", "return": "Enter", "esc": "Escape", "del": "Delete", "ins": "Insert", "option": "Alt"},
    **{"page_up": "PageUp", "page_down": "PageDown", "pgup": "PageUp", "pgdn": "PageDown", "spacebar": "Space"},
    **{f"f{number}": f"F{number}" for number in range(1, 13)},
}


def key_names(words: Sequence[Any]) -> tuple[str, ...]:
    """Playwright's names of keys that are pressed together: ctrl, a → Control, a."""
    keys: list[str] = []
    for word in words:
        if not isinstance(word, str) or not word:
            raise WrongArgument(f"{word!r:.40} is not the name of a key")
        if (name := KEYS.get(word.strip().lower())) is not None:
            keys.append(name)
        elif len(word) == 1 and word.isprintable():
            keys.append(word)
        else:
            guess = nearest(word.lower(), KEYS)
            raise WrongArgument(f"there is no key {word!r:.40}" + (f" (did you mean {guess}?)" if guess else ""))
    if not 1 <= len(keys) <= 4:
        raise WrongArgument("press one to four keys together")
    return tuple(keys)


# -- Formats -----------------------------------------------------------------------------------------------------------


class ActionFormat(Protocol):
    """How a model writes actions. A format has no state: one serves all episodes."""

    @property
    def name(self) -> str: ...

    def instructions(self, shown: tuple[int, int]) -> str:
        """Text for the system message. `shown` is the size of the screenshots as the model sees them."""
        ...

    def parse(self, text: str) -> Step:
        """The action of a reply. Never raises."""
        ...


ACTION_WORDS = {  # computer_use's names of actions → ours, and what the prompt says of them
    "left_click": ("click", "click at `coordinate`"),
    "double_click": ("double_click", "double-click at `coordinate`"),
    "triple_click": ("triple_click", "triple-click at `coordinate`, which selects a line"),
    "right_click": ("right_click", "click the right button at `coordinate`"),
    "middle_click": ("middle_click", "click the middle button at `coordinate`"),
    "mouse_move": ("move", "move the mouse to `coordinate`"),
    "left_click_drag": ("drag", "drag from where the mouse is to `coordinate`"),
    "type": ("type", "type `text` into the focused element"),
    "key": ("key", "press `keys` together"),
    "scroll": ("scroll", "turn the wheel by `pixels`: positive scrolls up, negative scrolls down"),
    "hscroll": ("scroll", "scroll sideways by `pixels`: positive scrolls right, negative scrolls left"),
    "wait": ("wait", "wait `time` seconds"),
    "back": ("back", "go back to the previous page"),
    "answer": ("finish", "end the task and give `text` as the answer"),
    "terminate": ("finish", "end the task with `status`"),
}


def computer_use_schema(shown: tuple[int, int]) -> dict[str, Any]:
    """The tool `computer_use`, for a screen of that size."""
    about = "\n".join(f"* `{name}`: {what}" for name, (_, what) in ACTION_WORDS.items())
    width, height = shown
    properties = {
        "action": {"type": "string", "enum": list(ACTION_WORDS), "description": f"What to do:\n{about}"},
        "coordinate": {"type": "array", "description": "x and y in pixels from the left and the top of the screen"},
        "text": {"type": "string", "description": "for type and answer"},
        "keys": {"type": "array", "description": 'for key, for example ["ctrl", "a"]'},
        "pixels": {"type": "number", "description": "for scroll and hscroll"},
        "time": {"type": "number", "description": "for wait"},
        "status": {"type": "string", "enum": ["success", "failure"], "description": "for terminate"},
    }
    description = (
        f"Use a web page with mouse and keyboard. You see a screenshot of {width}x{height} pixels after every action. "
        "Click the middle of buttons, links and fields; click a field before you type into it."
    )
    return {
        "type": "function",
        "function": {
            "name": "computer_use",
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": ["action"]},
        },
    }


@dataclass(frozen=True, slots=True)
class ComputerUse:
    """Qwen2.5-VL's tool call."""

    name: ClassVar[str] = "computer_use"
    calls: ClassVar[HermesFormat] = HermesFormat(native_tools=False)

    def instructions(self, shown: tuple[int, int]) -> str:
        text = self.calls.instructions([computer_use_schema(shown)])
        assert text is not None
        return text

    def parse(self, text: str) -> Step:
        calls = self.calls.parse(text).calls
        if not calls:
            example = '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [10, 20]}}'
            return Mistake("malformed", f"The reply has no action. Write one: <tool_call>\n{example}\n</tool_call>")
        call = calls[0]
        if call.problem is not None:
            return Mistake("malformed", call.problem)
        if call.name != "computer_use":
            return Mistake("unknown_tool", f"There is no tool {call.name!r:.60}; the only tool is computer_use.")
        try:
            return _computer_use_action(call)
        except WrongArgument as error:
            return Mistake("bad_arguments", str(error))


def _computer_use_action(call: Call) -> Action:
    given = call.arguments
    word = given.get("action")
    if not isinstance(word, str) or word not in ACTION_WORDS:
        guess = nearest(str(word)[:40], ACTION_WORDS)
        hint = f" (did you mean {guess}?)" if guess else ""
        raise WrongArgument(f"There is no action {word!r:.60}{hint}; the actions are {', '.join(ACTION_WORDS)}.")
    kind = ACTION_WORDS[word][0]
    at = _point(given["coordinate"]) if given.get("coordinate") is not None else None
    match word:
        case "left_click_drag":
            return Action(kind, to=_required(at, word, "coordinate"))
        case "type":
            return Action(kind, text=_text(given, word))
        case "key":
            keys = given.get("keys", given.get("text"))
            return Action(kind, keys=key_names(re.split(r"[+\s]+", keys) if isinstance(keys, str) else _list(keys)))
        case "scroll":
            return Action(kind, at, scroll=(0.0, -_number(given, "pixels", MAX_SCROLL)))
        case "hscroll":
            return Action(kind, at, scroll=(_number(given, "pixels", MAX_SCROLL), 0.0))
        case "wait":
            return wait(_number(given, "time", math.inf))
        case "answer":
            return Action(kind, text=_text(given, word))
        case "terminate":
            return Action(kind, text=str(given.get("text", "")))
        case "back":
            return Action(kind)
    return Action(kind, _required(at, word, "coordinate"))


def wait(seconds: float) -> Action:
    if seconds < 0:
        raise WrongArgument(f"wait: {seconds:g} seconds are not a time")
    return Action("wait", seconds=min(seconds, MAX_WAIT))


def _required(point: Point | None, action: str, name: str) -> Point:
    if point is None:
        raise WrongArgument(f"{action} needs `{name}`: [x, y]")
    return point


def _text(given: Mapping[str, Any], action: str) -> str:
    text = given.get("text")
    if not isinstance(text, str):
        raise WrongArgument(f"{action} needs `text`, a string")
    if len(text) > MAX_TEXT:
        raise WrongArgument(f"{action}: at most {MAX_TEXT} characters at a time")
    return text


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise WrongArgument('key needs `keys`, for example ["ctrl", "a"]')
    return value


def _number(given: Mapping[str, Any], name: str, limit: float) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > limit:
        raise WrongArgument(f"`{name}` must be a number" + (f" within ±{limit:g}" if math.isfinite(limit) else ""))
    return float(value)


def _point(value: Any) -> Point:
    """[x, y], or a box [x1, y1, x2, y2], whose centre is meant."""
    numbers = value if isinstance(value, list | tuple) else ()
    good = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    if not good or len(numbers) not in (2, 4):
        raise WrongArgument(f"a coordinate is [x, y] in pixels, got {value!r:.60}")
    xs, ys = numbers[0::2], numbers[1::2]
    return sum(xs) / len(xs), sum(ys) / len(ys)


# -- Thought and action ------------------------------------------------------------------------------------------------

CALLS = {  # names of AgentFly and UI-TARS → ours
    **{"click": "click", "left_single": "click", "left_double": "double_click", "double_click": "double_click"},
    **{"right_single": "right_click", "right_click": "right_click", "drag": "drag", "select": "drag"},
    **{"type": "type", "hotkey": "key", "press": "key", "key": "key", "scroll": "scroll", "wait": "wait"},
    **{"back": "back", "press_back": "back", "finished": "finish", "finish": "finish", "hover": "move"},
}
DIRECTIONS = {"up": (0.0, -1.0), "down": (0.0, 1.0), "left": (-1.0, 0.0), "right": (1.0, 0.0)}
ACTION_LINE = re.compile(r"^[ \t]*\**Action\**[ \t]*:\**[ \t]*", re.IGNORECASE | re.MULTILINE)
QUOTED = re.compile(r"\A(type|finished|finish)\s*\(\s*(?:content|text)\s*=\s*(['\"])(.*)\2\s*\)\s*\Z", re.DOTALL)
HOW = (
    "Write two lines:\nThought: what you see and what to do\nAction: one action, for example click(start_box='(10,20)')"
)
INSTRUCTIONS = """You use a web page with mouse and keyboard. After every action you see a screenshot.
Its size is {width}x{height} pixels.

Always write two lines:
Thought: what you see and what to do next
Action: one of the actions below

click(start_box='(x,y)')
left_double(start_box='(x,y)')
right_single(start_box='(x,y)')
drag(start_box='(x,y)', end_box='(x,y)')
type(content='text')    a line break at the end presses Enter
hotkey(key='ctrl a')
scroll(direction='down')    or up, left, right; start_box='(x,y)' says where
wait()
back()    the previous page
finished(content='the answer, if there is one')

x and y are pixels from the left and the top of the screenshot. Click a field before you type into it."""


@dataclass(frozen=True, slots=True)
class ThoughtAction:
    """AgentFly's and UI-TARS's calls after `Action:`."""

    name: ClassVar[str] = "thought_action"

    def instructions(self, shown: tuple[int, int]) -> str:
        return INSTRUCTIONS.format(width=shown[0], height=shown[1])

    def parse(self, text: str) -> Step:
        line = ACTION_LINE.search(text)
        if line is None:
            return Mistake("malformed", f"The reply has no line `Action:`. {HOW}")
        after = text[line.end() :].strip()
        call = after[:MAX_ACTION].split("\n\n")[0].strip().strip("`")
        name, arguments = _read_call(call)
        if name is None:
            return Mistake("malformed", f"The action {call!r:.80} cannot be read. {HOW}")
        if name not in CALLS:
            guess = nearest(name, CALLS)
            hint = f" (did you mean {guess}?)" if guess else ""
            return Mistake("unknown_tool", f"There is no action {name!r:.40}{hint}. {HOW}")
        try:
            return _called_action(CALLS[name], name, arguments)
        except WrongArgument as error:
            return Mistake("bad_arguments", str(error))


def _read_call(call: str) -> tuple[str | None, dict[str, Any]]:
    """Name and keyword arguments of a call. A text in quotes may contain unescaped quotes."""
    try:
        node = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if (quoted := QUOTED.match(call)) is None:
            return None, {}
        return quoted[1], {"content": re.sub(r"\\(['\"\\])", r"\1", quoted[3]).replace("\\n", "\n")}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        return None, {}
    try:
        return node.func.id, {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None, {}


def _called_action(kind: str, name: str, given: Mapping[str, Any]) -> Action:
    at = _box(given, "start_box", "point", "start_point")
    match kind:
        case "type" | "finish":
            text = given.get("content", given.get("text", "" if kind == "finish" else None))
            return Action(kind, text=_text({"text": text}, name))
        case "key":
            return Action(kind, keys=key_names(str(given.get("key", "")).replace("+", " ").split()))
        case "scroll":
            way = given.get("direction")
            if way not in DIRECTIONS:
                raise WrongArgument(f"scroll needs a direction: {', '.join(DIRECTIONS)}")
            x, y = DIRECTIONS[way]
            return Action(kind, at, scroll=(x * SCROLL_STEP, y * SCROLL_STEP))
        case "wait":
            return wait(1.0)
        case "back":
            return Action(kind)
        case "drag":
            to = _box(given, "end_box", "end_point")
            return Action(kind, _required(at, name, "start_box"), _required(to, name, "end_box"))
    return Action(kind, _required(at, name, "start_box"))


def _box(given: Mapping[str, Any], *names: str) -> Point | None:
    """'(x,y)', '<|box_start|>(x,y)<|box_end|>', '<point>x y</point>', or a box of four numbers."""
    value = next((given[name] for name in names if name in given), None)
    if not isinstance(value, str):
        return None if value is None else _point(value)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", value[:200])
    return _point([float(number) for number in numbers])


FORMATS: dict[str, ActionFormat] = {"computer_use": ComputerUse(), "thought_action": ThoughtAction()}
