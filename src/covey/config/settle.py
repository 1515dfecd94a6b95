"""From what the user wrote, in layers and any vocabulary, to one value for each native setting.

layer by layer   every spelling finds its slot; two spellings of one slot that disagree are refused
across layers    the later layer wins
at the end       what is not available is refused, what has no effect is said
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.config.aliases import ACCEPTED, ALIASES, HARMLESS, Target, accepted, spellings, translate
from covey.config.derive import PARTS, Derived
from covey.config.not_yet import NOT_YET_KEYS, number, refuse_not_yet
from covey.config.read import ENVIRONMENT_KEY, Given, literal
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
from covey.errors import InputError, nearest, unknown


@dataclass
class Settled:
    """One value per slot. A slot is a native key, or the key that stands for a foreign one."""

    algorithm: str
    algorithms: Algorithms  # with the chosen loss's settings where the chosen algorithm's usual ones were
    slots: dict[str, Given] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def native(self, settings: Mapping[str, Setting]) -> dict[str, Given]:
        return {key: given for key, given in self.slots.items() if find(key, settings)}

    def parts(self) -> dict[str, Given]:
        return {key: given for key, given in self.slots.items() if key in PARTS}


def settle(layers: Sequence[Sequence[Given]], algorithms: Algorithms, recipe: Mapping[str, Any]) -> Settled:
    """`recipe` is the recipe's own algorithm section."""
    chosen = _chosen_algorithms(layers, algorithms, recipe["name"])
    name = chosen[-1] if chosen else recipe["name"]
    algorithms = _with_chosen_loss(layers, chosen, name, algorithms, recipe)
    settled = Settled(name, algorithms)
    for layer, written_for in zip(layers, chosen, strict=True):
        slots: dict[str, Given] = {}
        for given in layer:
            if match := ENVIRONMENT_KEY.fullmatch(given.key):
                settled.env[match[1]] = str(given.value)
                if given.key not in ALIASES:
                    continue
            target = _place(given, written_for, settled, algorithms)
            if target is not None:
                _fill(slots, target, replace(given, value=_meant(target, given, algorithms)))
        for key, given in slots.items():
            settled.slots.pop(key, None)  # a later layer's value also comes later
            settled.slots[key] = given
    refuse_not_yet(settled.slots)
    settled.warnings += _remarks(settled)
    return settled


def _meant(target: Target, given: Given, algorithms: Algorithms) -> Any:
    if target.key == "algorithm.name":
        return _canonical(str(given.value), algorithms)
    return target.convert(given.key, given.value)


def _canonical(name: str, algorithms: Algorithms) -> str:
    """An algorithm's own name, also where people know it by another (gae, reinforce++)."""
    return next((own for own, schema in algorithms.items() if name in getattr(schema, "also", ())), name)


def _chosen_algorithms(layers: Sequence[Sequence[Given]], algorithms: Algorithms, current: str) -> list[str]:
    """The algorithm that each layer was written for."""
    chosen = []
    for layer in layers:
        for given in layer:
            target = translate(given.key, algorithms)
            if target is not None and target.key == "algorithm.name":
                current = _canonical(str(given.value), algorithms)
                if current not in algorithms:
                    raise unknown("algorithm", current, algorithms)
        chosen.append(current)
    return chosen


def _with_chosen_loss(
    layers: Sequence[Sequence[Given]],
    chosen: Sequence[str],
    name: str,
    algorithms: Algorithms,
    recipe: Mapping[str, Any],
) -> Algorithms:
    """With another loss an algorithm has other settings. The schema that has them takes the place of the usual one."""
    losses: Mapping[str, type] = getattr(algorithms[name], "losses", {})
    wanted, place = (recipe.get("loss") if recipe["name"] == name else None), ""
    for layer, written_for in zip(layers, chosen, strict=True):
        for given in layer:
            target = translate(given.key, algorithms)
            if target is not None and target.key == "algorithm.loss" and written_for == name:
                wanted, place = target.convert(given.key, given.value), f"{given.place}{given.key}"
    usual = algorithm_settings(name, algorithms).get("algorithm.loss")
    if wanted is None or (usual is not None and wanted == usual.default):
        return algorithms
    if wanted not in losses:
        why = getattr(algorithms[name], "reasons", {}).get("loss")
        if why and any(wanted in getattr(other, "losses", ()) for other in algorithms.values()):
            raise InputError(f"{place}={wanted} does not go with algorithm={name}\n  {why}")
        raise unknown(f"loss for {name}", str(wanted), losses)
    return {**algorithms, name: losses[wanted]}


