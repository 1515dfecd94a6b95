"""The algorithms of the catalogue as classes, for Python: `covey.Gvpo(beta=0.01)`, `covey.DrGrpo(clip_high=0.3)`.

A class has the settings of its algorithm with its usual loss as fields. The classes are made from the catalogue;
`named.pyi` beside this file tells editors and type checkers of them (`python -m covey.algorithms.named` prints it).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from covey.algorithms.assemble import schema, settings
from covey.algorithms.catalogue import ALGORITHMS
from covey.ranges import type_text


class Named:
    """Settings of an algorithm. Only those that differ from the defaults are passed on."""

    algorithm: ClassVar[str]

    def changed(self) -> dict[str, Any]:
        usual = settings(self.algorithm)
        return {key: value for key, (_, default) in usual.items() if (value := getattr(self, key)) != default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.changed().items())})"


def class_name(algorithm: str) -> str:
    return algorithm.title().replace("_", "")


def _make(algorithm: str) -> type:
    fields: list[Any] = []
    for item in dataclasses.fields(schema(algorithm)):
        if item.name != "name":
            kept = dataclasses.field(default=item.default, default_factory=item.default_factory)
            fields.append((item.name, item.type, kept))
    about = {"algorithm": algorithm, "__doc__": f"{ALGORITHMS[algorithm].summary}.", "__module__": __name__}
    return dataclasses.make_dataclass(
        class_name(algorithm), fields, bases=(Named,), namespace=about, frozen=True, kw_only=True, repr=False
    )


_CLASSES: dict[str, type] = {class_name(algorithm): _make(algorithm) for algorithm in ALGORITHMS}
globals().update(_CLASSES)


def stub() -> str:
    """The text of named.pyi."""
    lines = [
        '"""Made by `python -m covey.algorithms.named`: what named.py makes from the catalogue."""',
        "",
        "from dataclasses import dataclass",
        "from typing import Any, ClassVar",
        "",
        "class Named:",
        "    algorithm: ClassVar[str]",
        "    def changed(self) -> dict[str, Any]: ...",
    ]
    for name, cls in _CLASSES.items():
        usual = settings(vars(cls)["algorithm"])
        lines += ["", "@dataclass(frozen=True, kw_only=True)", f"class {name}(Named):"]
        lines += [f"    {key}: {type_text(kind)} = ..." for key, (kind, _) in usual.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(stub(), end="")
