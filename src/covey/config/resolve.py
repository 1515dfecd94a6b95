"""Resolves the user's settings, in layers and in any vocabulary, to one value for each native setting.

within a layer   every spelling is assigned to a slot. If two spellings of one slot disagree, the later word of a
                 command line wins; in a file it is an error
across layers    the later layer wins
at the end       unsupported options are errors, settings without effect are warnings

With `tolerant` (a check that starts no run), errors about unsupported options are warnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from covey.config.aliases import ALIASES, HARMLESS, VERL_LOSS, Target, no_effect, translate
from covey.config.derive import PARTS, UNSUPPORTED_KEYS, Derived, find_unsupported, off
from covey.config.read import ENVIRONMENT_KEY, Override
from covey.config.settings import (
    Algorithms,
    Setting,
    algorithm_settings,
    canonical,
    default_loss,
    find,
    loss_settings,
    losses_of,
    owners,
    schema_settings,
    with_loss,
)
from covey.config.unknown import listing_of, unknown_setting
from covey.errors import InputError, unknown

Dropped = dict[tuple[str, str], list[Override]]  # (old choice, new choice) → settings dropped because of it


@dataclass(frozen=True)
class Choice:
    """The algorithm and the loss that a layer was written for."""

    algorithm: str
    loss: str | None  # None: the algorithm has no choice of losses
    source: Override  # the setting that chose the loss; its value is None if no setting did


@dataclass
class Resolved:
    """One value per slot. A slot is a native key, or a foreign key that has no single native counterpart."""

    choice: Choice
    default_schemas: Algorithms  # each algorithm with its default loss
    slots: dict[str, Override] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    tolerant: bool = False
    rejected: int = 0  # errors that `tolerant` turned into warnings

    def reject(self, text: str) -> None:
        """Raise an error, or add it as a warning if `tolerant`."""
        if not self.tolerant:
            raise InputError(text)
        self.rejected += 1
        self.warnings.append(f"a run would be refused: {text}")

    @property
    def algorithm(self) -> str:
        return self.choice.algorithm

    @cached_property
    def algorithms(self) -> Algorithms:
        """The schemas, with the chosen loss in the chosen algorithm's."""
        return self.schemas(self.choice)

    def schemas(self, choice: Choice) -> Algorithms:
        return with_loss(choice.algorithm, choice.loss, self.default_schemas)

    def native(self, settings: Mapping[str, Setting]) -> dict[str, Override]:
        return {key: override for key, override in self.slots.items() if find(key, settings)}

    def parts(self) -> dict[str, Override]:
        return {key: override for key, override in self.slots.items() if key in PARTS}

    def drops(self, key: str, written_for: Choice) -> bool:
        """Whether a native key belongs to the loss that it was written for, and another loss was chosen."""
        if written_for.algorithm != self.algorithm or written_for.loss == self.choice.loss:
            return False
        return key in loss_settings(written_for.algorithm, self.schemas(written_for))


def resolve(
    layers: Sequence[Sequence[Override]], algorithms: Algorithms, recipe: Mapping[str, Any], *, tolerant: bool = False
) -> Resolved:
    """`recipe` is the algorithm section of the recipe."""
    layers = [[word for override in layer for word in _split_choice(override, algorithms)] for layer in layers]
    choices = _choices(layers, algorithms, choice_of(recipe))
    resolved = Resolved(choices[-1], algorithms, tolerant=tolerant)
    check_loss(resolved.algorithm, resolved.choice.source, resolved.choice.loss, algorithms)
    for layer, written_for in zip(layers, choices[1:], strict=True):
        slots: dict[str, Override] = {}
        dropped: Dropped = {}
        for override in layer:
            if match := ENVIRONMENT_KEY.fullmatch(override.key):
                resolved.env[match[1]] = str(override.value)
                if override.key not in ALIASES:
                    continue
            target = _find_target(override, written_for, resolved, dropped)
            if target is not None:
                converted = replace(override, value=_convert(target, override, algorithms))
                resolved.warnings += _assign_slot(slots, target, converted)
        for key, override in slots.items():
            resolved.slots.pop(key, None)  # keeps slots in the order of their layers
            resolved.slots[key] = override
        resolved.warnings += [_dropped_warning(*reason, words) for reason, words in dropped.items()]
    if unsupported := find_unsupported(resolved.slots):
        resolved.reject("\n".join(unsupported.values()))
        for key in unsupported:
            del resolved.slots[key]
    resolved.warnings += _no_effect_warnings(resolved)
    return resolved


