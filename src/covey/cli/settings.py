"""covey config and covey algorithms: settings and algorithms."""

from __future__ import annotations

import inspect
import sys

from covey.algorithms import ALGORITHMS, LOSSES, algorithm_schemas, find_entry, find_losses, schema
from covey.algorithms.assemble import is_custom
from covey.algorithms.catalogue import ALIASES
from covey.app.compose import compose_command
from covey.cli.parse import parse
from covey.config.explain import explain, settings_page
from covey.errors import InputError
from covey.redact import hide_settings

CONFIG_USAGE = """\
covey config [--config-name RECIPE | --config FILE] [key=value ...]     print the resolved settings as YAML
covey config explain KEY ...                                            what a setting means, its range, its aliases
covey config explain SECTION | algorithm=NAME | (nothing)               all settings of a section, an algorithm, a run
covey config explain algorithm=NAME algorithm.loss=LOSS                 all settings of an algorithm with another loss
covey config explain --markdown                                         docs/settings.md: all settings and their ranges
"""


def main_config(argv: list[str]) -> int:
    import yaml

    args = parse(argv, switches=("--markdown",), values=("--config-name", "--config"))
    if args.positional == ["explain"] and args.has("--markdown"):
        print(settings_page(algorithm_schemas()))
        return 0
    if args.positional[:1] == ["explain"]:
        print("\n\n".join(_explain_all([*args.positional[1:], *args.settings])))
        return 0
    if args.positional:
        raise InputError(f"unexpected argument {args.positional[0]!r}\n{CONFIG_USAGE.rstrip()}")
    composed = compose_command(args, training=True)
    print(yaml.safe_dump(hide_settings(composed.tree), sort_keys=False, allow_unicode=True), end="")
    for text in composed.warnings:
        print(f"# warning: {text}")
    return 0


def _explain_all(words: list[str]) -> list[str]:
    losses = [word for word in words if word.startswith("algorithm.loss=")]
    loss = losses[-1].partition("=")[2] if losses else None
    keys = [word for word in words if word not in losses] or (["algorithm.loss"] if losses else [""])
    own = [name for key in keys if (name := key.removeprefix("algorithm=")) != key and ":" in name]
    algorithms = algorithm_schemas() | {name: schema(name) for name in own}
    return [explain(key, algorithms, loss) for key in keys]


ALGORITHMS_USAGE = """\
covey algorithms            the algorithms: idea and paper
covey algorithms NAME ...   one of them: its equation, its settings with defaults
"""


def main_algorithms(argv: list[str]) -> int:
    args = parse(argv)
    if args.positional:
        print("\n\n".join(map(_one_algorithm, args.positional)))
        return 0
    width = max(map(len, ALGORITHMS)) + 2
    for name, entry in ALGORITHMS.items():
        print(f"{name:{width}}{entry.summary}")
        also = f", also called {', '.join(entry.also)}" if entry.also else ""
        paper = f"arxiv.org/abs/{entry.paper}, " if entry.paper else ""
        print(f"{'':{width}}{paper}loss {entry.loss}{also}")
    print(f"\nlosses to combine with: {', '.join(name for name, loss in LOSSES.items() if loss.exchangeable)}")
    print("choose with algorithm=NAME algorithm.loss=NAME; equation and settings: covey algorithms NAME")
    return 0


def _one_algorithm(name: str) -> str:
    """The documentation of its estimator and loss, and its settings."""
    name = ALIASES.get(name, name)
    entry = find_entry(name)
    schemas = algorithm_schemas() | ({name: schema(name)} if is_custom(name) else {})
    modules = dict.fromkeys(part.__module__ for part in (entry.estimator, find_losses(name)[entry.loss].objective))
    pages = [inspect.cleandoc(sys.modules[module].__doc__ or "") for module in modules]
    return "\n\n".join([f"{name}: {entry.summary}", *filter(None, pages), explain(f"algorithm={name}", schemas)])
