"""Reads settings: `.env` files, words of the command line (Hydra's grammar), and YAML files.

A `.env` file has lines in shell syntax:

    # comment
    export WANDB_API_KEY="..."         with or without `export`
    HF_HOME=$HOME/huggingface          $NAME and ${NAME} are variables, except between single quotes

Variables that the shell has set are not replaced, and a name without a value sets nothing.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, OverrideType
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.errors import HydraException

from covey.config.settings import schema_settings, sections
from covey.errors import InputError

ENVIRONMENT_KEY = re.compile(r"env\.([A-Z][A-Z0-9_]*)")  # `env.dataset` is a setting, `env.BASE_MODEL` a variable
LONGEST = 200  # characters of a word that an error repeats
MOST_RUNS = 10_000  # of one sweep
MOST = 20_000  # values of a file; YAML anchors can expand a few lines to billions
MAX_DEPTH = 64
PROSE = ("logging.notes",)  # text whose commas and colons are not Hydra syntax
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)")
_SINGLE = re.compile(r"'([^']*)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"')
_PLAIN = re.compile(r"[^\s#'\"](?:[^\s'\"]|\s+(?!#|\s|$))*")
_COMMENT = re.compile(r"\s*(?:#.*)?")
_VARIABLE = re.compile(r"\\(.)|\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of a file, in order; empty if the file does not exist."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            if "\0" in line:
                raise InputError(f"{path}, line {number}: contains a zero byte")
            name, value = _assignment(line.strip(), f"{path}, line {number}", variables)
            if value:
                variables[name] = value
    return variables


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children, unless they are set already."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _assignment(line: str, place: str, before: Mapping[str, str]) -> tuple[str, str]:
    match = _LINE.fullmatch(line)
    if match is None:
        raise InputError(f"{place}: not a variable\n  write NAME=value, with or without export before it")
    name, rest = match.groups()
    if _COMMENT.fullmatch(rest):
        return name, ""
    for kind in (_SINGLE, _DOUBLE, _PLAIN):
        value = kind.match(rest)
        if value is not None and _COMMENT.fullmatch(rest, value.end()):
            if kind is _SINGLE:
                return name, value[1]
            if kind is _DOUBLE:
                return name, _expand_variables(value[1], before)
            return name, os.path.expanduser(_expand_variables(value[0], before))
    raise InputError(f"{place}: the value of {name} cannot be read\n  quote it: {name}='...'")


def _expand_variables(text: str, before: Mapping[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1]:  # escaped by a backslash
            return match[1]
        name = match[2] or match[3]
        return os.environ.get(name, before.get(name, ""))

    return _VARIABLE.sub(replace, text)


@dataclass(frozen=True)
class Override:
    """One setting as the user spelled it. A later layer replaces the value of an earlier one."""

    key: str
    value: Any
    where: str = ""  # "my.yaml, line 3"; empty for the command line
    layer: int = 0
    order: int = 0  # position on the command line, from 1; 0 in a file

    def __str__(self) -> str:
        return f"{self.key}={literal(self.value)}" + (f"  ({self.where})" if self.where else "")

    @property
    def prefix(self) -> str:
        return f"{self.where}: " if self.where else ""

    @property
    def label(self) -> str:
        """The name of this setting at the beginning of an error."""
        return f"{self.prefix}{self.key}"


# -- The command line --------------------------------------------------------------------------------------------------


def read_overrides(words: Sequence[str], layer: int) -> list[Override]:
    """Overrides of `key=value` words. A dict is expanded into the settings inside it."""
    overrides = []
    for order, word in enumerate(words, 1):
        override = _parse(word)
        if override.is_sweep_override():
            raise InputError(
                f"{_short(word)}  has several values\n"
                f"  to run all of them, add --multirun; a list is written {override.get_key_element()}=[a,b]"
            )
        settings = _flat(override.key_or_group, override.value())
        overrides += [Override(key, value, "", layer, order) for key, value in settings]
    return overrides


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for each run of a sweep: the product of all swept keys, the last one fastest."""
    choices = []
    for word in overrides:
        override = _parse(word)
        if not override.is_sweep_override():
            choices.append([word])
        elif not override.is_discrete_sweep() or isinstance(override.value(), Glob):
            raise InputError(
                f"{_short(word)}  does not list the values to run\n  write them out, or use range(start,stop,step)"
            )
        else:
            key = override.get_key_element()
            values = itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1)
            choices.append([f"{key}={value}" for value in values])
        if math.prod(map(len, choices)) > MOST_RUNS:
            raise InputError(f"{_short(word)}  makes more than {MOST_RUNS:,} runs of this sweep\n  take fewer values")
    return [list(run) for run in itertools.product(*choices)]


