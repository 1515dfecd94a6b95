"""Environments of other packages: agent=gymnasium | openenv | harbor, with `agent.environment` and its options.

An adapter is made from the name and the options of the environment:

    tasks(size)     the tasks to train on; None: all, or a default number of seeds
    make()          an environment with reset and step for one episode (`covey.agents.environment`)
    seconds         the longest call of reset or step; None: agent.tool_seconds
    in_process      True if it may run in this process, because it never blocks the event loop

`PackageAgent` plays its episodes like those of an environment of the user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from covey.agents.environment import EnvironmentAgent
from covey.config.schema import AgentConfig, Config
from covey.errors import InputError
from covey.types import Task
from covey.workers import WorkerPool

SEEDS = 1000  # tasks of an environment that makes one from any seed, if data.train_size is not given


class Adapter(Protocol):
    seconds: float | None
    in_process: bool

    def tasks(self, size: int | None) -> tuple[Task, ...]: ...

    def make(self) -> Any: ...


@dataclass(frozen=True)
class PackageAgent(EnvironmentAgent):
    """Plays the environments that an adapter makes, on the adapter's tasks."""

    adapter: Adapter | None = None

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {} if self.adapter is not None and self.adapter.in_process else super().functions

    def in_workers(self, pool: WorkerPool) -> EnvironmentAgent:
        return self if self.adapter is not None and self.adapter.in_process else super().in_workers(pool)

    def tasks(self, size: int | None = None) -> tuple[Task, ...]:
        assert self.adapter is not None
        return self.adapter.tasks(size)


def load_package(config: Config) -> PackageAgent:
    """The agent of agent=gymnasium, openenv or harbor."""
    adapter = _adapter(config)
    seconds = adapter.seconds or config.agent.tool_seconds
    return PackageAgent(adapter.make, config.agent.max_turns, seconds, adapter=adapter)


def _adapter(config: Config) -> Adapter:
    agent = config.agent
    name, options = agent.environment, dict(agent.environment_options)
    if not name:
        raise InputError(f"agent={agent.name} needs an environment\n  fix: {_example(agent)}")
    match agent.name:
        case "gymnasium":
            from covey.agents.packages.gymnasium import GymnasiumAdapter

            return GymnasiumAdapter(name, options)
        case "openenv":
            from covey.agents.packages.openenv import OpenEnvAdapter

            return OpenEnvAdapter(name, options)
        case _:
            from covey.agents.packages.harbor import HarborAdapter

            return HarborAdapter(name, options, config.sandbox, agent.tool_seconds)


def _example(agent: AgentConfig) -> str:
    examples = {
        "gymnasium": "agent.environment=FrozenLake-v1",
        "openenv": "agent.environment=http://localhost:8000",
        "harbor": "agent.environment=FOLDER, with a folder for each task",
    }
    return examples[agent.name]


def take_options(package: str, options: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """The values of these options, None for those not given. Any other option is refused."""
    values = tuple(options.pop(name, None) for name in names)
    if options:
        raise InputError(
            f"unknown option of agent={package}  {', '.join(map(str, options))}\n"
            f"  agent.environment_options of {package}: {', '.join(names)}"
        )
    return values
