"""Generated web pages for agent=gui: small pages with one thing to do, as in MiniWoB++.

    button     click one of several buttons             checkbox   tick some of several boxes
    form       fill in two fields and send              select     choose from a list of options
    menu       open a menu and choose an entry          slider     set a value
    list       choose an entry of a long list           date       pick a day in a calendar
    colour     click the button of one of several colours (needs no reading: for small models)

Liu et al. 2018 (MiniWoB++), https://arxiv.org/abs/1802.08802

A page is HTML with its own style and script. Validation pages have layouts (HELD_OUT) that no training page has. The
page keeps what was done in `window.result`, which `success` compares with what the instruction says. The column
`solution` lists the steps of a perfect player, with CSS selectors; only tests use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from random import Random
from typing import Any

from covey.errors import InputError, unknown
from covey.tasks.problems import Problem, check_range, in_validation

NAMES = ("Ada", "Bela", "Carla", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena", "Mina")
THINGS = (
    *("apple", "bread", "candle", "desk", "engine", "flute", "glove", "hammer", "island", "jacket", "kettle", "ladder"),
    *("mirror", "needle", "orange", "pencil", "quilt", "ribbon", "saddle", "table", "umbrella", "violin", "wagon"),
    *("window", "yarn", "zipper", "anchor", "basket", "cushion", "drum", "easel", "feather"),
)
CITIES = ("Accra", "Bergen", "Cusco", "Dakar", "Essen", "Fukuoka", "Ghent", "Hanoi", "Izmir", "Jaipur")
COLOURS = {"red": "#d22", "green": "#2a2", "blue": "#22d", "yellow": "#ed2", "purple": "#92b", "orange": "#f80"}
MONTHS = [
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
]

PLAIN = "body { font: 16px sans-serif; margin: 16px }"
PLAIN += " button, input, select { font: inherit; margin: 4px; padding: 4px 8px } "
SMALL = 300  # pixels: narrower pages have no heading, small margins and a small font
LAYOUTS = {
    "plain": PLAIN,
    "large": PLAIN + "body { font-size: 20px } button { border-radius: 8px }",
    "centre": PLAIN + "main { width: 62vw; margin: 10vh auto; text-align: center }",
    "right": PLAIN + "main { width: 54vw; margin-left: auto; margin-right: 8px }",
    "card": PLAIN + "body { background: #dde6f0 } main { background: white; padding: 16px; border-radius: 12px }",
    "green": PLAIN + "button { background: #2a7d46; color: white; border: 0 } h1 { color: #2a7d46 }",
}
HELD_OUT = {
    "dark": PLAIN + "body { background: #1d2330; color: #eee } button { background: #445; color: white; border: 0 }",
    "low": PLAIN + "main { margin-top: 27vh; margin-left: 12vw; font-family: serif } h1 { font-style: italic }",
}
HELD_OUT_HUES = range(200, 280)  # degrees: blue and violet backgrounds
HUES = [hue for hue in range(0, 360, 10) if hue not in HELD_OUT_HUES]
VIEWPORT = (480, 400)
MAX_TURNS = 20  # more than any solution needs
LEAST_WORDS = 9  # of one page

Step = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    words: Sequence[str]  # that a page may have
    buttons: int  # of the kinds button and colour


@dataclass(frozen=True, slots=True)
class Exercise:
    """What a page contains. `script` and the handlers of `body` store what was done in `result`."""

    body: str
    instruction: str
    result: Any  # the right value of `window.result`
    solution: Sequence[Step]
    script: str = ""


def _click(selector: str) -> Step:
    return {"do": "click", "selector": selector}


def varied_layout(rng: Random, *, held_out: bool) -> str:
    """A random style. Held-out ones have backgrounds and margins that no other one has."""
    hue = rng.choice(HELD_OUT_HUES[::10] if held_out else HUES)
    top, left = (2 * rng.randrange(low, high) + held_out for low, high in ((0, 10), (0, 8)))  # even, or odd if held out
    dark = rng.random() < 0.5
    back = f"hsl({hue} {rng.choice((20, 50, 80))}% {rng.choice((10, 20, 30) if dark else (80, 90, 97))}%)"
    return (
        f"body {{ background: {back}; color: {'white' if dark else 'black'} }}"
        f" main {{ margin: {top}vh 0 0 {left}vw; width: {rng.choice((78, 85))}vw;"
        f" text-align: {rng.choice(('left', 'left', 'center'))} }} button {{ border-radius: {rng.choice((0, 3, 8))}px;"
        f" border-width: {rng.choice((0, 1, 2))}px }}"
    )


# -- The kinds ---------------------------------------------------------------------------------------------------------


def _button(rng: Random, size: Size) -> Exercise:
    names = rng.sample(size.words, size.buttons)
    right = rng.randrange(size.buttons)
    buttons = "".join(f'<button id="b{i}" onclick="result = {i}">{name}</button>' for i, name in enumerate(names))
    return Exercise(buttons, f'Click the button "{names[right]}".', right, [_click(f"#b{right}")])


def _colour(rng: Random, size: Size) -> Exercise:
    names = rng.sample([*COLOURS], size.buttons)
    right = rng.randrange(size.buttons)
    buttons = "".join(
        f'<button class="colour" id="b{i}" aria-label="{name}" style="background: {COLOURS[name]}" '
        f'onclick="result = {i}"></button>'
        for i, name in enumerate(names)
    )
    return Exercise(buttons, f"Click the {names[right]} button.", right, [_click(f"#b{right}")])


def _form(rng: Random, size: Size) -> Exercise:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    body = (
        '<form onsubmit="result = [first.value, city.value]; event.preventDefault()">'
        '<p>Name <input id="first" autocomplete="off"></p><p>City <input id="city" autocomplete="off"></p>'
        '<button id="send">Send</button></form>'
    )
    steps = [
        *(_click("#first"), {"do": "type", "text": name}, _click("#city"), {"do": "type", "text": city}),
        _click("#send"),
    ]
    return Exercise(body, f"Enter the name {name} and the city {city}, then click Send.", [name, city], steps)


def _menu(rng: Random, size: Size) -> Exercise:
    heads, names = rng.sample(("File", "Edit", "View", "Tools"), 3), rng.sample(size.words, 9)
    menu, entry = rng.randrange(3), rng.randrange(3)
    body = "".join(
        f'<button id="m{m}" onclick="show({m})">{head}</button>'
        f'<div class="menu" id="d{m}" hidden>'
        + "".join(
            f'<div><button id="e{m}{e}" onclick="result = [{m}, {e}]; show(-1)">{names[3 * m + e]}</button></div>'
            for e in range(3)
        )
        + "</div>"
        for m, head in enumerate(heads)
    )
    script = "function show(n) { [0, 1, 2].forEach(m => document.getElementById('d' + m).hidden = m !== n) }"
    asked = f'Open the menu {heads[menu]} and choose "{names[3 * menu + entry]}".'
    return Exercise(body, asked, [menu, entry], [_click(f"#m{menu}"), _click(f"#e{menu}{entry}")], script)


def _list(rng: Random, size: Size) -> Exercise:
    names = rng.sample(size.words, min(24, len(size.words)))
    right = rng.randrange(len(names))
    rows = "".join(
        f'<div class="row" id="r{i}" onclick="result = {i}; mark(this)">{name}</div>' for i, name in enumerate(names)
    )
    script = "function mark(row) { document.querySelectorAll('.row').forEach(r => r.style.fontWeight = '');"
    script += " row.style.fontWeight = 'bold' }"
    scroll = [{"do": "scroll", "selector": "#list", "by": [0, 28 * (right - 2)]}] if right > 4 else []
    return Exercise(
        f'<div id="list">{rows}</div>',
        f'Choose "{names[right]}" in the list. Scroll if you do not see it.',
        right,
        [*scroll, _click(f"#r{right}")],
        script,
    )


def _checkbox(rng: Random, size: Size) -> Exercise:
    names = rng.sample(size.words, 5)
    right = sorted(rng.sample(range(5), rng.randint(1, 3)))
    boxes = "".join(f'<p><label><input type="checkbox" id="c{i}"> {name}</label></p>' for i, name in enumerate(names))
    save = "result = [0, 1, 2, 3, 4].filter(i => document.getElementById('c' + i).checked)"
    asked = ", ".join(names[i] for i in right)
    steps = [*(_click(f"#c{i}") for i in right), _click("#save")]
    return Exercise(
        f'{boxes}<button id="save" onclick="{save}">Save</button>', f"Tick only {asked}, then click Save.", right, steps
    )


def _select(rng: Random, size: Size) -> Exercise:
    names = rng.sample(CITIES, 5)
    right = rng.randrange(1, 5)
    options = "".join(f'<option value="{i}" id="o{i}">{name}</option>' for i, name in enumerate(names))
    body = f'<p>City <select id="city">{options}</select></p><button id="ok" onclick="result = +city.value">OK</button>'
    asked = f"Select the city {names[right]}, then click OK."
    return Exercise(body, asked, right, [_click("#city"), _click(f"#o{right}"), _click("#ok")])


def _slider(rng: Random, size: Size) -> Exercise:
    right = rng.choice([value for value in range(11) if value != 5])
    body = (
        '<p>Volume <input type="range" id="level" min="0" max="10" value="5" oninput="shown.textContent = value">'
        ' <b id="shown">5</b></p><button id="set" onclick="result = +level.value">Set</button>'
    )
    key = {"do": "key", "keys": ["right" if right > 5 else "left"]}
    steps = [_click("#level"), *[key] * abs(right - 5), _click("#set")]
    return Exercise(body, f"Move the slider to {right}, then click Set.", right, steps)


def _date(rng: Random, size: Size) -> Exercise:
    year, month, ahead, day = rng.randint(2020, 2030), rng.randrange(12), rng.randint(0, 2), rng.randint(1, 28)
    target = month + ahead
    wanted = [year + target // 12, target % 12 + 1, day]
    body = '<p><button id="prev" onclick="go(-1)">&lt;</button> <b id="head"></b> <button id="next" onclick="go(1)">'
    body += '&gt;</button></p><div id="days"></div>'
    script = (
        f"let month = new Date({year}, {month}, 1); const names = {json.dumps(MONTHS)};"
        " function go(by) { month = new Date(month.getFullYear(), month.getMonth() + by, 1); draw() }"
        " function draw() { const y = month.getFullYear(), m = month.getMonth(); days.innerHTML = '';"
        " head.textContent = names[m] + ' ' + y;"
        " for (let d = 1; d <= new Date(y, m + 1, 0).getDate(); d++) { const b = document.createElement('button');"
        " b.textContent = d; b.id = 'day' + d; b.onclick = () => { result = [y, m + 1, d] }; days.append(b) } } draw()"
    )
    asked = f"Pick {MONTHS[target % 12]} {day}, {wanted[0]} in the calendar."
    return Exercise(body, asked, wanted, [*[_click("#next")] * ahead, _click(f"#day{day}")], script)


KINDS: dict[str, Callable[[Random, Size], Exercise]] = {
    "button": _button,
    "form": _form,
    "menu": _menu,
    "list": _list,
    "checkbox": _checkbox,
    "select": _select,
    "slider": _slider,
    "date": _date,
    "colour": _colour,
}
STYLE = (
    "#list { height: 140px; width: 180px; overflow: auto; border: 1px solid #888 } .row { height: 28px }"
    " #days { width: 330px } #days button { width: 40px; padding: 2px; margin: 2px }"
    " .colour { width: 4.5em; height: 2em }"
    f" @media (max-width: {SMALL}px) {{ h1 {{ display: none }} p {{ margin: 2px 0 }}"
    " body { font-size: 11px; margin: 4px } main { padding: 0 !important }"
    " button, input, select { margin: 2px; padding: 1px 3px } .colour { width: 3.5em } }"
)
# A page says when something was done, so that a screenshot shows it.
NOTE = (
    "let done = null; Object.defineProperty(window, 'result', { get: () => done,"
    " set: value => { done = value; note.textContent = 'Saved.' } });"
)


@dataclass(frozen=True)
class GuiPages:
    """Pages of several kinds."""

    kinds: Sequence[str] = tuple(KINDS)  # of the pages
    words: int = len(THINGS)  # how many different words the pages have
    buttons: int = 6  # of a page of the kind button or colour
    viewport: Sequence[int] = VIEWPORT  # width and height of a page in pixels
    max_turns: int = MAX_TURNS
    varied: bool = False  # every page has a layout of its own: colours, margins, sizes; else one of a few
    examples: int = 0

    reward = "given"
    system = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind of page", str(kind), KINDS)
        if not self.kinds or self.examples != 0:
            raise InputError("gui_pages: data.options.kinds must name a kind of page, and there are no examples")
        check_range("words", self.words, LEAST_WORDS, len(THINGS))
        check_range("buttons", self.buttons, 2, len(COLOURS))
        check_range("max_turns", self.max_turns, 1, 1000)
        if len(self.viewport) != 2:
            raise InputError("gui_pages: data.options.viewport is [width, height] in pixels")
        for side in self.viewport:
            check_range("viewport", side, 64, 2000)

    def draw(self, rng: Random) -> Problem:
        kind, seed = rng.choice(list(self.kinds)), rng.randrange(2**32)
        key = f"gui_pages:{kind}:{seed}"
        held_out = in_validation(key)
        layouts = HELD_OUT if held_out else LAYOUTS
        layout = varied_layout(rng, held_out=held_out) if self.varied else rng.choice(list(layouts))
        exercise = KINDS[kind](Random(seed), Size(THINGS[: self.words], self.buttons))
        result = json.dumps(json.dumps(exercise.result, separators=(",", ":")))  # as a string of JavaScript
        columns = {
            "kind": kind,
            "layout": layout,
            "html": page_html(exercise, PLAIN + layout if self.varied else layouts[layout], kind),
            "success": f"JSON.stringify(window.result) === {result}",
            "viewport": list(self.viewport),
            "max_turns": self.max_turns,
            "solution": list(exercise.solution),
        }
        return Problem(key, exercise.instruction, None, columns)


def page_html(exercise: Exercise, style: str, title: str) -> str:
    return (
        f"<!doctype html><html><head><title>{escape(title)}</title><style>{style} {STYLE}</style></head>"
        f"<body><main><h1>{escape(title.title())}</h1>{exercise.body}<p id='note'>&nbsp;</p></main>"
        f"<script>{NOTE} {exercise.script}</script></body></html>"
    )