def _parse(word: str) -> HydraOverride:
    if not _is_text(word):
        raise InputError(f"{_short(repr(word))}  is not UTF-8 text")
    key, _, value = word.partition("=")
    if key in PROSE and not value.startswith(("'", '"')):
        word = f"{key}={literal(value)}"
    try:
        override = OverridesParser.create().parse_override(word)
    except RecursionError:
        raise InputError(f"{_short(word)}  is nested too deeply") from None
    except (HydraException, ValueError) as error:  # ValueError: a number with thousands of digits
        if "=" not in word:
            raise InputError(f"{_short(word)}  is not a setting\n  settings are written key=value") from None
        reason = _short(str(error).splitlines()[0])
        key, _, value = word.partition("=")
        shown = f'{_short(key)}="{_short(value)}"'
        raise InputError(
            f"{_short(word)}  cannot be read: {reason}\n  quote a value with special characters: '{shown}'"
        ) from None
    if override.type == OverrideType.DEL:
        raise InputError(f"{_short(word)}  would remove a setting\n  give it a value instead, such as null")
    if override.package is not None:
        raise InputError(f"{_short(word)}  names a package\n  write {override.key_or_group}=…")
    return override


def _is_text(text: str) -> bool:
    """False for surrogates, which Python uses for words of a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(word: str) -> str:
    return word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or _is_free(key):
        yield key, value
    else:
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)


def _is_free(key: str) -> bool:
    setting = schema_settings().get(key)
    return setting is not None and setting.free


def literal(value: Any) -> str:
    """A value in the syntax of the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            if re.fullmatch(r"[A-Za-z_./~][\w./~@-]*", value) and value.lower() not in (
                "true",
                "false",
                "null",
                "nan",
                "inf",
            ):
                return value
            # Hydra reads \' as a quote, and backslashes as themselves unless a quote follows them.
            return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + (r"\'" if m[2] else ""), value) + "'"
        case Mapping():
            return "{" + ",".join(f"{literal(str(k))}:{literal(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(literal, value)) + "]"
    return repr(value)


# -- YAML files --------------------------------------------------------------------------------------------------------


class _TooMuch(Exception):
    """The file has too many values, or nests them too deeply."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number; YAML 1.1 reads it as a string."""


