"""agent=gymnasium: environments of the package Gymnasium whose actions have names or are text.

    covey train agent=gymnasium agent.environment=FrozenLake-v1 agent.environment_options='{is_slippery: false}'

A task is a seed. The model sees what the environment renders as text (`render_mode: ansi`), or else its observation,
and replies with an action: the last action name in the reply, or for `Text` actions the reply itself. The reward is the
sum of the environment's rewards. Options besides those of the environment itself:

    actions        the names of the actions of a Discrete space, in order
    observation    a text with the observation's items in braces: "sum {0}, dealer {1}"
    prompt         the text before the first observation
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from covey.agents.packages import SEEDS
from covey.errors import InputError
from covey.imports import no_exit, require
from covey.protocols import Done
from covey.types import Task

ACTIONS = {  # of Gymnasium's own environments, by the name without the version
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
OBSERVATIONS = {"Blackjack": "Your sum: {0}. The dealer shows: {1}. Usable ace: {2}."}
COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumAdapter:
    seconds: float | None = None
    in_process = False

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.gymnasium = require("gymnasium", "gymnasium", "agent=gymnasium needs the package gymnasium")
        self.name = name
        family = name.rpartition("/")[2].rpartition("-v")[0]
        self.observation = options.pop("observation", OBSERVATIONS.get(family))
        self.prompt = options.pop("prompt", None)
        names = options.pop("actions", ACTIONS.get(family))
        self.options = options
        with no_exit(f"environment {name}"):
            self.rendered = self._renders_text()
            if self.rendered:
                self.options["render_mode"] = "ansi"
            environment = self._open()
        self.actions = self._check_actions(environment.action_space, names)
        environment.close()

    def tasks(self, size: int | None) -> tuple[Task, ...]:
        """One task per seed, with the first observation of that seed."""
        game = Game(self)
        prompts = [game.start(seed) for seed in range(size or SEEDS)]
        game.close()
        return tuple(
            Task(f"{self.name}/{seed}", ({"role": "user", "content": prompt},), columns={"seed": seed})
            for seed, prompt in enumerate(prompts)
        )

    def make(self) -> Game:
        return Game(self)

    def _renders_text(self) -> bool:
        try:
            made = self.gymnasium.spec(self.name).entry_point
            made = self.gymnasium.envs.registration.load_env_creator(made) if isinstance(made, str) else made
        except (self.gymnasium.error.Error, ImportError, AttributeError) as error:
            raise InputError(f"agent.environment={self.name}: {error}") from error
        return "ansi" in getattr(made, "metadata", {}).get("render_modes", ())

    def _open(self) -> Any:
        try:
            return self.gymnasium.make(self.name, **self.options)
        except (self.gymnasium.error.Error, ImportError, TypeError, AssertionError) as error:
            raise InputError(f"agent.environment={self.name}: {error}") from error

    def _check_actions(self, space: Any, names: Sequence[str] | None) -> tuple[str, ...]:
        """The names of a Discrete space's actions, () for text."""
        spaces = self.gymnasium.spaces
        if isinstance(space, spaces.Text):
            return ()
        if not isinstance(space, spaces.Discrete):
            raise InputError(
                f"agent.environment={self.name} has actions of {type(space).__name__}: only Discrete and Text actions "
                "can be played in words"
            )
        names = [str(space.start + n) for n in range(space.n)] if names is None else [str(name) for name in names]
        if len(names) != space.n or len({name.lower() for name in names}) != space.n:
            raise InputError(
                f"agent.environment_options.actions has {len(names)} names, and {self.name} has {space.n} actions\n"
                "  give each action a name of its own, in order"
            )
        return tuple(names)

    def question(self) -> str:
        if self.prompt is not None:
            return str(self.prompt)
        if not self.actions:
            return f"You are in the environment {self.name}. Reply with your next action."
        return f"You are in the environment {self.name}. Reply with one of these actions: {', '.join(self.actions)}."

    def show(self, environment: Any, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self.observation is not None:
            items = observation if isinstance(observation, (tuple, list)) else (observation,)
            return self._fill(items)
        if self.rendered:
            return plain_text(str(environment.render()))
        return f"Observation: {observation}"

    def _fill(self, items: Sequence[Any]) -> str:
        try:
            return str(self.observation).format(*items)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            last = f"to {{{len(items) - 1}}}" if len(items) > 1 else "alone"
            raise InputError(
                f"agent.environment_options.observation={self.observation!r} cannot be filled in "
                f"({type(error).__name__}: {error})\n"
                f"  an observation of {self.name} has the items {{0}} {last}; write {{{{ for a brace itself"
            ) from error

    def action(self, space: Any, reply: str) -> Any:
        """The action that a reply names, the last if there are several; None if there is none."""
        if not self.actions:
            text = reply.strip()
            return text if space.contains(text) else None
        pattern = "|".join(sorted(map(re.escape, self.actions), key=len, reverse=True))
        found = re.findall(rf"(?<!\w)({pattern})(?!\w)", reply, re.IGNORECASE)
        if not found:
            return None
        lower = [name.lower() for name in self.actions]
        return space.start + lower.index(found[-1].lower())


class Game:
    """One episode. A reply without a valid action costs a turn and changes nothing."""

    def __init__(self, adapter: GymnasiumAdapter) -> None:
        self.adapter = adapter
        self.environment = adapter._open()
        self.total, self.steps, self.invalid = 0.0, 0, 0

    def start(self, seed: int) -> str:
        observation, _ = self.environment.reset(seed=seed)
        return f"{self.adapter.question()}\n\n{self.adapter.show(self.environment, observation)}"

    def reset(self, task: Task) -> None:
        """The task has the first observation already."""
        self.start(task.columns["seed"])

    def step(self, reply: str) -> str | Done:
        action = self.adapter.action(self.environment.action_space, reply)
        if action is None:
            self.invalid += 1
            actions = f"one of {', '.join(self.adapter.actions)}" if self.adapter.actions else "a valid text"
            return f"No action was found in this reply: {actions} is needed."
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        self.total += float(reward)
        self.steps += 1
        shown = self.adapter.show(self.environment, observation)
        return self._done(({"role": "user", "content": shown},)) if terminated or truncated else shown

    def end(self, reason: str) -> Done:
        return self._done()

    def _done(self, messages: Any = ()) -> Done:
        table = {"reward": self.total, "steps": float(self.steps), "invalid": float(self.invalid)}
        return Done(table, messages)

    def close(self) -> None:
        self.environment.close()


def plain_text(rendered: str) -> str:
    """Terminal colours as brackets: a background as [x], bold text as (x), any other colour as <x>."""

    def mark(match: re.Match[str]) -> str:
        codes, text = match[1].split(";"), match[2]
        if any(code.startswith("4") and len(code) == 2 for code in codes):
            return f"[{text}]"
        return f"({text})" if "1" in codes else f"<{text}>"

    return COLOURED.sub(mark, rendered).strip("\n")
