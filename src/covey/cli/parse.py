"""Parses a command line into flags, positional arguments and settings for Hydra."""

from __future__ import annotations

from collections.abc import Sequence

from covey.app.compose import CommandLine
from covey.cli.main import HELP
from covey.errors import InputError, nearest


def parse(argv: Sequence[str], *, switches: Sequence[str] = (), values: Sequence[str] = ()) -> CommandLine:
    """`switches` stand alone, `values` take the next word (or --flag=word). `main` answers --help."""
    args = CommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            (args.settings if "=" in word else args.positional).append(word)
            continue
        name, has_value, value = word.partition("=")
        if name in switches and not has_value:
            args.flags[name] = True
        elif name in values:
            if not has_value and (not rest or rest[0].startswith("-")):
                raise InputError(f"{name} wants a value after it")
            args.flags[name] = value if has_value else rest.pop(0)
        else:
            flags = [*switches, *HELP, *values]
            guess = nearest(name, flags)
            hint = f"\n  did you mean   {guess}?" if guess else ""
            raise InputError(f"unknown flag  {name}{hint}\n  flags: {' '.join(flags)}")
    return args
