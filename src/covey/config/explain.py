"""`covey config explain KEY`: what a setting is, in any vocabulary's spelling."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from covey.config.aliases import accepted, spellings, translate
from covey.config.derive import PARTS
from covey.config.not_yet import NOT_YET
from covey.config.read import Given, literal
from covey.config.settings import (
    Algorithms,
    Setting,
    algorithm_settings,
    all_keys,
    find,
    owners,
    schema_settings,
    sections,
)
from covey.config.settle import unknown_setting
from covey.errors import unknown

__all__ = ["Setting", "all_keys", "explain"]

WIDTH = 110


def explain(key: str, algorithms: Algorithms) -> str:
    """A setting, a section (`learner`), an algorithm (`algorithm=gvpo`), or everything (an empty key)."""
    if not key:
        return _everything(algorithms)
    if key == "algorithm":
        return "\n\n".join(_algorithm(name, algorithms) for name in algorithms)
    if key.startswith("algorithm=") or key in algorithms:
        return _algorithm(key.removeprefix("algorithm="), algorithms)
    if key in sections():
        return _listing(key, {k: s for k, s in schema_settings().items() if k.startswith(f"{key}.")})
    return _setting(key, algorithms)


def _everything(algorithms: Algorithms) -> str:
    top = {key: setting for key, setting in schema_settings().items() if "." not in key}
    names = [name for name in sections() if name != "algorithm"]
    return "\n\n".join(
        [*(explain(name, algorithms) for name in names), explain("algorithm", algorithms), _listing("run", top)]
    )


def _algorithm(name: str, algorithms: Algorithms) -> str:
    if name not in algorithms:
        raise unknown("algorithm", name, algorithms)
    settings = algorithm_settings(name, algorithms)
    settings.pop("algorithm.name", None)
    return _listing(f"algorithm={name}", settings)


def _listing(title: str, settings: Mapping[str, Setting]) -> str:
    heads = {key: f"  {key}={literal(setting.default)}" for key, setting in settings.items()}
    width = max((len(head) for head in heads.values()), default=0) + 2
    lines = [title]
    for key, setting in settings.items():
        wrapped = textwrap.wrap(setting.explanation, max(40, WIDTH - width)) or [""]
        lines.append(f"{heads[key]:<{width}}{wrapped[0]}".rstrip())
        lines += [" " * width + line for line in wrapped[1:]]
    return "\n".join(lines)


def _setting(key: str, algorithms: Algorithms) -> str:
    target = translate(key, algorithms)
    if target is None:
        raise unknown_setting(Given(key, None), next(iter(algorithms)), algorithms)
    native = target.key
    blocks = []
    if setting := find(native, schema_settings()):
        blocks.append(_block(setting, algorithms))
    for name in [target.algorithm] if target.algorithm else owners(native, algorithms):
        if setting := find(native, algorithm_settings(name, algorithms)):
            blocks.append(_block(setting, algorithms))
    if native in PARTS:
        targets, how = PARTS[native]
        blocks.append(f"{key}\n  goes into {' and '.join(targets)}: {how}")
    remark = accepted(native)
    if not blocks and remark is not None:
        text = remark.remark.format(algorithm="the algorithm") or "no effect"
        blocks.append(f"{key}\n  accepted; {text}")
    for row in NOT_YET:
        if row.key == native and not blocks:
            blocks.append(f"{key}\n  not available yet: {row.capability}\n  {row.instead}")
    return "\n\n".join(blocks)


def _block(setting: Setting, algorithms: Algorithms) -> str:
    head = setting.key + (f"  ({setting.algorithms[0]})" if setting.algorithms else "")
    lines = [head, *textwrap.wrap(setting.explanation, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += [f"  type     {setting.type}", f"  default  {literal(setting.default)}"]
    mine = [s for s in spellings(setting.key, algorithms) if not _of_another(s, setting, algorithms)]
    if mine:
        lines.append(textwrap.fill(", ".join(mine), WIDTH, initial_indent="  aliases  ", subsequent_indent=" " * 11))
    return "\n".join(lines)


def _of_another(spelling: str, setting: Setting, algorithms: Algorithms) -> bool:
    target = translate(spelling, algorithms)
    return bool(target and target.algorithm and target.algorithm not in setting.algorithms)