def _place(given: Given, written_for: str, settled: Settled, algorithms: Algorithms) -> Target | None:
    """The slot that a setting fills, or None if it has none beside the chosen algorithm."""
    target = translate(given.key, algorithms)
    if target is None:
        raise unknown_setting(given, settled.algorithm, algorithms)
    if target.algorithm is not None and target.algorithm != settled.algorithm:
        settled.warnings.append(f"{given.place}{given.key} has no effect with algorithm={settled.algorithm}")
        return None
    if target.key == "algorithm.name" or not target.key.startswith("algorithm."):
        return target
    return _place_of_algorithm(given, target, written_for, settled, algorithms)


def _place_of_algorithm(
    given: Given, target: Target, written_for: str, settled: Settled, algorithms: Algorithms
) -> Target | None:
    """One name may mean different things to two algorithms, so a native setting stays with the algorithm that its layer
    was written for. Foreign names that no algorithm owns (`clip_ratio`) go with any that has the setting."""
    chosen, having = settled.algorithm, owners(target.key, algorithms)
    foreign = given.key != target.key
    if chosen in having and (foreign or written_for == chosen or written_for not in having):
        return target
    if written_for != chosen and written_for in having:
        settled.warnings.append(
            f"{given.place}{given.key} was set for {written_for} and has no effect with algorithm={chosen}"
        )
        return None
    if target.key in PARTS or target.key in NOT_YET_KEYS or accepted(target.key):
        return target
    if foreign:
        settled.warnings += lacking(target.key, given.value, [given], settled)
        return None
    if why := _reason(target.key, settled):
        raise InputError(f"{given.place}{given.key} does not go with algorithm={chosen}\n  {why}")
    others = f" and {len(having) - 2} more" if len(having) > 2 else ""
    raise InputError(
        f"{given.place}{given.key} is a setting of {' and '.join(having[:2])}{others}, and the algorithm is {chosen}\n"
        f"  {_listing('algorithm', chosen)}"
    )


def lacking(key: str, value: Any, sources: Sequence[Given], settled: Settled) -> list[str]:
    """Warnings about a foreign setting that the chosen algorithm has not; an error where it cannot be left out."""
    names, algorithm = " ".join(given.key for given in sources), settled.algorithm
    if key in HARMLESS:
        return [f"{names} has no effect with algorithm={algorithm}"]
    if number(value) == 0:
        return []
    reason = _reason(key, settled) or f"{algorithm} has no such term"
    raise InputError(f"{sources[0].place}{names} does not go with algorithm={algorithm}\n  {reason}")


def _reason(key: str, settled: Settled) -> str | None:
    """Why the chosen algorithm has no such setting, by the first word of its name."""
    reasons: Mapping[str, str] = getattr(settled.algorithms[settled.algorithm], "reasons", {})
    return reasons.get(key.removeprefix("algorithm.").partition("_")[0])


def _fill(slots: dict[str, Given], target: Target, given: Given) -> None:
    before = slots.pop(target.key, None)
    if before is not None and before.key != given.key:
        refuse_disagreement(before, given, given.value)
    slots[target.key] = given


def refuse_disagreement(one: Given, other: Given, value: Any) -> None:
    """Two spellings of one setting may both be given if they say the same."""
    if one.value != value and str(one.value) != str(value):
        raise InputError(f"two spellings of one setting disagree\n  {one}\n  {other}\n  give one of them")


