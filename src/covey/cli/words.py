"""Taking a command line apart: our flags, and settings for Hydra, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from covey.cli.origin import Origin, find_origin
from covey.cli.prepare import algorithm_schemas, own_algorithm
from covey.config import Composed, compose
from covey.config.dotenv import export
from covey.errors import InputError, nearest


@dataclass
class Words:
    settings: list[str] = field(default_factory=list)  # key=value
    places: list[str] = field(default_factory=list)  # everything else that is no flag
    flags: dict[str, str | bool] = field(default_factory=dict)

    def text(self, flag: str) -> str | None:
        value = self.flags.get(flag)
        return value if isinstance(value, str) else None

    def on(self, flag: str) -> bool:
        return bool(self.flags.get(flag))

    @property
    def help(self) -> bool:
        return self.on("--help") or self.on("-h")


HELP = ("--help", "-h")


def parse(argv: Sequence[str], *, switches: Sequence[str] = (), values: Sequence[str] = ()) -> Words:
    """`switches` stand alone, `values` take the next word (or --flag=word). Settings may stand anywhere between. Every
    command has --help."""
    words = Words()
    switches = (*switches, *HELP)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            (words.settings if "=" in word else words.places).append(word)
            continue
        name, has_value, value = word.partition("=")
        if name in switches and not has_value:
            words.flags[name] = True
        elif name in values:
            if not has_value and (not rest or rest[0].startswith("-")):
                raise InputError(f"{name} wants a value after it")
            words.flags[name] = value if has_value else rest.pop(0)
        else:
            guess = nearest(name, [*switches, *values])
            hint = f"\n  did you mean   {guess}?" if guess else ""
            raise InputError(f"unknown flag  {name}{hint}\n  flags: {' '.join([*switches, *values])}")
    return words


def compose_words(
    words: Words,
    *,
    settings: Sequence[str] | None = None,
    config_path: Path | None = None,
    training: bool = False,
) -> Composed:
    """The configuration that a command line describes; environment variables of its file are set. `settings` and
    `config_path` stand in for the command line's own. A check that starts nothing goes on without what is missing. A
    command that trains (`training`) may start from the recipe that its words belong to (origin.py)."""
    path = config_path or words.text("--config")
    name = words.text("--config-name")
    if path and name:
        raise InputError("--config and --config-name contradict each other: give a file or a recipe")
    path = Path(path).expanduser() if path is not None else None
    settings = words.settings if settings is None else settings
    origin = find_origin(settings, path) if training and name is None else Origin()
    composed = compose(
        [*_from_environment(), *origin.settings, *settings],
        algorithms=algorithm_schemas(),
        own_algorithm=own_algorithm,
        config_name=name or origin.recipe,
        config_path=path,
        tolerant=(words.on("--validate-only") or words.on("--dry-run")) and not words.on("--strict"),
    )
    export(composed.env)
    return replace(composed, warnings=(origin.remark, *composed.warnings)) if origin.remark else composed


def _from_environment() -> list[str]:
    """VERBOSITY=DEBUG in the environment is logging.verbosity; a setting on the command line comes later and wins."""
    verbosity = os.environ.get("VERBOSITY", "").lower()
    return [f"logging.verbosity={verbosity}"] if verbosity in ("debug", "info", "warning") else []
