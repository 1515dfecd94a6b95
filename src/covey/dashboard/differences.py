"""Differences between runs: settings with different values, and short names made of them (`grpo lr=1e-5 seed=2`)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from covey.config.settings import schema_settings

Settings = Mapping[str, Any]  # by dotted name

MAX_NAME_PARTS = 4  # settings in a name
MAX_VALUE = 24  # characters of a value in a name
TOLERANCE = 1e-9  # relative difference of numbers that count as equal

# Settings that do not change what is trained: logging, checkpoints, ports, limits.
NOT_COMPARED = re.compile(
    r"logging\..*|resume|gateway\..*|loop\.(max_minutes|save_every|save_final|keep_last|keep_best|threads)"
    r"|cluster\.(address|max_restarts|transport)"
)
# Compared, but not part of a name: evaluation, and how a run is placed on its machine.
NOT_NAMED = re.compile(
    r"eval\..*|data\.val_.*|cluster\..*|sandbox\..*|model\.device|learner\.(offload_.*|parallel|tensor_parallel|compile)"
    r"|rollout\.(memory|max_sequences|eager|devices|tensor_parallel|sleep)"
)
# In names these come first; then the others in the order of the configuration, the seed last.
FIRST = (
    *("algorithm.name", "model.name", "data.name", "data.train_files", "reward.name", "mode.name"),
    *("learner.lr", "rollout.group_size"),
)
LAST = ("seed",)
WITHOUT_LABEL = ("algorithm.name", "model.name", "data.name")  # only the value is shown


class _Missing:
    """A setting that a run does not have."""


MISSING = _Missing()


def differing_settings(configs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Settings with different values, with the value of each run; `MISSING` if a run has no such setting."""
    algorithms = [config.get("algorithm.name") for config in configs]
    differing = {}
    for key, values in _columns(configs):
        # Settings that belong to one algorithm are only compared between its runs.
        own = key.startswith("algorithm.") and (key == "algorithm.loss" or MISSING in values)
        if _differ(values, algorithms if own else None):
            differing[key] = values
    return differing


def run_names(configs: Sequence[Settings], algorithms: Sequence[str], experiments: Sequence[str]) -> list[str]:
    """A name for each run from the settings that differ. Equal names are numbered."""
    full = [{"algorithm.name": algorithm} | dict(config) for config, algorithm in zip(configs, algorithms, strict=True)]
    columns = _name_columns(full)
    labels = {key: _label(key, columns) for key in columns}
    experiments = experiments if len(set(experiments)) > 1 else [""] * len(full)
    seen: Counter[str] = Counter()
    names = []
    for index, config in enumerate(full):
        parts = [] if experiments[index] in ("", "run") else [experiments[index]]
        parts.append(str(config["algorithm.name"]))
        for key, values in columns.items():
            if key != "algorithm.name" and values[index] is not MISSING:
                parts.append(labels[key] + format_setting(values[index]))
        name = " ".join(parts)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def format_setting(value: Any) -> str:
    """A short form of a setting's value."""
    match value:
        case bool() | None:
            text = {True: "true", False: "false", None: "none"}[value]
        case float():
            text = f"{value:.6g}" if value == 0 or abs(value) >= 1e-3 else f"{Decimal(f'{value:.6g}').normalize():e}"
            text = re.sub(r"e([-+])0*", lambda m: "e-" if m[1] == "-" else "e", text)
        case list() | tuple():
            text = "+".join(map(format_setting, value)) or "none"
        case _:
            text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"


def _name_columns(configs: Sequence[Settings]) -> dict[str, list[Any]]:
    """The settings for names: all that differ if they are few, otherwise those that distinguish most runs."""
    algorithms = [config["algorithm.name"] for config in configs]
    differing: dict[str, list[Any]] = {}
    for key, values in sorted(_columns(configs), key=lambda column: _rank(column[0])):
        # An algorithm's settings are compared between its runs: other algorithms have other defaults.
        own = key.startswith("algorithm.") and key != "algorithm.name"
        if not NOT_NAMED.fullmatch(key) and _differ(values, algorithms if own else None):
            differing[key] = values
    if len(differing) <= MAX_NAME_PARTS:
        return differing
    kept: dict[str, list[Any]] = {}
    distinct = 1
    for key, values in differing.items():
        rows = zip(*kept.values(), values, strict=True)
        if len(kept) < MAX_NAME_PARTS and (now := len({repr(row) for row in rows})) > distinct:
            kept[key], distinct = values, now
    return kept


def _columns(configs: Sequence[Settings]) -> Iterator[tuple[str, list[Any]]]:
    """Each compared setting with the values of all runs."""
    for key in dict.fromkeys(key for config in configs for key in config):
        if not NOT_COMPARED.fullmatch(key):
            yield key, _shorten([_value(config, key) for config in configs])


def _differ(values: Sequence[Any], kinds: Sequence[Any] | None) -> bool:
    """Whether values differ; with `kinds`, whether they differ between runs of one kind."""
    first: dict[Any, Any] = {}
    pairs = zip(kinds if kinds is not None else [None] * len(values), values, strict=True)
    return any(not _same(first.setdefault(kind, value), value) for kind, value in pairs)


def _rank(key: str) -> int:
    return FIRST.index(key) if key in FIRST else len(FIRST) + (key in LAST)


def _label(key: str, columns: Mapping[str, Any]) -> str:
    """`lr=` for learner.lr, or `learner.lr=` if another setting also ends in lr; `reward=` for reward.name."""
    if key in WITHOUT_LABEL:
        return ""
    short = key.removesuffix(".name").rsplit(".", 1)[-1]
    alike = [other for other in columns if other.removesuffix(".name").rsplit(".", 1)[-1] == short]
    return f"{short if len(alike) == 1 else key}="


def _value(config: Settings, key: str) -> Any:
    """The value, or the default for a run of an older version without this setting."""
    if key in config:
        return MISSING if config[key] == {} else config[key]
    setting = schema_settings().get(key)
    return MISSING if setting is None or setting.default == {} else setting.default


def _same(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return math.isclose(one, other, rel_tol=TOLERANCE) if numbers else bool(one == other)


def _shorten(values: list[Any]) -> list[Any]:
    """Paths reduced to the parts that distinguish them: the location of a file is not a difference."""
    paths = {text for value in values for text in (value if isinstance(value, list) else [value]) if _is_path(text)}
    if not paths:
        return values
    short = _tails(paths)

    def shorten(value: Any) -> Any:
        if isinstance(value, list):
            return [shorten(item) for item in value]
        return short[value] if isinstance(value, str) and value in short else value

    return [shorten(value) for value in values]


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "/" in value.strip("/") and not any(letter.isspace() for letter in value)


def _tails(paths: set[str]) -> dict[str, str]:
    """The shortest distinct ends of paths. A path that is the end of another counts as the same place."""
    parts = {path: [part for part in path.split("/") if part not in ("", ".", "~")] for path in paths}
    longest = {
        path: max((other for other in parts.values() if other[-len(own) :] == own), key=len)
        for path, own in parts.items()
    }
    whole = {"/".join(split): split for split in longest.values()}
    for count in range(1, max(map(len, whole.values())) + 1):
        # The folder of a checkpoint's weights is always called model: keep its parent too.
        ends = {name: "/".join(split[-max(count, 2 if split[-1] == "model" else 1) :]) for name, split in whole.items()}
        if len(set(ends.values())) == len(ends):
            break
    return {path: ends["/".join(longest[path])] for path in paths}