def _convert(target: Target, override: Override, algorithms: Algorithms) -> Any:
    if target.key == "algorithm.name":
        return canonical(str(override.value), algorithms)
    return target.convert(override.key, override.value)


# -- The choice that each layer was written for ------------------------------------------------------------------------


def _split_choice(override: Override, algorithms: Algorithms) -> list[Override]:
    """Split algorithm=grpo+sapo, a recipe's way to choose both, into two settings."""
    name, _, loss = str(override.value).rpartition("+")
    target = translate(override.key, algorithms) if loss else None
    own = canonical(name, algorithms)
    if target is None or target.key != "algorithm.name" or own not in algorithms:
        return [override]
    if not any(loss in losses_of(each, algorithms) for each in algorithms):
        return [override]
    return [replace(override, value=name), replace(override, key="algorithm.loss", value=loss)]


def _choices(layers: Sequence[Sequence[Override]], algorithms: Algorithms, recipe: Choice) -> list[Choice]:
    """The recipe's choice and each layer's. A layer without an algorithm or a loss keeps the previous choice."""
    found = [recipe]
    for layer in layers:
        words = [(override, target) for override in layer if (target := translate(override.key, algorithms))]
        found.append(_choice(words, found[-1], algorithms))
    return found


def _choice(words: Sequence[tuple[Override, Target]], before: Choice, algorithms: Algorithms) -> Choice:
    name = before.algorithm
    for override, target in words:
        if target.key == "algorithm.name":
            name = canonical(str(override.value), algorithms)
            if name not in algorithms:
                raise unknown("algorithm", name, algorithms)
    source = before.source
    if name != before.algorithm and not (source.key in VERL_LOSS and _loss(source) in losses_of(name, algorithms)):
        source = Override("algorithm.loss", None)  # dropped with its algorithm, unless the new one has it too
    for override, target in words:
        if target.key == "algorithm.loss" and target.algorithm in (None, name):
            source = override
    default = source.value is None or _is_default_loss(source, name, algorithms)
    return Choice(name, default_loss(name, algorithms) if default else _loss(source), source)


def choice_of(section: Mapping[str, Any]) -> Choice:
    """The choice of a recipe's algorithm section."""
    loss = section.get("loss")
    return Choice(section["name"], loss, Override("algorithm.loss", loss))


def _loss(source: Override) -> str | None:
    """The loss that a setting chooses, under its native name."""
    loss = Target("algorithm.loss").convert(source.key, source.value if source.value is None else str(source.value))
    return None if loss is None else str(loss)


def _is_default_loss(source: Override, name: str, algorithms: Algorithms) -> bool:
    """verl's default loss (vanilla), set for an algorithm that has only its own loss."""
    return source.key in VERL_LOSS and source.value == "vanilla" and _loss(source) not in losses_of(name, algorithms)


def check_loss(name: str, source: Override, loss: str | None, algorithms: Algorithms) -> None:
    """Raise an error if the algorithm does not have this loss. `source` is the setting that chose it."""
    known = losses_of(name, algorithms)
    if loss in known or loss == default_loss(name, algorithms):
        return
    of_both = (algorithms[key] for key in (name, str(loss)) if key in algorithms)  # a loss has its algorithm's name
    why = next(filter(None, (getattr(schema, "reasons", {}).get("loss") for schema in of_both)), None)
    if why and any(loss in losses_of(other, algorithms) for other in algorithms):
        raise InputError(f"{source.label}={loss} does not go with algorithm={name}\n  {why}")
    raise unknown(f"loss for {name}", str(loss), known)


