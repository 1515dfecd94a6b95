"""The catalogue of native settings, read from the dataclasses.

A field is a setting. Its annotation gives type and range, its default the default, and the comment on its last line the
explanation.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

from covey.config.schema import Config
from covey.ranges import Allowed, allowed, type_text

Algorithms = Mapping[str, type]  # name → the frozen dataclass whose fields are the algorithm's settings


@dataclass(frozen=True)
class Setting:
    """One native setting. For keys under `algorithm`, `algorithms` are those that have it."""

    key: str
    type: str
    default: Any
    explanation: str
    algorithms: tuple[str, ...] = ()
    allowed: Allowed | None = None  # the range of a number

    @property
    def free(self) -> bool:
        """Whether users may choose keys below this one."""
        return self.type.startswith("dict")


@cache
def schema_settings() -> dict[str, Setting]:
    """Every setting except those of the algorithms."""
    found = {setting.key: setting for setting in _settings(Config, "")}
    del found["algorithm"]
    return found


@cache
def sections() -> dict[str, bool]:
    """The sections of a configuration, and whether each has a name (`model=x` is short for `model.name=x`)."""
    heads = [key.partition(".")[0] for key in schema_settings() if "." in key]
    return {"algorithm": True} | {head: f"{head}.name" in schema_settings() for head in heads}


def algorithm_settings(name: str, algorithms: Algorithms) -> dict[str, Setting]:
    """The settings of one algorithm, by native key (`algorithm.beta`)."""
    return dict(_named_settings(name, algorithms[name]))


@cache  # used many times to find suggestions for an unknown key
def _named_settings(name: str, schema: type) -> dict[str, Setting]:
    return {s.key: replace(s, algorithms=(name,)) for s in _class_settings(schema)}


def canonical(name: str, algorithms: Algorithms) -> str:
    """An algorithm's own name for one of its other names (gae, reinforce++)."""
    return next((own for own, schema in algorithms.items() if name in getattr(schema, "also", ())), name)


def losses_of(name: str, algorithms: Algorithms) -> Algorithms:
    """The losses of an algorithm, each with the schema that the algorithm has with it."""
    return getattr(algorithms[name], "losses", {})


def default_loss(name: str, algorithms: Algorithms) -> str | None:
    setting = algorithm_settings(name, algorithms).get("algorithm.loss")
    return None if setting is None else setting.default


def with_loss(name: str, loss: str | None, algorithms: Algorithms) -> Algorithms:
    """The schemas with that of `name` replaced by its schema for `loss`."""
    others = losses_of(name, algorithms)
    if loss is None or loss not in others or loss == default_loss(name, algorithms):
        return algorithms
    return {**algorithms, name: others[loss]}


def loss_settings(name: str, algorithms: Algorithms) -> frozenset[str]:
    """The keys of an algorithm's settings that belong to its loss."""
    return frozenset(f"algorithm.{key}" for key in getattr(algorithms[name], "of_loss", ()))


def owners(key: str, algorithms: Algorithms) -> tuple[str, ...]:
    """The algorithms that have a setting, by its native key or a key below a dict setting."""
    return tuple(name for name in algorithms if find(key, algorithm_settings(name, algorithms)))


def all_keys(algorithms: Algorithms) -> dict[str, Setting]:
    """Every native setting by key. A setting of several algorithms has the first one's default."""
    found = dict(schema_settings())
    for name in algorithms:
        for key, setting in algorithm_settings(name, algorithms).items():
            found.setdefault(key, replace(setting, algorithms=owners(key, algorithms)))
    return found


def find(key: str, settings: Mapping[str, Setting]) -> Setting | None:
    """The setting of a key: its own, or the dict setting above it."""
    if key in settings:
        return settings[key]
    head = key.rpartition(".")[0]
    while head:
        if head in settings:
            return settings[head] if settings[head].free else None
        head = head.rpartition(".")[0]
    return None


@cache
def _class_settings(cls: type) -> tuple[Setting, ...]:
    return tuple(_settings(cls, "algorithm."))


def _settings(cls: type, prefix: str) -> Iterator[Setting]:
    types, comments = typing.get_type_hints(cls, include_extras=True), _comments(cls)
    for item in fields(cls):
        kind = types[item.name]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _settings(kind, f"{prefix}{item.name}.")
        else:
            explanation = comments.get(item.name, "")
            key = f"{prefix}{item.name}"
            yield Setting(key, type_text(kind), _default(item), explanation, allowed=allowed(kind))


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    assert item.default is not MISSING, f"the setting {item.name} has no default"
    return item.default


def _comments(cls: type) -> dict[str, str]:
    """Field name → the comment on the last line of its definition. A class assembled at run time lists the classes that
    define its fields in `parts`."""
    found: dict[str, str] = {}
    for base in (*reversed(cls.__mro__), *getattr(cls, "parts", ())):
        if is_dataclass(base) and isinstance(base, type):
            found |= _own_comments(base)
    return found


def _own_comments(cls: type) -> dict[str, str]:
    if cls.__module__.startswith("covey."):
        return _module_comments(cls.__module__).get(cls.__qualname__, {})
    try:
        source = textwrap.dedent(inspect.getsource(cls))  # not cached: users edit their files
    except (OSError, TypeError):  # a class made at run time or in a notebook has no source
        return {}
    return _comments_in(source).get(cls.__name__, {})


@cache
def _module_comments(name: str) -> dict[str, dict[str, str]]:
    """Comments of every class of a module, by qualified name."""
    return _comments_in(inspect.getsource(sys.modules[name]))


def _comments_in(source: str) -> dict[str, dict[str, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: t.string.lstrip("# ").strip() for t in tokens if t.type == tokenize.COMMENT}
    return {
        name: {
            statement.target.id: by_line.get(statement.end_lineno or 0, "")
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        for name, node in _classes(ast.parse(source), "")
    }


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class below a node, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        below = prefix
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", child
            below = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            below = f"{prefix}{child.name}.<locals>."
        if isinstance(child, ast.stmt):
            yield from _classes(child, below)
