"""agent=openenv: environments behind a server of the package OpenEnv (openenv-core).

    covey train agent=openenv agent.environment=http://localhost:8000 agent.environment_options='{action: message}'

Every episode has a connection of its own, which the server answers with an environment of its own. A task is a seed,
passed to the environment's reset. The reward is the sum of the rewards of all steps. Options:

    action         the field of the action that the reply becomes; default: the only text field of the server's schema.
                   If there are several fields, a reply is a JSON object with them
    observation    the field of the observation that the model sees; default: its only text field, or all as JSON
    prompt         a system message before the first observation
    reset          further arguments of reset
"""

from __future__ import annotations

import json
from typing import Any

from covey.agents.packages import SEEDS, take_options
from covey.errors import InputError
from covey.imports import require
from covey.protocols import Done
from covey.types import Task

OWN = ("done", "reward", "metadata")  # fields of every observation
SECONDS = 10.0  # to read the server's schema


class OpenEnvAdapter:
    seconds: float | None = None
    in_process = False

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        package = require("openenv.core.generic_client", "openenv", "agent=openenv needs the package openenv-core")
        self.client = package.GenericEnvClient
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise InputError(f"agent.environment={url}: not the address of a server\n  fix: http://HOST:PORT")
        self.url = url.rstrip("/")
        action, self.observation, prompt, reset = take_options(
            "openenv", options, "action", "observation", "prompt", "reset"
        )
        self.messages = () if prompt is None else ({"role": "system", "content": str(prompt)},)
        self.reset_arguments = dict(reset or {})
        self.action = action or self._text_field()

    def _text_field(self) -> str | None:
        """The only text field of the server's actions; None if an action has other fields."""
        import httpx

        address = self.url.replace("ws", "http", 1) if self.url.startswith("ws") else self.url
        try:
            answer = httpx.get(f"{address}/schema", timeout=SECONDS)
            answer.raise_for_status()
            fields = answer.json()["action"]["properties"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"agent.environment={self.url}: the server does not return the schema of its actions ({error})\n"
                "  start it, or name the action's field: agent.environment_options.action=NAME"
            ) from error
        own = {name: field for name, field in fields.items() if name != "metadata"}
        return next(iter(own)) if [field.get("type") for field in own.values()] == ["string"] else None

    def tasks(self, size: int | None) -> tuple[Task, ...]:
        messages = self.messages or ({"role": "user", "content": ""},)  # the server writes the first message later
        return tuple(Task(f"openenv/{seed}", messages, columns={"seed": seed}) for seed in range(size or SEEDS))

    def make(self) -> Connection:
        return Connection(self)

    def show(self, observation: dict[str, Any]) -> str:
        if self.observation is not None:
            if self.observation not in observation:
                names = ", ".join(observation)
                raise ValueError(f"the observation has no field {self.observation}; it has {names or 'none'}")
            return str(observation[self.observation])
        own = {name: value for name, value in observation.items() if name not in OWN}
        texts = [value for value in own.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(own, ensure_ascii=False)


class Connection:
    """One episode."""

    def __init__(self, adapter: OpenEnvAdapter) -> None:
        self.adapter = adapter
        self.client = adapter.client(base_url=adapter.url)
        self.total, self.steps = 0.0, 0

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        result = await self.client.reset(seed=task.columns["seed"], **self.adapter.reset_arguments)
        return [*self.adapter.messages, {"role": "user", "content": self.adapter.show(result.observation)}]

    async def step(self, reply: str) -> str | Done:
        action: Any = {self.adapter.action: reply}
        if self.adapter.action is None:
            try:
                action = json.loads(reply)
            except ValueError as error:
                return f"This reply is not a JSON object ({error})."
            if not isinstance(action, dict):
                return "This reply is not a JSON object."
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return f"This action is not valid: {error}"
        self.total += float(result.reward or 0.0)
        self.steps += 1
        shown = self.adapter.show(result.observation)
        return self._done(({"role": "user", "content": shown},)) if result.done else shown

    def end(self, reason: str) -> Done:
        return self._done()

    def _done(self, messages: Any = ()) -> Done:
        return Done({"reward": self.total, "steps": float(self.steps)}, messages)

    async def close(self) -> None:
        await self.client.close()
