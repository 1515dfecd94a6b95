"""covey config, covey algorithms"""

from __future__ import annotations

from covey.cli.build import algorithm_schemas
from covey.cli.words import compose_words, parse
from covey.config import explain
from covey.errors import InputError

CONFIG_USAGE = """\
covey config [--config-name RECIPE | --config FILE] [key=value ...]     print the resolved settings as YAML
covey config explain KEY ...                                            what a setting means, its default, its aliases
covey config explain SECTION | algorithm=NAME | (nothing)               all settings of a section, an algorithm, a run
"""


def main_config(argv: list[str]) -> int:
    import yaml

    words = parse(argv, values=("--config-name", "--config"))
    if words.help:
        print(CONFIG_USAGE)
        return 0
    if words.places[:1] == ["explain"]:
        for key in (words.places[1:] + words.settings) or [""]:
            print(explain(key, algorithm_schemas()))
        return 0
    if words.places:
        raise InputError(f"what is {words.places[0]!r}?\n{CONFIG_USAGE.rstrip()}")
    composed = compose_words(words)
    print(yaml.safe_dump(composed.tree, sort_keys=False, allow_unicode=True), end="")
    for text in composed.warnings:
        print(f"# warning: {text}")
    return 0


def main_algorithms(argv: list[str]) -> int:
    from covey.algorithms import ALGORITHMS, settings

    words = parse(argv)
    if words.help:
        print("covey algorithms        the algorithms and their settings")
        return 0
    for name, parts in ALGORITHMS.items():
        print(f"{name:10}{parts.summary}")
        defaults = "  ".join(f"{key}={default}" for key, (_, default) in settings(name).items())
        print(f"{'':10}{defaults}")
    print("\nchoose with algorithm=NAME; explain with: covey config explain algorithm=NAME")
    return 0
