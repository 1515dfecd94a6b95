"""From what the user wrote, in layers and any vocabulary, to one value for each native setting.

layer by layer   every spelling finds its slot; of two spellings of one slot that disagree, the command line's later one
                 wins, and a file's are refused
across layers    the later layer wins
at the end       what is not available is refused, what has no effect is said

A settlement that is `tolerant` (a check that starts nothing) says what would be refused, and goes on without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from covey.config.aliases import ALIASES, HARMLESS, VERL_LOSS, Target, accepted, translate
from covey.config.derive import NOT_YET_KEYS, PARTS, Derived, find_not_yet, off
from covey.config.read import ENVIRONMENT_KEY, Given
from covey.config.settings import (
    Algorithms,
    Setting,
    algorithm_settings,
    canonical,
    find,
    losses_of,
    of_loss,
    owners,
    schema_settings,
    usual_loss,
    with_loss,
)
from covey.config.unknown import listing_of, unknown_setting
from covey.errors import InputError, unknown

Left = dict[tuple[str, str], list[Given]]  # (what for, what is chosen instead) → settings that stay behind


@dataclass(frozen=True)
class Choice:
    """The algorithm and the loss that a layer was written for."""

    algorithm: str
    loss: str | None  # None: an algorithm without losses to choose from
    by: Given  # the setting that chose the loss; its value is None where nothing did


@dataclass
class Settled:
    """One value per slot. A slot is a native key, or the key that stands for a foreign one."""

    choice: Choice
    usual: Algorithms  # each with its usual loss
    slots: dict[str, Given] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    tolerant: bool = False
    refused: int = 0  # what a run would be refused for, where `tolerant` goes on

    def refuse(self, text: str) -> None:
        """What no run can do."""
        if not self.tolerant:
            raise InputError(text)
        self.refused += 1
        self.warnings.append(f"a run would be refused: {text}")

    @property
    def algorithm(self) -> str:
        return self.choice.algorithm

    @cached_property
    def algorithms(self) -> Algorithms:
        """With the chosen loss's settings where the chosen algorithm's usual ones were."""
        return self.schemas(self.choice)

    def schemas(self, choice: Choice) -> Algorithms:
        return with_loss(choice.algorithm, choice.loss, self.usual)

    def native(self, settings: Mapping[str, Setting]) -> dict[str, Given]:
        return {key: given for key, given in self.slots.items() if find(key, settings)}

    def parts(self) -> dict[str, Given]:
        return {key: given for key, given in self.slots.items() if key in PARTS}

    def replaced(self, key: str, written_for: Choice) -> bool:
        """Whether a native key meant something to the loss that it was written for, and another loss was chosen."""
        if written_for.algorithm != self.algorithm or written_for.loss == self.choice.loss:
            return False
        return key in of_loss(written_for.algorithm, self.schemas(written_for))


def settle(
    layers: Sequence[Sequence[Given]], algorithms: Algorithms, recipe: Mapping[str, Any], *, tolerant: bool = False
) -> Settled:
    """`recipe` is the recipe's own algorithm section."""
    layers = [[word for given in layer for word in _spelled_out(given, algorithms)] for layer in layers]
    choices = _choices(layers, algorithms, choice_of(recipe))
    settled = Settled(choices[-1], algorithms, tolerant=tolerant)
    check_loss(settled.algorithm, settled.choice.by, settled.choice.loss, algorithms)
    for layer, written_for in zip(layers, choices[1:], strict=True):
        slots: dict[str, Given] = {}
        left: Left = {}
        for given in layer:
            if match := ENVIRONMENT_KEY.fullmatch(given.key):
                settled.env[match[1]] = str(given.value)
                if given.key not in ALIASES:
                    continue
            target = _place(given, written_for, settled, left)
            if target is not None:
                meant = replace(given, value=_meant(target, given, algorithms))
                settled.warnings += _fill(slots, target, meant)
        for key, given in slots.items():
            settled.slots.pop(key, None)  # a later layer's value also comes later
            settled.slots[key] = given
        settled.warnings += [_left_behind(*why, words) for why, words in left.items()]
    if wanted := find_not_yet(settled.slots):
        settled.refuse("\n".join(wanted.values()))
        for key in wanted:
            del settled.slots[key]
    settled.warnings += _remarks(settled)
    return settled


def _meant(target: Target, given: Given, algorithms: Algorithms) -> Any:
    if target.key == "algorithm.name":
        return canonical(str(given.value), algorithms)
    return target.convert(given.key, given.value)


# --- what each layer was written for -----------------------------------------------------------------------------


def _spelled_out(given: Given, algorithms: Algorithms) -> list[Given]:
    """algorithm=grpo+sapo, a recipe's way to choose both, as the two settings that it means."""
    name, _, loss = str(given.value).rpartition("+")
    target = translate(given.key, algorithms) if loss else None
    own = canonical(name, algorithms)
    if target is None or target.key != "algorithm.name" or own not in algorithms:
        return [given]
    if loss not in losses_of(own, algorithms):
        return [given]
    return [replace(given, value=name), replace(given, key="algorithm.loss", value=loss)]


