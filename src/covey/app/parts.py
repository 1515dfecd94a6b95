"""Wiring of the gateway: agent=gateway in a run, and what covey serve shares with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from covey.agents import Toolbox, make_agent, tool_names
from covey.agents.formats import Format
from covey.agents.resolve import as_agent
from covey.agents.tools import ToolSet, resolve_tools
from covey.agents.verifiers import VerifiersAgent, load_verifiers
from covey.config.schema import Config
from covey.errors import InputError
from covey.gateway import EpisodeRules, GatewayAgent
from covey.gateway.agent import require_program
from covey.gateway.server import bind, require_packages
from covey.protocols import Agent
from covey.rewards import RewardSet, resolve_rewards
from covey.sandbox import Sandbox
from covey.tasks import TaskSet, load_tasks
from covey.types import Sampling
from covey.workers import WorkerPool

if TYPE_CHECKING:
    from covey.models.loading import ModelSource


def make_gateway(config: Config, source: ModelSource | None) -> GatewayAgent:
    """The agent, with the tool-call format of the model where that is here."""
    rollout = config.rollout
    rules = EpisodeRules(
        model=config.model.name,
        sampling=Sampling(temperature=rollout.temperature, top_p=rollout.top_p),
        max_turns=config.agent.max_turns,
    )
    return GatewayAgent(
        rules if source is None else replace(rules, format=tool_format(config, source)),
        port=config.gateway.port,
        patience=config.agent.max_seconds,
        command=config.agent.command,
        programs=config.gateway.max_programs,
    )


def hide_columns(agent: Agent, rewards: RewardSet) -> None:
    """Programs do not see what the rewards ask for."""
    if isinstance(agent, GatewayAgent):
        agent.rules = replace(agent.rules, hidden=rewards.columns)


def check_gateway(config: Config) -> None:
    """Its packages and its program are here, and its port is free."""
    require_packages()
    if config.agent.command is not None:
        require_program(config.agent.command)
    bind(config.gateway.port).close()


def tool_format(config: Config, source: ModelSource) -> Format:
    """How this model writes tool calls."""
    from covey.agents.formats import choose_format

    return choose_format(config.agent.format, source.tokenizer, source.config.model_type)


def services(agent: Agent) -> tuple[AbstractAsyncContextManager[Any], ...]:
    """What must be open while an agent works."""
    return (agent,) if isinstance(agent, GatewayAgent) else ()


# -- The parts of a run that play and score its episodes: tools, the sandbox, the agent, the rewards, and the processe--
# which users' functions run.

RUNS_CODE = {"python_executor", "code_interpreter"}
Sandboxes = Callable[[], Sandbox]


@runtime_checkable
class UsesWorkers(Protocol):
    """An agent with functions of the user's: tools, an environment."""

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]: ...

    def in_workers(self, pool: Any) -> Agent: ...


def sandbox_of(config: Config) -> Sandboxes:
    """Where code of the model's runs, chosen when the first tool or reward asks for it."""
    return cache(lambda: Sandbox.of(config.sandbox))


def make_toolbox(config: Config, sandbox: Sandboxes, given: Sequence[Any] = ()) -> Toolbox:
    """The tools of the settings, or those given in Python."""
    agent = config.agent
    names = list(given) or tool_names(agent)
    walls = sandbox() if any(name in RUNS_CODE for name in names if isinstance(name, str)) else None
    tools = resolve_tools(names, agent.tool_options, sandbox=walls, seconds=agent.tool_seconds)
    return Toolbox(tools, max_tokens=agent.max_tool_tokens, seconds=agent.tool_seconds)


def find_tasks(config: Config, world: VerifiersAgent | None) -> TaskSet:
    """Those of the files, generated ones, or those of an environment that brings its own."""
    if world is None:
        return load_tasks(config.data, config.seed)
    held_out = config.data.val_size or 0
    size = None if config.data.train_size is None else config.data.train_size + held_out
    tasks = world.tasks(size)
    if len(tasks) <= held_out:
        raise InputError(f"the environment has {len(tasks)} tasks, and data.val_size={held_out} of them are held out")
    name = config.agent.environment
    train = tasks[: len(tasks) - held_out]
    about = f"{name}: {len(train)} training tasks, {held_out} validation tasks"
    return TaskSet(train, tasks[len(train) :], reward=None, description=about)


def find_world(config: Config) -> VerifiersAgent | None:
    """An environment of the verifiers package, where that is the agent."""
    return load_verifiers(config.agent) if config.agent.name == "verifiers" else None


def find_agent(
    config: Config,
    toolbox: Toolbox | None,
    source: ModelSource | None,
    world: VerifiersAgent | None,
    given: Any = None,
) -> Agent:
    """The agent of the settings, or the one given in Python."""
    if given is not None:
        if config.agent.tools:
            raise InputError("tools= are for the built-in agents\n  fix: let your own agent call them, or agent='hf'")
        return as_agent(config.agent.name, given, config.agent)
    if config.agent.name == "gateway":
        return make_gateway(config, source)
    if world is not None:
        return world if source is None else replace(world, format=tool_format(config, source))
    toolbox = toolbox or Toolbox(ToolSet(()))  # tools that are not on this machine
    if source is None:
        return make_agent(config.agent, toolbox)
    return make_agent(config.agent, toolbox, source.tokenizer, source.config.model_type)


def find_rewards(config: Config, given: Any, task_reward: str | None, sandbox: Sandboxes) -> RewardSet:
    """The rewards of the settings, or those given in Python."""
    wanted = config.reward
    return resolve_rewards(
        given or wanted.name, task_reward, wanted.weights, wanted.only_if, wanted.options, sandbox=sandbox
    )


def open_workers(agent: Agent, rewards: RewardSet, resources: ExitStack) -> WorkerPool | None:
    """Processes for functions of the user's. To be opened before weights are loaded and before the run's folder is
    locked: its template is a fork of this process as it is then."""
    functions = {**rewards.worker_functions(), **(agent.functions if isinstance(agent, UsesWorkers) else {})}
    if not functions:
        return None
    pool = WorkerPool(functions)
    resources.callback(pool.close)
    return pool


def with_workers(agent: Agent, pool: WorkerPool | None) -> Agent:
    return agent.in_workers(pool) if pool is not None and isinstance(agent, UsesWorkers) else agent


def open_rewards(config: Config, rewards: RewardSet, workers: WorkerPool | None, resources: ExitStack) -> RewardSet:
    """The rewards with where they run; those that are models are loaded."""
    from covey.models.loading import pick_device

    seconds = config.reward.seconds
    opened = rewards.in_workers(workers, seconds)
    resources.callback(opened.close)
    opened.open(seconds=seconds, device=str(pick_device(config.model.device)))
    return opened