class _QuickLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same in C, several times as fast. Its recursion has no limit: see `_check_depth`."""


for _loader in (_Loader, _QuickLoader):
    _loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(path: str | Path) -> list[tuple[str, Any, int]]:
    """The settings of a file as (dotted key, value, line), in any vocabulary, nested or with dotted keys.

    The section `python_args:` is a wrapper and is skipped. UPPERCASE keys under `env:` are variables; `${VAR}` is
    looked up there, then in the environment. The `defaults:` of a recipe become settings.
    """
    path = Path(path)
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{path}, line {_line(root)}: expected settings (key: value)")
        _check_nodes(path, root)
        return _File(path, loader).settings(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown place"
        raise InputError(f"{path}, {place}: not YAML ({error.problem})") from None
    except (_TooMuch, RecursionError):
        raise InputError(
            f"{path}: more than {MOST:,} values, or nested more than {MAX_DEPTH} levels deep\n"
            "  fix: an anchor (&name) used inside itself, or many times, multiplies its values"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read ({error})") from None  # a zero byte in its name


def load_yaml(path: Path) -> Any:
    """A YAML file of bounded size as plain data."""
    try:
        text = path.read_text(encoding="utf-8")
        _check_depth(text)
        loader = _QuickLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(path, root)
        return loader.construct_document(root)
    except (_TooMuch, RecursionError):
        raise InputError(f"{path}: more than {MOST:,} values, or nested more than {MAX_DEPTH} levels deep") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _check_depth(text: str) -> None:
    """Raise _TooMuch before nodes are built: very deep nesting would overflow the C stack."""
    depth = 0
    for event in yaml.parse(text, _QuickLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH + 1:
            raise _TooMuch


def _check_nodes(path: Path, root: yaml.Node) -> None:
    """Check the number and depth of values, with anchors expanded, and that keys and texts are strings."""
    waiting, count = [(root, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MOST or depth > MAX_DEPTH:
            raise _TooMuch
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise InputError(f"{path}, line {_line(key)}: a key must be a word, not a list or a mapping")
                waiting += [(key, depth + 1), (value, depth + 1)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in node.value]
        elif not _is_text(node.value):
            raise InputError(f"{path}, line {_line(node)}: half of a surrogate pair (\\ud800 to \\udfff) is not text")


class _File:
    """Turns the nodes of one YAML file into settings."""

    def __init__(self, path: Path, loader: _Loader) -> None:
        self.path = path
        self.loader = loader
        self.variables: dict[str, str] = {}

    def settings(self, root: yaml.MappingNode) -> list[tuple[str, Any, int]]:
        entries = list(self._entries(root, ""))
        lines: dict[str, int] = {}
        for key, _, line in entries:
            if key in lines:
                raise InputError(f"{self.path}, line {line}: {key} is already set in line {lines[key]}")
            lines[key] = line
        for key, node, line in entries:  # variables first: a file may use them before it defines them
            if match := ENVIRONMENT_KEY.fullmatch(key):
                self.variables[match[1]] = self._text(node, line)
        settings = []
        for key, node, line in entries:
            match = ENVIRONMENT_KEY.fullmatch(key)
            settings.append((key, self.variables[match[1]] if match else self._value(node, line), line))
        return settings

    def _entries(self, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Any, int]]:
        self.loader.flatten_mapping(node)  # `<<: *anchor`
        for key_node, value_node in node.value:
            key, line = f"{prefix}{key_node.value}", _line(key_node)
            if key == "defaults":
                yield from self._choices(value_node)
            elif key in ("env", "python_args", *sections()) and value_node.tag == "tag:yaml.org,2002:null":
                continue  # an empty section
            elif not isinstance(value_node, yaml.MappingNode) or _is_free(key):
                yield key, value_node, line
            else:
                yield from self._entries(value_node, "" if key == "python_args" else f"{key}.")

    def _choices(self, node: Any) -> Iterator[tuple[str, Any, int]]:
        """`- override algorithm: grpo` in a recipe's defaults is algorithm=grpo."""
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(item, yaml.MappingNode):
                for key_node, value_node in item.value:
                    yield key_node.value.removeprefix("override ").strip().lstrip("/"), value_node, _line(key_node)
            elif item.value not in ("_self_", "schema", "default"):
                raise InputError(
                    f"{self.path}, line {_line(item)}: a file cannot build on the recipe {item.value}\n"
                    f"  give both: --config-name {item.value} --config {self.path}"
                )

    def _value(self, node: Any, line: int) -> Any:
        if isinstance(node, yaml.MappingNode):
            return {key.value: self._value(value, _line(key)) for key, value in node.value}
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, _line(item)) for item in node.value]
        text = self._expand(node.value, line)
        if text != node.value and node.style is None:  # unquoted: the type follows from the expanded text
            tag = self.loader.resolve(yaml.ScalarNode, text, (True, False))
            return self._scalar(yaml.ScalarNode(tag, text, node.start_mark, node.end_mark), line)
        return self._scalar(node, line) if text == node.value else text

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        try:
            return self.loader.construct_object(node)
        except ValueError as error:  # 2020-99-99 looks like a date
            raise InputError(
                f"{self.path}, line {line}: {_short(node.value)} cannot be read ({error})\n  quote it if it is text"
            ) from None

    def _text(self, node: Any, line: int) -> str:
        """Environment variables are text, as written."""
        return self._expand(node.value, line) if isinstance(node, yaml.ScalarNode) else str(self._value(node, line))

    def _expand(self, text: str, line: int) -> str:
        def lookup(match: re.Match[str]) -> str:
            name = match[1]
            value = self.variables.get(name, os.environ.get(name))
            if value is None:
                raise InputError(
                    f"{self.path}, line {line}: the variable ${{{name}}} is not defined\n"
                    "  define it under env: in the file, or export it"
                )
            return value

        return _REFERENCE.sub(lookup, text)