# -- The slot of a setting ---------------------------------------------------------------------------------------------


def _find_target(override: Override, written_for: Choice, resolved: Resolved, dropped: Dropped) -> Target | None:
    """The target of a setting; None if it does not apply to the chosen algorithm and loss."""
    target = translate(override.key, resolved.algorithms) or translate(override.key, resolved.schemas(written_for))
    if target is None:
        raise unknown_setting(override, resolved.algorithm, resolved.algorithms)
    if target.algorithm is not None and target.algorithm != resolved.algorithm:
        resolved.warnings.append(f"{override.label} has no effect with algorithm={resolved.algorithm}")
        return None
    if target.key == "algorithm.name" or not target.key.startswith("algorithm."):
        return target
    return _algorithm_target(override, target, written_for, resolved, dropped)


def _algorithm_target(
    override: Override, target: Target, written_for: Choice, resolved: Resolved, dropped: Dropped
) -> Target | None:
    """The target of an algorithm's setting.

    Two algorithms or losses may use one name for different things, so a native setting applies only to those that its
    layer was written for. A foreign name (`clip_ratio`) applies to every algorithm that has the setting.
    """
    chosen, having = resolved.algorithm, owners(target.key, resolved.algorithms)
    foreign, another = override.key != target.key, written_for.algorithm != chosen
    had = find(target.key, algorithm_settings(written_for.algorithm, resolved.schemas(written_for)))
    if resolved.drops(target.key, written_for) and (target.algorithm or not foreign):
        dropped.setdefault((f"loss={written_for.loss}", f"loss={resolved.choice.loss}"), []).append(override)
        return None
    if target.key == "algorithm.loss" and foreign and not _loss_applies(override, another, resolved):
        resolved.warnings.append(f"{override.label} has no effect with algorithm={chosen}")
        return None
    if chosen in having and (foreign or not another or not had):
        return target
    if another and had:
        dropped.setdefault((written_for.algorithm, f"algorithm={chosen}"), []).append(override)
        return None
    if target.key in PARTS or target.key in UNSUPPORTED_KEYS or no_effect(target.key):
        return target
    if foreign:
        resolved.warnings += missing_in_algorithm(target.key, override.value, [override], resolved)
        return None
    raise _misplaced(override, target.key, having, resolved)


def _loss_applies(override: Override, another: bool, resolved: Resolved) -> bool:
    """Whether a foreign setting for the loss applies to the chosen algorithm. `another`: it was set for another one."""
    if _loss(override) == resolved.choice.loss:
        return True
    return not another and not _is_default_loss(override, resolved.algorithm, resolved.default_schemas)


def _dropped_warning(old: str, new: str, words: Sequence[Override]) -> str:
    first = words[0]
    if len(words) == 1:
        return f"{first.label} was set for {old} and has no effect with {new}"
    place = first.where.rpartition(", line ")[0]
    names = ", ".join(override.key for override in words)
    return f"{place}{': ' if place else ''}{names} were set for {old} and have no effect with {new}"


def _misplaced(override: Override, key: str, having: Sequence[str], resolved: Resolved) -> InputError:
    """The error about a native setting that the chosen algorithm does not have, with the reason or its owners."""
    chosen, name = resolved.algorithm, override.label
    if why := _reason(key, resolved):
        return InputError(f"{name} does not go with algorithm={chosen}\n  {why}")
    listing = listing_of("algorithm", chosen)
    schemas = losses_of(chosen, resolved.default_schemas).items()
    if losses := [loss for loss, schema in schemas if find(key, algorithm_settings(chosen, {chosen: schema}))]:
        choose = f"choose it with algorithm.loss={losses[0]}"
        return InputError(f"{name} belongs to the loss {', '.join(losses)}: {choose}\n  {listing}")
    named = having if len(having) <= 3 else [*having[:2], f"{len(having) - 2} more"]
    owning = " and ".join(part for part in (", ".join(named[:-1]), named[-1]) if part)
    return InputError(f"{name} is a setting of {owning}, and the algorithm is {chosen}\n  {listing}")


