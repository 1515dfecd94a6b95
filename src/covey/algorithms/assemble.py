"""Creates an `Algorithm` from a name and settings, and the schema of its settings for the configuration.

A name is an entry of the catalogue, or a custom class: `algorithm=my_algo.py:MyAlgo`, in Python also the class itself.
A custom class is a dataclass with

    advantages(samples)     an estimator (protocols.Estimator); its default loss is `usual_loss`, else ppo_clip
    loss(out, batch)        a token loss (protocols.TokenLoss), with `couples`; without `advantages`, GRPO's are used

or both. The settings of an algorithm are the fields of its estimator and loss, and those that all algorithms share (KL,
correction, shaping, filter).
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
from covey.algorithms.catalogue import ALGORITHMS, ALIASES, LOSSES, Entry, Loss, unsupported
from covey.algorithms.correction import Correction
from covey.algorithms.grpo import Grpo
from covey.algorithms.kl import Kl
from covey.algorithms.shaping import GroupFilter, Shaping
from covey.errors import InputError, unknown
from covey.imports import load_function
from covey.protocols import Couples, Needs

SHARED = (Aggregation, Kl, Correction, Shaping, GroupFilter)


# -- Entries, losses and parts ---------------------------------------------------------------------------------------


def find_entry(name: str) -> Entry:
    """The entry of the catalogue, or one made from a custom class."""
    if is_custom(name):
        return _custom_entry(load_custom(name))
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


def find_losses(name: str) -> Mapping[str, Loss]:
    """The losses that `algorithm.loss` may name."""
    return _custom_losses(load_custom(name)) if is_custom(name) else LOSSES


def parts(name: str, loss: str | None = None) -> tuple[type, ...]:
    """The classes whose fields are the settings of an algorithm."""
    estimator, objective = _estimator_and_objective(name, _check_loss(name, loss))
    refused = unsupported(estimator)
    shared = [part for part in SHARED if not any(f.name.partition("_")[0] in refused for f in _fields(part))]
    return tuple(dict.fromkeys((estimator, objective, *shared)))


def _estimator_and_objective(name: str, loss: str) -> tuple[type, type]:
    return find_entry(name).estimator, find_losses(name)[loss].objective


def _compatible(name: str, loss: str) -> bool:
    """A class that does not support other losses goes only with itself."""
    estimator, objective = _estimator_and_objective(name, loss)
    return estimator is objective or not any("loss" in unsupported(cls) for cls in (estimator, objective))


def _check_loss(name: str, loss: str | None) -> str:
    """The loss to use; one that is not compatible with the estimator raises."""
    loss = loss or find_entry(name).loss
    if loss not in (known := find_losses(name)):
        raise unknown("loss", loss, known)
    if not _compatible(name, loss):
        reasons = (unsupported(cls).get("loss") for cls in _estimator_and_objective(name, loss))
        raise ValueError(f"loss={loss} does not go with algorithm={name}\n  {next(filter(None, reasons))}")
    return loss


# -- Settings and the algorithm --------------------------------------------------------------------------------------


def settings(name: str, loss: str | None = None) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of every setting of an algorithm; `loss` replaces its usual one."""
    entry, loss = find_entry(name), _check_loss(name, loss)
    of_loss = find_losses(name)[loss].defaults
    # The defaults of a loss that was chosen take precedence over the algorithm's own.
    changed = {**of_loss, **entry.defaults} if loss == entry.loss else {**entry.defaults, **of_loss}
    table: dict[str, tuple[Any, Any]] = {"loss": (str, loss)}
    for part in parts(name, loss):
        hints = typing.get_type_hints(part, include_extras=True)
        table |= {f.name: (hints[f.name], changed.get(f.name, _default(f))) for f in _fields(part)}
    return table


def make(name: str, **options: Any) -> Algorithm:
    """The algorithm with these settings. An unknown setting raises an error that lists the known ones."""
    name = ALIASES.get(name, name)
    loss = _check_loss(name, options.pop("loss", None))
    estimator, objective = _estimator_and_objective(name, loss)
    known = settings(name, loss)
    for key in options:
        if key not in known:
            raise _unknown_setting(name, key, known)
    values = {key: default for key, (_, default) in known.items()} | options
    built = {part: part(**{f.name: values[f.name] for f in _fields(part)}) for part in parts(name, loss)}
    kl = built.get(Kl)
    algorithm = Algorithm(
        name=name,
        estimator=built[estimator],
        objective=built[objective],
        aggregation=built.get(Aggregation, GroupSum()),
        shaping=built[Shaping],
        filter=built[GroupFilter],
        kl=kl,
        correction=built.get(Correction),
    )
    if kl is not None and kl.kl_coef and kl.kl_in == "reward":
        reason = unsupported(estimator).get("kl_in=reward")
        if algorithm.uses_named_rewards:
            reason = "normalises each reward by itself, and the KL is not a reward"
        if reason:
            raise ValueError(f"{name} {reason}: use kl_in=loss")
    return algorithm


def _unknown_setting(name: str, key: str, known: Iterable[str]) -> ValueError:
    reason = unsupported(find_entry(name).estimator).get(key.partition("_")[0])
    if reason:
        return ValueError(f"{key} does not go with {name}\n  {reason}")
    return unknown(f"setting of {name}", key, known)


def _fields(part: type) -> list[Any]:
    return [f for f in dataclasses.fields(part) if f.init]


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


# -- The schema for the configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The first settings of every algorithm."""

    name: str = ""  # the algorithm: covey algorithms lists them
    loss: str = ""  # loss per token, by name (docs/algorithms/README.md); gvpo and online_dpo have only their own


def algorithm_schemas() -> dict[str, type]:
    """The schema of every algorithm by name, for composing the configuration."""
    return {name: schema(name) for name in ALGORITHMS}