def settle_derived(settled: Settled, derived: Derived) -> Given | None:
    """A derived value beside the same setting written out: the later layer wins, and in one layer they must agree."""
    if derived.remark:
        settled.warnings.append(derived.remark)
    if derived.key.startswith("algorithm.") and settled.algorithm not in owners(derived.key, settled.algorithms):
        settled.warnings += lacking(derived.key, derived.value, derived.sources, settled)
        return None
    written = settled.slots.get(derived.key)
    source = derived.sources[-1]
    if written is not None and written.layer >= derived.layer:
        if written.layer == derived.layer and not derived.weak:
            refuse_disagreement(written, source, derived.value)
        return None
    return Given(source.key, derived.value, source.where, derived.layer)


def _remarks(settled: Settled) -> list[str]:
    keys: dict[str, list[str]] = {}
    native = schema_settings() | algorithm_settings(settled.algorithm, settled.algorithms)
    for key, given in settled.slots.items():
        remark = None if key in NOT_YET_KEYS or find(key, native) else accepted(key)
        if remark is not None and remark.remark and given.value not in remark.off:
            keys.setdefault(remark.remark.format(algorithm=settled.algorithm), []).append(given.key)
    return [f"{', '.join(names)}: {remark}" for remark, names in keys.items()]


# --- unknown settings --------------------------------------------------------------------------------------------


def unknown_setting(given: Given, algorithm: str, algorithms: Algorithms) -> InputError:
    key = given.key
    algorithm = algorithm if algorithm in algorithms else next(iter(algorithms))
    if key in sections():
        return InputError(f"{given.place}{key} is a section, not a setting\n  {_listing(key, algorithm)}")
    lines = [f"{given.place}unknown setting  {key}"]
    section = key.partition(".")[0]
    if guess := _guess(key, algorithm, algorithms):
        target = translate(guess, algorithms) or Target(guess)  # a section without a name stands for itself
        owner = target.algorithm or algorithm
        section, algorithm = target.key.partition(".")[0], owner
        lines.append(f"  did you mean   {guess}{_meaning(guess, target, owner, algorithms)}?")
    lines.append(f"  {_listing(section, algorithm)}")
    return InputError("\n".join(lines))


def _guess(key: str, algorithm: str, algorithms: Algorithms) -> str | None:
    """The nearest key whose last word is near too: long common beginnings alone would make anything look near."""
    last = key.rpartition(".")[2]
    native = {**schema_settings(), **algorithm_settings(algorithm, algorithms)}
    known = [*native, *ALIASES, *PARTS, *ACCEPTED, *sorted(NOT_YET_KEYS)]
    for name in algorithms:
        for setting in algorithm_settings(name, algorithms):
            known += [s for s in spellings(setting, algorithms) if s.startswith(f"algorithm.{name}_")]
    near = [k for k in dict.fromkeys(known) if nearest(last, [k.rpartition(".")[2]])]
    if "." in key:
        return nearest(key, near)
    if section := nearest(key, sections()):  # data=x is short for data.name=x
        return section
    return next((k for k in near if k.rpartition(".")[2] == key), nearest(key, near))


def _meaning(guess: str, target: Target, owner: str, algorithms: Algorithms) -> str:
    settings = all_keys(algorithms) | algorithm_settings(owner, algorithms)
    words = []
    if guess != target.key:
        words.append(f"= {target.key}" + (f" for {target.algorithm}" if target.algorithm else ""))
    if target.key in settings:
        words.append(f"default {literal(settings[target.key].default)}")
    return f"  ({'; '.join(words)})" if words else ""


def _listing(section: str, algorithm: str) -> str:
    if section == "algorithm":
        return f"all settings of {algorithm}: covey config explain algorithm={algorithm}"
    if section in sections():
        return f"all settings of {section}: covey config explain {section}"
    return "all settings: covey config explain"
