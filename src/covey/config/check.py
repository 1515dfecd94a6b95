"""Values that are out of range or of the wrong type: all of them in one error, each under the name that the user typed.

The ranges themselves are stated beside the settings (`schema.py`, the parts in `covey.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from covey.config.read import Given, literal
from covey.config.schema import EPISODES_PER_STEP
from covey.config.settings import Setting, find
from covey.errors import InputError
from covey.ranges import Allowed, refusal

_BATCH, _GROUP = "data.train_batch_size", "rollout.group_size"


class WrongValues(InputError):
    """Values out of range or of the wrong type, each with its own text."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Checker:
    """`given` is what the user wrote, by native key; `parts` are the foreign settings that some native values were
    computed from (`derive.py`)."""

    settings: Mapping[str, Setting]
    given: Mapping[str, Given]
    parts: Mapping[str, Given]

    def wrong_type(self, key: str, given: Given) -> str:
        setting = find(key, self.settings)
        assert setting is not None
        if setting.allowed is None:
            value = f"{given.value!r:.200}"
            return f"{given.place}{given.key} must be {setting.type}, got {value}{_native(key, given)}"
        what = setting.allowed if key == setting.key else setting.allowed.entry
        return self._refusal(key, given, given.value, setting, what)

    def out_of_range(self, plain: Mapping[str, Any]) -> list[str]:
        """Errors about the values of a whole configuration."""
        wrong = [text for setting in self.settings.values() for text in self._out_of_range(setting, plain)]
        return wrong or list(self._too_many_episodes(plain))

    def _out_of_range(self, setting: Setting, plain: Mapping[str, Any]) -> Iterator[str]:
        what, key, value = setting.allowed, setting.key, _at(plain, setting.key)
        if what is None or value in what:
            return
        if not isinstance(value, Mapping):
            yield self._refusal(key, self.given.get(key), value, setting, what)
            return
        for name, item in value.items():
            if item not in what.entry:
                inner = f"{key}.{name}"
                yield self._refusal(inner, self.given.get(inner), item, setting, what.entry)

    def _refusal(self, key: str, given: Given | None, value: Any, setting: Setting, what: Allowed) -> str:
        name, note = key, ""
        if given is not None:
            typed = self._typed(given)
            if literal(typed.value) == literal(given.value):
                name, note = f"{given.place}{given.key}", _native(key, given)
            else:  # the value was computed from what the user typed
                name = f"{typed.place}{typed.key}={literal(typed.value)}: {key}"
        fix = f"the default is {literal(setting.default)}; more: covey config explain {setting.key}"
        return f"{refusal(name, value, what, note)}\n  {fix}"

    def _typed(self, given: Given) -> Given:
        """What the user typed where `given` was derived from it."""
        return next((part for part in self.parts.values() if part.key == given.key), given)

    def _too_many_episodes(self, plain: Mapping[str, Any]) -> Iterator[str]:
        tasks, attempts = _at(plain, _BATCH), _at(plain, _GROUP)
        if tasks * attempts > EPISODES_PER_STEP:
            names = [self._name(_BATCH, tasks), self._name(_GROUP, attempts)]
            made = f"make {tasks * attempts:,} episodes in one step, and {EPISODES_PER_STEP:,} are the most"
            yield f"{' and '.join(names)} {made}\n  lower one of them"

    def _name(self, key: str, value: Any) -> str:
        given = self.given.get(key)
        return str(self._typed(given)) if given is not None else f"{key}={literal(value)}"


def _native(key: str, given: Given) -> str:
    """The native name behind a foreign one. A section's own name stands for its `name`."""
    return "" if given.key in (key, key.removesuffix(".name")) else f"  (= {key})"


def _at(plain: Mapping[str, Any], key: str) -> Any:
    found: Any = plain
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
