"""Algorithms outside of the package: `algorithm=my_algo.py:MyAlgo`, or the class itself in Python.

A class is an algorithm if it is a dataclass with

    advantages(samples)     an estimator (protocols.Estimator); its loss is `usual_loss` of the class, else ppo_clip
    loss(out, batch)        a loss of each token (protocols.TokenLoss), with `couples`; without `advantages`, GRPO's

or both. Its fields are its settings, `algorithm.FIELD`, next to those that every algorithm has (KL, correction,
shaping, filter).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from covey.algorithms.aggregation import Aggregation, GroupSum
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.catalogue import ALGORITHMS, ALIASES, LOSSES, Entry, Loss
from covey.algorithms.correction import Correction
from covey.algorithms.grpo import Grpo
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.kl import Kl
from covey.algorithms.shaping import GroupFilter, Shaping
from covey.errors import InputError, unknown
from covey.imports import load_function
from covey.protocols import Couples, Needs

USUAL_LOSS = "ppo_clip"

_given: dict[str, type] = {}  # classes that were given in Python, by their name


def is_own(name: str) -> bool:
    return ":" in name


def load_own(name: str) -> type:
    """The class of `file.py:Class` or `module:Class`; one that was given in Python is not loaded again."""
    found = _given[name] if name in _given else load_function("algorithm", name)
    return checked(found, name)


def give(cls: type) -> str:
    """The name of a class that was given in Python: where it can be loaded from, if it is in a file."""
    name = label(cls)
    _given[name] = checked(cls, name)
    return name


def label(found: Any) -> str:
    """file.py:NAME of a function or class; module:NAME where it has no file, as in a notebook."""
    module, name = getattr(found, "__module__", "__main__"), getattr(found, "__qualname__", type(found).__qualname__)
    main = sys.modules.get("__main__")
    if module == "__main__" and not hasattr(main, "__file__"):
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(found)
    except TypeError:
        file = None
    return f"{file}:{name}" if file is not None and Path(file).is_file() else f"{module}:{name}"


def checked(found: Any, name: str) -> type:
    """Refuse a class that is not an algorithm, and say what it lacks."""
    if not inspect.isclass(found):
        raise InputError(f"algorithm {name} is not a class\n  an algorithm is a dataclass with advantages(samples)")
    estimates, has_loss = (callable(getattr(found, method, None)) for method in ("advantages", "loss"))
    if not dataclasses.is_dataclass(found):
        raise InputError(f"algorithm {name} must be a dataclass\n  fix: @dataclass(frozen=True) above the class")
    if not estimates and not has_loss:
        raise InputError(
            f"algorithm {name} has neither advantages(samples) nor loss(out, batch)\n  see docs/algorithms/README.md"
        )
    if has_loss:
        _check_own_loss(found, name)
    for item in dataclasses.fields(found):
        if item.init and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise InputError(f"algorithm {name}: the field {item.name} is a setting and needs a default")
    if estimates and not isinstance(getattr(found, "needs", Needs()), (Needs, property)):
        raise InputError(f"algorithm {name}: needs must be covey.protocols.Needs(...)")
    return found


def _check_own_loss(found: type, name: str) -> None:
    if lacking := [part for part in ("term", "couples", "on_policy_only", "metrics") if not hasattr(found, part)]:
        raise InputError(
            f"algorithm {name} has a loss, which lacks {', '.join(lacking)}\n"
            "  what they mean: covey.protocols.TokenLoss, docs/algorithms/README.md"
        )
    if (couples := vars(found).get("couples", "nothing")) not in get_args(Couples):
        raise unknown(f"couples of {name}", str(couples), get_args(Couples))


def loss_name(cls: type) -> str | None:
    """What the loss of such a class is called in `algorithm.loss`; None if it has none of its own."""
    if not callable(getattr(cls, "loss", None)):
        return None
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def own_losses(cls: type) -> dict[str, Loss]:
    """The losses that it can be used with."""
    others = {name: loss for name, loss in LOSSES.items() if name != "gvpo"}
    own = loss_name(cls)
    return others if own is None else {own: Loss(cls), **others}


def own_entry(cls: type) -> Entry:
    usual = loss_name(cls) or str(getattr(cls, "usual_loss", USUAL_LOSS))
    if usual not in own_losses(cls):
        raise unknown(f"usual_loss of {cls.__name__}", usual, own_losses(cls))
    summary = (inspect.getdoc(cls) or "").split("\n")[0]
    estimator = cls if callable(getattr(cls, "advantages", None)) else Grpo
    return Entry(estimator, usual, "", "" if summary.startswith(f"{cls.__name__}(") else summary)


# -- From an algorithm's name and settings to its parts, joined; and the settings as a schema for the configuration ----

_ANY = (Aggregation, Kl, Correction, Shaping, GroupFilter)
_GVPO = (Shaping, GroupFilter)  # its theory fixes the sum, and a KL or a weight from outside would break its zero sum

GVPO_REASONS = {
    "kl": "an external KL breaks GVPO's zero sum: the KL is inside its weights (algorithm.beta)",
    "correction": "importance weights would break GVPO's zero sum; it is right for samples of any policy as it is",
    "aggregation": "gvpo sums over tokens by its theory: a mean changes its optimum",
    "norm": "gvpo sums over tokens by its theory: a mean changes its optimum",
    "reject": "leaving out single answers would break GVPO's zero sum",
    "loss": "its loss completes the advantage R − R̄ with β(ρ − ρ̄) of the moment: gvpo is one piece",
}


def parts(name: str, loss: str | None = None) -> tuple[type, ...]:
    """The classes whose fields are the settings of an algorithm."""
    entry = find_entry(name)
    loss = _check_loss(name, loss)
    shared = _GVPO if entry.estimator is Gvpo else _ANY
    return tuple(dict.fromkeys((entry.estimator, find_losses(name)[loss].objective, *shared)))


def find_entry(name: str) -> Entry:
    """Of the catalogue, or of an algorithm outside of the package (own.py)."""
    if is_own(name):
        return own_entry(load_own(name))
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def find_losses(name: str) -> Mapping[str, Loss]:
    """The losses that an algorithm may be asked for."""
    return own_losses(load_own(name)) if is_own(name) else LOSSES


def _check_loss(name: str, loss: str | None) -> str:
    """The loss to use; one that cannot go with the estimator is refused."""
    loss = loss or find_entry(name).loss
    if loss not in (known := find_losses(name)):
        raise unknown("loss", loss, known)
    if not _goes_with(name, loss):
        raise ValueError(f"loss={loss} does not go with algorithm={name}\n  {GVPO_REASONS['loss']}")
    return loss


def settings(name: str, loss: str | None = None) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of every setting of an algorithm; `loss` replaces its usual one."""
    entry, loss = find_entry(name), _check_loss(name, loss)
    usual = (
        find_losses(name)[loss].defaults,
        entry.defaults,
    )  # a loss that was chosen wins over the algorithm's own defaults
    changed = {**usual[0], **usual[1]} if loss == entry.loss else {**usual[1], **usual[0]}
    found: dict[str, tuple[Any, Any]] = {"loss": (str, loss)}
    for part in parts(name, loss):
        hints = typing.get_type_hints(part, include_extras=True)
        found |= {f.name: (hints[f.name], changed.get(f.name, _default(f))) for f in _fields(part)}
    return found


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _fields(part: type) -> list[Any]:
    return [f for f in dataclasses.fields(part) if f.init]


