"""Algorithms outside of the package: `algorithm=my_algo.py:MyAlgo`, or the class itself in Python.

A class is an algorithm if it is a dataclass with

    advantages(samples)     an estimator (protocols.Estimator); its loss is `usual_loss` of the class, else ppo_clip
    loss(out, batch)        a loss of each token (protocols.TokenLoss), with `couples`; without `advantages`, GRPO's

or both. Its fields are its settings, `algorithm.FIELD`, next to those that every algorithm has (KL, correction,
shaping, filter).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

from covey.algorithms.catalogue import LOSSES, Entry, Loss
from covey.algorithms.grpo import Grpo
from covey.errors import InputError, unknown
from covey.plugins import load_function
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
        _check_loss(found, name)
    for item in dataclasses.fields(found):
        if item.init and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise InputError(f"algorithm {name}: the field {item.name} is a setting and needs a default")
    if estimates and not isinstance(getattr(found, "needs", Needs()), (Needs, property)):
        raise InputError(f"algorithm {name}: needs must be covey.protocols.Needs(...)")
    return found


def _check_loss(found: type, name: str) -> None:
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
