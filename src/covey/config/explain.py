"""`covey config explain KEY`: describes a setting in any vocabulary's spelling, and writes docs/settings.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from covey.config.aliases import no_effect, spellings, translate
from covey.config.derive import PARTS, UNSUPPORTED
from covey.config.read import Override, literal
from covey.config.resolve import check_loss
from covey.config.schema import EPISODES_PER_STEP
from covey.config.settings import (
    Algorithms,
    Setting,
    algorithm_settings,
    all_keys,
    canonical,
    default_loss,
    find,
    owners,
    schema_settings,
    sections,
    with_loss,
)
from covey.config.unknown import unknown_setting
from covey.errors import unknown

__all__ = ["Setting", "all_keys", "explain", "settings_page"]

WIDTH = 110
SHOWN = 3  # algorithms listed for a setting that many share
PAGE = f"""\
# All settings

Written by `covey config explain --markdown` from the annotations beside the settings, which every command and
`covey.train` check. NaN and infinity are never allowed. Other names of a setting (of verl, AgentFly, TorchRL, TRL)
have the same range: `covey config explain KEY` lists them. `data.train_batch_size` × `rollout.group_size` may be at
most {EPISODES_PER_STEP:,} episodes a step. Of an algorithm's settings, the numbers are here; `covey algorithms NAME`
lists all of them with their defaults."""


def explain(key: str, algorithms: Algorithms, loss: str | None = None) -> str:
    """Describe a setting, a section (`learner`), an algorithm (`algorithm=gvpo`, with its default loss or `loss`), or
    all settings (an empty key)."""
    if not key:
        names = [name for name in sections() if name != "algorithm"]
        top = {key: setting for key, setting in schema_settings().items() if "." not in key}
        parts = (explain(name, algorithms) for name in [*names, "algorithm"])
        return "\n\n".join([*parts, _listing("run", top)])
    if key == "algorithm":
        return "\n\n".join(_algorithm(name, algorithms) for name in algorithms)
    if key.startswith("algorithm=") or canonical(key, algorithms) in algorithms:
        return _algorithm(canonical(key.removeprefix("algorithm="), algorithms), algorithms, loss)
    if key in sections():
        return _listing(key, {k: s for k, s in schema_settings().items() if k.startswith(f"{key}.")})
    return _setting(key, algorithms)


def settings_page(algorithms: Algorithms) -> str:
    """Every setting with its range, in Markdown: docs/settings.md."""
    lines = [PAGE]
    settings = schema_settings()
    for name in sections():
        if name != "algorithm":
            lines += _table(name, [s for k, s in settings.items() if k.startswith(f"{name}.")])
    own = [s for name in algorithms for s in algorithm_settings(name, algorithms).values()]
    lines += _table("algorithm", [s for s in _merged(replace(s, default=None) for s in own) if s.allowed])
    lines += _table("the run", [setting for key, setting in settings.items() if "." not in key])
    return "\n".join(lines)


def _table(title: str, settings: Sequence[Setting]) -> list[str]:
    """Algorithms that share a setting may have different defaults, so their names are shown instead."""
    second = "of" if settings[0].algorithms else "default"
    lines = ["", f"## {title}", "", f"| setting | {second} | allowed | |", "|---|---|---|---|"]
    for setting in settings:
        default = _owners(setting) if setting.algorithms else f"`{literal(setting.default)}`"
        cells = (f"`{setting.key}`", default, str(setting.allowed or setting.type), setting.explanation)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _owners(setting: Setting) -> str:
    names = setting.algorithms
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _algorithm(name: str, algorithms: Algorithms, loss: str | None = None) -> str:
    if name not in algorithms:
        raise unknown("algorithm", name, algorithms)
    check_loss(name, Override("algorithm.loss", loss), loss or default_loss(name, algorithms), algorithms)
    settings = algorithm_settings(name, with_loss(name, loss, algorithms))
    settings.pop("algorithm.name", None)
    return _listing(f"algorithm={name}" + (f" algorithm.loss={loss}" if loss else ""), settings)


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
        raise unknown_setting(Override(key, None), next(iter(algorithms)), algorithms)
    native = target.key
    blocks = []
    if setting := find(native, schema_settings()):
        blocks.append(_block(setting, algorithms))
    having = [target.algorithm] if target.algorithm else owners(native, algorithms)
    found = [setting for name in having if (setting := find(native, algorithm_settings(name, algorithms)))]
    blocks += [_block(setting, algorithms) for setting in _merged(found)]
    if native in PARTS:
        targets, how = PARTS[native]
        blocks.append(f"{key}\n  goes into {' and '.join(targets)}: {how}")
    remark = no_effect(native)
    if not blocks and remark is not None:
        text = remark.remark.format(algorithm="the algorithm") or "no effect"
        blocks.append(f"{key}\n  accepted; {text}")
    for row in UNSUPPORTED:
        if row.key == native and not blocks:
            blocks.append(f"{key}\n  not supported yet: {row.feature}\n  {row.instead}")
    return "\n\n".join(blocks)


def _merged(settings: Iterable[Setting]) -> Iterable[Setting]:
    """Settings that differ only in their algorithm, merged into one setting of all these algorithms."""
    merged: dict[str, Setting] = {}
    for setting in settings:
        same = str(replace(setting, algorithms=()))
        before = merged[same].algorithms if same in merged else ()
        merged[same] = replace(setting, algorithms=(*before, *setting.algorithms))
    return merged.values()


def _block(setting: Setting, algorithms: Algorithms) -> str:
    head = setting.key + (f"  ({_owners(setting)})" if setting.algorithms else "")
    lines = [head, *textwrap.wrap(setting.explanation, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += [f"  type     {setting.type}", f"  default  {literal(setting.default)}"]
    if setting.allowed is not None:
        lines.append(f"  allowed  {setting.allowed}")
    if written := _spellings(setting, algorithms):
        lines.append(textwrap.fill(", ".join(written), WIDTH, initial_indent="  aliases  ", subsequent_indent=" " * 11))
    return "\n".join(lines)


def _spellings(setting: Setting, algorithms: Algorithms) -> list[str]:
    """All other spellings of a setting; algorithm.NAME_… stands for those of several algorithms."""
    found = []
    for spelling in spellings(setting.key, algorithms):
        target = translate(spelling, algorithms)
        if target is None or target.algorithm is None or setting.algorithms == (target.algorithm,):
            found.append(spelling)
        elif target.algorithm in setting.algorithms:
            found.append(f"algorithm.NAME_{setting.key.removeprefix('algorithm.')}")
    return list(dict.fromkeys(found))