def missing_in_algorithm(key: str, value: Any, sources: Sequence[Override], resolved: Resolved) -> list[str]:
    """Warnings about a foreign setting that the chosen algorithm does not have; an error if dropping it is harmful."""
    names, algorithm = " ".join(override.key for override in sources), resolved.algorithm
    if key in HARMLESS:
        return [] if value is None else [f"{names} has no effect with algorithm={algorithm}"]
    if off(value):
        return []
    reason = _reason(key, resolved) or f"{algorithm} has no such term"
    resolved.reject(f"{sources[0].prefix}{names} does not go with algorithm={algorithm}\n  {reason}")
    return []


def _reason(key: str, resolved: Resolved) -> str | None:
    """Why the chosen algorithm does not have this setting, looked up by the first word of its name."""
    reasons: Mapping[str, str] = getattr(resolved.algorithms[resolved.algorithm], "reasons", {})
    return reasons.get(key.removeprefix("algorithm.").partition("_")[0])


def _assign_slot(slots: dict[str, Override], target: Target, override: Override) -> list[str]:
    """Assign a slot. Returns a warning if this replaces another spelling with another value."""
    before = slots.pop(target.key, None)
    slots[target.key] = override
    same = before is None or before.key == override.key or _agree(before.value, override.value)
    return [] if before is None or same else _replaced(before, override)


def _agree(one: Any, other: Any) -> bool:
    return one == other or str(one) == str(other)


def _replaced(before: Override, later: Override) -> list[str]:
    """The warning about two spellings that disagree. On a command line the later word wins, so that settings can be
    appended; in a file it is an error."""
    if not before.order or not later.order:
        raise InputError(f"two spellings of one setting disagree\n  {before}\n  {later}\n  give one of them")
    return [f"{before} is replaced by {later}, which comes later"]


def resolve_derived(resolved: Resolved, derived: Derived) -> Override | None:
    """The override for a derived value, unless the same setting is written out and wins.

    The later layer wins, and within a command line the later word; in a file both must agree.
    """
    if derived.remark:
        resolved.warnings.append(derived.remark)
    if derived.key.startswith("algorithm.") and resolved.algorithm not in owners(derived.key, resolved.algorithms):
        resolved.warnings += missing_in_algorithm(derived.key, derived.value, derived.sources, resolved)
        return None
    written = resolved.slots.get(derived.key)
    source = derived.sources[-1]
    if written is not None and (written.layer > derived.layer or (written.layer == derived.layer and derived.weak)):
        return None
    override = Override(source.key, derived.value, source.where, derived.layer, derived.order)
    if written is None or written.layer < derived.layer or derived.strong:
        return override
    later = derived.order >= written.order
    if not _agree(written.value, derived.value):
        resolved.warnings += _replaced(written, source) if later else _replaced(source, written)
    return override if later else None


def _no_effect_warnings(resolved: Resolved) -> list[str]:
    keys: dict[str, list[str]] = {}
    native = schema_settings() | algorithm_settings(resolved.algorithm, resolved.algorithms)
    for key, override in resolved.slots.items():
        remark = None if key in UNSUPPORTED_KEYS or find(key, native) else no_effect(key)
        if remark is not None and remark.remark and override.value not in remark.off:
            keys.setdefault(remark.remark.format(algorithm=resolved.algorithm), []).append(override.key)
    return [f"{', '.join(names)}: {remark}" for remark, names in keys.items()]
