"""Taking a command line apart: our flags, and settings for Hydra, in any order."""

from __future__ import annotations

from collections.abc import Sequence

from covey.app.compose import Words
from covey.errors import InputError, nearest

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