def _choices(layers: Sequence[Sequence[Given]], algorithms: Algorithms, recipe: Choice) -> list[Choice]:
    """The recipe's, and each layer's: one that names no algorithm, or no loss, goes on with what was chosen before."""
    found = [recipe]
    for layer in layers:
        words = [(given, target) for given in layer if (target := translate(given.key, algorithms))]
        found.append(_choice(words, found[-1], algorithms))
    return found


def _choice(words: Sequence[tuple[Given, Target]], before: Choice, algorithms: Algorithms) -> Choice:
    name = before.algorithm
    for given, target in words:
        if target.key == "algorithm.name":
            name = canonical(str(given.value), algorithms)
            if name not in algorithms:
                raise unknown("algorithm", name, algorithms)
    by = before.by
    if name != before.algorithm and not (by.key in VERL_LOSS and _loss(by) in losses_of(name, algorithms)):
        by = Given("algorithm.loss", None)  # a loss stays behind with its algorithm, unless the word goes with any
    for given, target in words:
        if target.key == "algorithm.loss" and target.algorithm in (None, name):
            by = given
    usual = by.value is None or _is_moot(by, name, algorithms)
    return Choice(name, usual_loss(name, algorithms) if usual else _loss(by), by)


def choice_of(section: Mapping[str, Any]) -> Choice:
    """What an algorithm section of a recipe was written for."""
    loss = section.get("loss")
    return Choice(section["name"], loss, Given("algorithm.loss", loss))


def _loss(by: Given) -> str | None:
    found = Target("algorithm.loss").convert(by.key, by.value if by.value is None else str(by.value))
    return None if found is None else str(found)  # a list is the name of no loss


def _is_moot(by: Given, name: str, algorithms: Algorithms) -> bool:
    """verl's usual loss, written out for an algorithm that has only its own."""
    return by.key in VERL_LOSS and by.value == "vanilla" and _loss(by) not in losses_of(name, algorithms)


def check_loss(name: str, by: Given, loss: str | None, algorithms: Algorithms) -> None:
    """`by` is the setting that chose the loss."""
    known = losses_of(name, algorithms)
    if loss in known or loss == usual_loss(name, algorithms):
        return
    why = getattr(algorithms[name], "reasons", {}).get("loss")
    if why and any(loss in losses_of(other, algorithms) for other in algorithms):
        raise InputError(f"{by.place}{by.key}={loss} does not go with algorithm={name}\n  {why}")
    raise unknown(f"loss for {name}", str(loss), known)


# --- the slot of a setting ---------------------------------------------------------------------------------------


def _place(given: Given, written_for: Choice, settled: Settled, left: Left) -> Target | None:
    """The slot that a setting fills, or None if it has none beside the chosen algorithm and loss."""
    target = translate(given.key, settled.algorithms) or translate(given.key, settled.schemas(written_for))
    if target is None:
        raise unknown_setting(given, settled.algorithm, settled.algorithms)
    if target.algorithm is not None and target.algorithm != settled.algorithm:
        settled.warnings.append(f"{given.place}{given.key} has no effect with algorithm={settled.algorithm}")
        return None
    if target.key == "algorithm.name" or not target.key.startswith("algorithm."):
        return target
    return _place_of_algorithm(given, target, written_for, settled, left)


def _place_of_algorithm(
    given: Given, target: Target, written_for: Choice, settled: Settled, left: Left
) -> Target | None:
    """One name may mean different things to two algorithms or two losses, so a native setting stays with those that its
    layer was written for. Foreign names that no algorithm owns (`clip_ratio`) go with any that has the setting."""
    chosen, having = settled.algorithm, owners(target.key, settled.algorithms)
    foreign, another = given.key != target.key, written_for.algorithm != chosen
    had = find(target.key, algorithm_settings(written_for.algorithm, settled.schemas(written_for)))
    if settled.replaced(target.key, written_for) and (target.algorithm or not foreign):
        left.setdefault((f"loss={written_for.loss}", f"loss={settled.choice.loss}"), []).append(given)
        return None
    if target.key == "algorithm.loss" and foreign and not _counts(given, another, settled):
        settled.warnings.append(f"{given.place}{given.key} has no effect with algorithm={chosen}")
        return None
    if chosen in having and (foreign or not another or not had):
        return target
    if another and had:
        left.setdefault((written_for.algorithm, f"algorithm={chosen}"), []).append(given)
        return None
    if target.key in PARTS or target.key in NOT_YET_KEYS or accepted(target.key):
        return target
    if foreign:
        settled.warnings += lacking(target.key, given.value, [given], settled)
        return None
    raise _misplaced(given, target.key, having, settled)