def schema(name: str, loss: str | None = None) -> type:
    """The settings of an algorithm as one frozen dataclass: `name`, `loss`, the fields of the parts.

    Class attributes for the configuration: `parts`, whose source documents the settings; `losses`, the schema with each
    loss; `of_loss`, the settings whose meaning or default depends on the loss; `also`, other spellings of the name;
    `reasons`, why it does not have some settings.
    """
    return _schema(name, loss, load_custom(name) if is_custom(name) else None)  # the file of a class may change


@cache
def _schema(name: str, loss: str | None, custom: type | None) -> type:
    entry, known, losses = find_entry(name), settings(name, loss), find_losses(name)
    fields: list[Any] = [("name", str, dataclasses.field(default=name))]
    fields += [(key, kind, _field(default)) for key, (kind, default) in known.items()]
    of_loss = {f.name for f in _fields(losses[loss or entry.loss].objective)}
    of_loss |= {key for other in losses.values() for key in other.defaults}
    attributes = {
        "parts": (Choice, *parts(name, loss)),
        "losses": {} if loss else LossSchemas(name),
        "of_loss": frozenset(of_loss & known.keys()),
        "also": entry.also,
        "reasons": unsupported(entry.estimator),
        "__doc__": entry.summary,
    }
    title = custom.__name__ if custom is not None else name.title()
    return dataclasses.make_dataclass(f"{title}Settings", fields, frozen=True, namespace=attributes)


def _field(default: Any) -> Any:
    if isinstance(default, (list, dict, set)):
        return dataclasses.field(default_factory=lambda: copy.copy(default))
    return dataclasses.field(default=default)


class LossSchemas(Mapping[str, type]):
    """The schema of an algorithm with each compatible loss, made on access: there are over a hundred of them, and most
    commands need one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses = tuple(loss for loss in find_losses(name) if _compatible(name, loss))

    def __getitem__(self, loss: str) -> type:
        if loss not in self.losses:
            raise KeyError(loss)
        return schema(self.name, loss)

    def __iter__(self) -> Iterator[str]:
        return iter(self.losses)

    def __len__(self) -> int:
        return len(self.losses)


# -- Custom classes --------------------------------------------------------------------------------------------------

DEFAULT_LOSS = "ppo_clip"

_registered: dict[str, type] = {}  # classes that were passed in Python, by name


def is_custom(name: str) -> bool:
    return ":" in name


def load_custom(name: str) -> type:
    """The class of `file.py:Class` or `module:Class`; a registered one is not loaded again."""
    cls = _registered[name] if name in _registered else load_function("algorithm", name)
    return _check_class(cls, name)


def register_class(cls: type) -> str:
    """Register a class that was passed in Python, and return its name."""
    name = import_name(cls)
    _registered[name] = _check_class(cls, name)
    return name


def import_name(value: Any) -> str:
    """file.py:NAME of a function or class; module:NAME if it has no file, as in a notebook."""
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", type(value).__qualname__)
    main = sys.modules.get("__main__")
    if module == "__main__" and not hasattr(main, "__file__"):
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(value)
    except TypeError:
        file = None
    return f"{file}:{name}" if file is not None and Path(file).is_file() else f"{module}:{name}"


def _check_class(cls: Any, name: str) -> type:
    """Raise if the class is not an algorithm, with what is missing."""
    if not inspect.isclass(cls):
        raise InputError(f"algorithm {name} is not a class\n  an algorithm is a dataclass with advantages(samples)")
    if not dataclasses.is_dataclass(cls):
        raise InputError(f"algorithm {name} must be a dataclass\n  fix: @dataclass(frozen=True) above the class")
    has_advantages, has_loss = (callable(getattr(cls, method, None)) for method in ("advantages", "loss"))
    if not has_advantages and not has_loss:
        raise InputError(
            f"algorithm {name} has neither advantages(samples) nor loss(out, batch)\n  see docs/algorithms/README.md"
        )
    if has_loss:
        if missing := [part for part in ("term", "couples", "on_policy_only", "metrics") if not hasattr(cls, part)]:
            raise InputError(
                f"algorithm {name} has a loss, which lacks {', '.join(missing)}\n"
                "  what they mean: covey.protocols.TokenLoss, docs/algorithms/README.md"
            )
        if (couples := vars(cls).get("couples", "nothing")) not in get_args(Couples):
            raise unknown(f"couples of {name}", str(couples), get_args(Couples))
    for item in _fields(cls):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise InputError(f"algorithm {name}: the field {item.name} is a setting and needs a default")
    if has_advantages and not isinstance(getattr(cls, "needs", Needs()), (Needs, property)):
        raise InputError(f"algorithm {name}: needs must be covey.protocols.Needs(...)")
    return cls


def _loss_name(cls: type) -> str | None:
    """The name of the class's own loss in `algorithm.loss`; None if it has none."""
    if not callable(getattr(cls, "loss", None)):
        return None
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def _custom_losses(cls: type) -> dict[str, Loss]:
    others = {name: loss for name, loss in LOSSES.items() if loss.exchangeable}
    own = _loss_name(cls)
    return others if own is None else {own: Loss(cls), **others}


def _custom_entry(cls: type) -> Entry:
    loss = _loss_name(cls) or str(getattr(cls, "usual_loss", DEFAULT_LOSS))
    if loss not in _custom_losses(cls):
        raise unknown(f"usual_loss of {cls.__name__}", loss, _custom_losses(cls))
    summary = (inspect.getdoc(cls) or "").split("\n")[0]
    estimator = cls if callable(getattr(cls, "advantages", None)) else Grpo
    return Entry(estimator, loss, "", "" if summary.startswith(f"{cls.__name__}(") else summary)