def make(name: str, **options: Any) -> Algorithm:
    """The algorithm with these settings; an unknown setting is an error that lists the known ones."""
    name = ALIASES.get(name, name)
    entry = find_entry(name)
    loss = _check_loss(name, options.pop("loss", None))
    known = settings(name, loss)
    for key in options:
        if key not in known:
            raise _refusal(name, key, known)
    values = {key: default for key, (_, default) in known.items()} | options
    built = {part: part(**{f.name: values[f.name] for f in _fields(part)}) for part in parts(name, loss)}
    algorithm = Algorithm(
        name=name,
        estimator=built[entry.estimator],
        objective=built[find_losses(name)[loss].objective],
        aggregation=built.get(Aggregation, GroupSum()),
        shaping=built[Shaping],
        filter=built[GroupFilter],
        kl=built.get(Kl),
        correction=built.get(Correction),
    )
    kl = algorithm.kl
    if kl is not None and kl.kl_coef and kl.kl_in == "reward" and algorithm.sees_rewards_apart:
        raise ValueError(f"{name} normalises each reward by itself, and a KL is none of them: use kl_in=loss")
    return algorithm


def _refusal(name: str, key: str, known: Iterable[str]) -> ValueError:
    reason = GVPO_REASONS.get(key.partition("_")[0]) if name == "gvpo" else None
    return (
        ValueError(f"{key} does not go with {name}\n  {reason}")
        if reason
        else unknown(f"setting of {name}", key, known)
    )