def _counts(given: Given, another: bool, settled: Settled) -> bool:
    """Whether another vocabulary's word for a loss is one that the chosen algorithm can be asked for."""
    return _loss(given) == settled.choice.loss or not (another or _is_moot(given, settled.algorithm, settled.usual))


def _left_behind(old: str, new: str, words: Sequence[Given]) -> str:
    first = words[0]
    if len(words) == 1:
        return f"{first.place}{first.key} was set for {old} and has no effect with {new}"
    place = first.where.rpartition(", line ")[0]
    names = ", ".join(given.key for given in words)
    return f"{place}{': ' if place else ''}{names} were set for {old} and have no effect with {new}"


def _misplaced(given: Given, key: str, having: Sequence[str], settled: Settled) -> InputError:
    """The error about a native setting that the chosen algorithm has not: why, or what has it."""
    chosen, place = settled.algorithm, f"{given.place}{given.key}"
    if why := _reason(key, settled):
        return InputError(f"{place} does not go with algorithm={chosen}\n  {why}")
    listing = listing_of("algorithm", chosen)
    schemas = losses_of(chosen, settled.usual).items()
    if losses := [loss for loss, schema in schemas if find(key, algorithm_settings(chosen, {chosen: schema}))]:
        choose = f"choose it with algorithm.loss={losses[0]}"
        return InputError(f"{place} belongs to the loss {', '.join(losses)}: {choose}\n  {listing}")
    others = f" and {len(having) - 2} more" if len(having) > 2 else ""
    owning = f"{' and '.join(having[:2])}{others}"
    return InputError(f"{place} is a setting of {owning}, and the algorithm is {chosen}\n  {listing}")


def lacking(key: str, value: Any, sources: Sequence[Given], settled: Settled) -> list[str]:
    """Warnings about a foreign setting that the chosen algorithm has not; an error where it cannot be left out."""
    names, algorithm = " ".join(given.key for given in sources), settled.algorithm
    if key in HARMLESS:
        return [] if value is None else [f"{names} has no effect with algorithm={algorithm}"]
    if off(value):
        return []
    reason = _reason(key, settled) or f"{algorithm} has no such term"
    settled.refuse(f"{sources[0].place}{names} does not go with algorithm={algorithm}\n  {reason}")
    return []


def _reason(key: str, settled: Settled) -> str | None:
    """Why the chosen algorithm has no such setting, by the first word of its name."""
    reasons: Mapping[str, str] = getattr(settled.algorithms[settled.algorithm], "reasons", {})
    return reasons.get(key.removeprefix("algorithm.").partition("_")[0])


def _fill(slots: dict[str, Given], target: Target, given: Given) -> list[str]:
    """Returns what the user should know about another spelling that this one replaces."""
    before = slots.pop(target.key, None)
    slots[target.key] = given
    same = before is None or before.key == given.key or _agree(before.value, given.value)
    return [] if before is None or same else _replaced(before, given)


def _agree(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)


def _replaced(before: Given, later: Given) -> list[str]:
    """Two spellings of one setting that disagree: the later word of a command line wins, so that settings can be
    appended to any command; lines of a file have no order."""
    if not before.order or not later.order:
        raise InputError(f"two spellings of one setting disagree\n  {before}\n  {later}\n  give one of them")
    return [f"{before} is replaced by {later}, which comes later"]


def settle_derived(settled: Settled, derived: Derived) -> Given | None:
    """A derived value beside the same setting written out: the later layer wins, and of a command line the later word;
    in a file they must agree."""
    if derived.remark:
        settled.warnings.append(derived.remark)
    if derived.key.startswith("algorithm.") and settled.algorithm not in owners(derived.key, settled.algorithms):
        settled.warnings += lacking(derived.key, derived.value, derived.sources, settled)
        return None
    written = settled.slots.get(derived.key)
    source = derived.sources[-1]
    if written is not None and (written.layer > derived.layer or (written.layer == derived.layer and derived.weak)):
        return None
    found = Given(source.key, derived.value, source.where, derived.layer, derived.order)
    if written is None or written.layer < derived.layer or derived.strong:
        return found
    later = derived.order >= written.order
    if not _agree(written.value, derived.value):
        settled.warnings += _replaced(written, source) if later else _replaced(source, written)
    return found if later else None


def _remarks(settled: Settled) -> list[str]:
    keys: dict[str, list[str]] = {}
    native = schema_settings() | algorithm_settings(settled.algorithm, settled.algorithms)
    for key, given in settled.slots.items():
        remark = None if key in NOT_YET_KEYS or find(key, native) else accepted(key)
        if remark is not None and remark.remark and given.value not in remark.off:
            keys.setdefault(remark.remark.format(algorithm=settled.algorithm), []).append(given.key)
    return [f"{', '.join(names)}: {remark}" for remark, names in keys.items()]
