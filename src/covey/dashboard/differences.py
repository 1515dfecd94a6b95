"""What differs between runs: the settings worth reading, and short names made of them (`grpo lr=1e-5 seed=2`)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from covey.config.settings import schema_settings

Settings = Mapping[str, Any]  # by their dotted names

MOST_PARTS = 4  # settings in a name
LONGEST_VALUE = 24  # characters of a value in a name
SAME = 1e-9  # relative difference below which two numbers are one

# They do not change what is trained: names, places, what is written, and what the machine is used for.
NOT_COMPARED = re.compile(
    r"logging\..*|resume|gateway\..*|loop\.(max_minutes|save_every|save_final|keep_last|keep_best|threads)"
    r"|cluster\.(address|max_restarts|transport)"
)
# Worth comparing, but no part of a name: how runs are evaluated, and what fits on which machine.
NOT_NAMED = re.compile(
    r"eval\..*|data\.val_.*|cluster\..*|sandbox\..*|model\.device|learner\.(offload_.*|parallel|tensor_parallel|compile)"
    r"|rollout\.(memory|max_sequences|eager|devices|tensor_parallel|sleep)"
)
# In names these come first, in this order; then the others as the configuration has them, the seed last.
FIRST = (
    *("algorithm.name", "model.name", "data.name", "data.train_files", "reward.name", "mode.name"),
    *("learner.lr", "rollout.group_size"),
)
LAST = ("seed",)
PLAIN = ("algorithm.name", "model.name", "data.name")  # the value says enough without the name of the setting


class _Missing:
    """A setting that a run does not have."""


MISSING = _Missing()


def differing_settings(configs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Settings whose values differ, with the value of each run; `MISSING` where a run has no such setting."""
    algorithms = [config.get("algorithm.name") for config in configs]
    found = {}
    for key, values in _columns(configs):
        # What an algorithm alone has, or brings along, is said by the algorithm's name.
        own = key.startswith("algorithm.") and (key == "algorithm.loss" or MISSING in values)
        if _differ(values, algorithms if own else None):
            found[key] = values
    return found


def run_names(configs: Sequence[Settings], algorithms: Sequence[str], experiments: Sequence[str]) -> list[str]:
    """For each run what sets it apart from the others; a number behind it where nothing does."""
    full = [{"algorithm.name": algorithm} | dict(config) for config, algorithm in zip(configs, algorithms, strict=True)]
    columns = _name_columns(full)
    labels = {key: _label(key, columns) for key in columns}
    named = experiments if len(set(experiments)) > 1 else [""] * len(full)
    found = []
    for place, config in enumerate(full):
        parts = [] if named[place] in ("", "run") else [named[place]]
        parts.append(str(config["algorithm.name"]))
        for key, values in columns.items():
            if key != "algorithm.name" and values[place] is not MISSING:
                parts.append(labels[key] + show_value(values[place]))
        found.append(" ".join(parts))
    return _numbered(found)


def show_value(value: Any) -> str:
    """In few characters."""
    match value:
        case bool() | None:
            text = {True: "true", False: "false", None: "none"}[value]
        case float():
            text = f"{value:.6g}" if value == 0 or abs(value) >= 1e-3 else f"{Decimal(f'{value:.6g}').normalize():e}"
            text = re.sub(r"e([-+])0*", lambda m: "e-" if m[1] == "-" else "e", text)
        case list() | tuple():
            text = "+".join(map(show_value, value)) or "none"
        case _:
            text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def _name_columns(configs: Sequence[Settings]) -> dict[str, list[Any]]:
    """The settings that go into names: all that differ if they are few, otherwise those that tell most runs apart."""
    algorithms = [config["algorithm.name"] for config in configs]
    found: dict[str, list[Any]] = {}
    for key, values in sorted(_columns(configs), key=lambda column: _rank(column[0])):
        # Settings of algorithms are compared between runs of one algorithm: others have other defaults.
        own = key.startswith("algorithm.") and key != "algorithm.name"
        if not NOT_NAMED.fullmatch(key) and _differ(values, algorithms if own else None):
            found[key] = values
    if len(found) <= MOST_PARTS:
        return found
    kept: dict[str, list[Any]] = {}
    apart = 1
    for key, values in found.items():
        rows = zip(*kept.values(), values, strict=True)
        if len(kept) < MOST_PARTS and (now := len({repr(row) for row in rows})) > apart:
            kept[key], apart = values, now
    return kept


def _columns(configs: Sequence[Settings]) -> Iterator[tuple[str, list[Any]]]:
    """Each setting that is compared, with the values of all runs."""
    for key in dict.fromkeys(key for config in configs for key in config):
        if not NOT_COMPARED.fullmatch(key):
            yield key, _shorten([_value(config, key) for config in configs])


def _differ(values: Sequence[Any], kinds: Sequence[Any] | None) -> bool:
    """Whether values differ; with `kinds`, between runs of the same kind."""
    first: dict[Any, Any] = {}
    pairs = zip(kinds if kinds is not None else [None] * len(values), values, strict=True)
    return any(not _same(first.setdefault(kind, value), value) for kind, value in pairs)


def _rank(key: str) -> int:
    return FIRST.index(key) if key in FIRST else len(FIRST) + (key in LAST)


def _label(key: str, columns: Mapping[str, Any]) -> str:
    """`lr=` of learner.lr; `learner.lr=` where another setting has the same last word; `reward=` of reward.name."""
    if key in PLAIN:
        return ""
    short = key.removesuffix(".name").rsplit(".", 1)[-1]
    alike = [other for other in columns if other.removesuffix(".name").rsplit(".", 1)[-1] == short]
    return f"{short if len(alike) == 1 else key}="


def _value(config: Settings, key: str) -> Any:
    """The default where a run does not say: it may be of a version that did not have the setting."""
    if key in config:
        return MISSING if config[key] == {} else config[key]
    setting = schema_settings().get(key)
    return MISSING if setting is None or setting.default == {} else setting.default


def _same(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return math.isclose(one, other, rel_tol=SAME) if numbers else bool(one == other)


def _shorten(values: list[Any]) -> list[Any]:
    """Paths without what comes before the part that tells them apart: where a file lies is no difference."""
    paths = {text for value in values for text in (value if isinstance(value, list) else [value]) if _is_path(text)}
    if not paths:
        return values
    short = _tails(paths)

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(item) for item in value]
        return short[value] if isinstance(value, str) and value in short else value

    return [shown(value) for value in values]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "/" in value.strip("/") and not any(letter.isspace() for letter in value)


def _tails(paths: set[str]) -> dict[str, str]:
    """The shortest ends of paths that are still different. One that is the end of another is the same place."""
    parts = {path: [part for part in path.split("/") if part not in ("", ".", "~")] for path in paths}
    longest = {
        path: max((other for other in parts.values() if other[-len(own) :] == own), key=len)
        for path, own in parts.items()
    }
    whole = {"/".join(found): found for found in longest.values()}
    for count in range(1, max(map(len, whole.values())) + 1):
        # A checkpoint's folder is called model: the one around it says which.
        ends = {name: "/".join(found[-max(count, 2 if found[-1] == "model" else 1) :]) for name, found in whole.items()}
        if len(set(ends.values())) == len(ends):
            break
    return {path: ends["/".join(longest[path])] for path in paths}


def _numbered(names: list[str]) -> list[str]:
    """The second of a name is #2."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found