def schema(name: str, loss: str | None = None) -> type:
    """The settings of an algorithm as one frozen dataclass, for the configuration: `name`, `loss`, the parts' fields.

    Beside the fields it tells the configuration: `parts`, whose source explains the settings; `losses`, the schema with
    each loss; `of_loss`, the settings whose meaning or default is the loss's; `also`, other spellings of the name;
    `reasons`, why it lacks some settings.
    """
    return _schema(name, loss, load_own(name) if is_own(name) else None)  # the file of a class may be edited


@cache
def _schema(name: str, loss: str | None, own: type | None) -> type:
    entry, known, losses = find_entry(name), settings(name, loss), find_losses(name)
    fields: list[Any] = [("name", str, dataclasses.field(default=name))]
    fields += [(key, kind, _field(default)) for key, (kind, default) in known.items()]
    by_loss = {f.name for f in _fields(losses[loss or entry.loss].objective)}
    by_loss |= {key for other in losses.values() for key in other.defaults}
    told = {
        "parts": (Choice, *parts(name, loss)),
        "losses": {} if loss else LossSchemas(name),
        "of_loss": frozenset(by_loss & known.keys()),
        "also": entry.also,
        "reasons": GVPO_REASONS if name == "gvpo" else {"loss": GVPO_REASONS["loss"]},
        "__doc__": entry.summary,
    }
    title = own.__name__ if own is not None else name.title()
    return dataclasses.make_dataclass(f"{title}Settings", fields, frozen=True, namespace=told)


def _field(default: Any) -> Any:
    mutable = isinstance(default, (list, dict, set))
    return (
        dataclasses.field(default_factory=lambda: copy.copy(default)) if mutable else dataclasses.field(default=default)
    )


class LossSchemas(Mapping[str, type]):
    """The schema of an algorithm with each loss that goes with it, made when it is asked for: there are over a hundred
    of them, and most commands need one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses = tuple(loss for loss in find_losses(name) if _goes_with(name, loss))

    def __getitem__(self, loss: str) -> type:
        if loss not in self.losses:
            raise KeyError(loss)
        return schema(self.name, loss)

    def __iter__(self) -> Iterator[str]:
        return iter(self.losses)

    def __len__(self) -> int:
        return len(self.losses)


def algorithm_schemas() -> dict[str, type]:
    """The settings of every algorithm, by its name: what the configuration is composed with."""
    return {name: schema(name) for name in ALGORITHMS}


def _goes_with(name: str, loss: str) -> bool:
    return (loss == "gvpo") == (name == "gvpo")


@dataclass(frozen=True)
class Choice:
    """What every algorithm's settings begin with."""

    name: str = ""  # the algorithm: covey algorithms lists them
    loss: str = ""  # ppo_clip | dapo | dr_grpo | gspo | cispo | sapo | policy_gradient; gvpo has its own
