"""Makes the parts that play and score episodes: tasks, tools, sandbox, agent, rewards, gateway and worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from covey.agents.resolve import as_agent, make_agent, tool_names
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.agents.turns import ChatAgent, Toolbox
from covey.config.schema import OWN_TASKS, Config, DataConfig
from covey.errors import InputError
from covey.protocols import Agent
from covey.rewards import RewardSet, resolve_rewards
from covey.tasks import TaskSet, load_tasks
from covey.types import Sampling
from covey.workers import WorkerPool

if TYPE_CHECKING:  # imported when they are used
    from covey.agents.packages import PackageAgent
    from covey.agents.verifiers import VerifiersAgent
    from covey.gateway.agent import GatewayAgent
    from covey.models.loading import ModelSource
    from covey.sandbox import Sandbox
    from covey.tool_calls import Format

    SandboxFactory = Callable[[], Sandbox]
    EnvironmentOfPackage = VerifiersAgent | PackageAgent


RUNS_CODE = {"python_executor", "code_interpreter"}


# -- The gateway -------------------------------------------------------------------------------------------------------


def make_gateway(config: Config, source: ModelSource | None) -> GatewayAgent:
    """The gateway agent. Without the model, its tool-call format is not set."""
    from covey.gateway.agent import GatewayAgent
    from covey.gateway.registry import EpisodeRules

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


def hide_reward_columns(agent: Agent, rewards: RewardSet) -> None:
    """Hide columns that rewards use from the gateway's programs."""
    if isinstance(agent, HidesColumns):
        agent.hide_columns(rewards.columns)


def check_gateway(config: Config) -> None:
    """Check that its packages and its program are installed and its port is free."""
    from covey.gateway.agent import require_program
    from covey.gateway.server import bind, require_packages

    require_packages()
    if config.agent.command is not None:
        require_program(config.agent.command)
    bind(config.gateway.port).close()


def check_browser(config: Config, tasks: TaskSet) -> None:
    """Check the pages of agent=gui, and that the browser for them is installed."""
    if config.agent.name == "gui":
        from covey.agents.gui.agent import page_task, require_browser

        pages = [page_task(task) for task in (*tasks.train, *tasks.validation)]
        if any(page is not None for page in pages):
            require_browser(config.agent.chromium)
    elif config.agent.name == "chat" and config.data.name == "gui_pages" and config.data.train_files is None:
        raise InputError("data=gui_pages are web pages, and agent=chat sees none\n  fix: agent=gui")


def tool_format(config: Config, source: ModelSource) -> Format:
    """The tool-call format of this model."""
    from covey.agents.formats.detect import choose_format

    return choose_format(config.agent.format, source.tokenizer, source.config.model_type)


def service_of(agent: Agent) -> AbstractAsyncContextManager[Any]:
    """What must be open while the agent plays: the gateway runs a server."""
    return agent if isinstance(agent, AbstractAsyncContextManager) else nullcontext()


@runtime_checkable
class HidesColumns(Protocol):
    """An agent that shows tasks to programs, without the columns that rewards use."""

    def hide_columns(self, columns: frozenset[str]) -> None: ...


@runtime_checkable
class Announces(Protocol):
    """An agent with messages for the user, such as its address or the client that it waits for."""

    def announce_to(self, report: Callable[[str], None]) -> None: ...


# -- Tasks, tools, agents and rewards ----------------------------------------------------------------------------------


@runtime_checkable
class UsesWorkers(Protocol):
    """An agent that calls functions of the user: tools, an environment."""

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]: ...

    def in_workers(self, pool: Any) -> Agent: ...


def lazy_sandbox(config: Config) -> SandboxFactory:
    """The sandbox for code written by the model, created when the first tool or reward needs it."""

    @cache
    def sandbox() -> Sandbox:
        from covey.sandbox import Sandbox

        return Sandbox.of(config.sandbox)

    return sandbox


def make_toolbox(config: Config, sandbox: SandboxFactory, objects: Sequence[Any] = ()) -> Toolbox:
    """The tools passed in Python, or those of the settings."""
    agent = config.agent
    names = list(objects) or tool_names(agent)
    code_sandbox = sandbox() if any(name in RUNS_CODE for name in names if isinstance(name, str)) else None
    tools = resolve_tools(names, agent.tool_options, sandbox=code_sandbox, seconds=agent.tool_seconds)
    return Toolbox(tools, max_tokens=agent.max_tool_tokens, seconds=agent.tool_seconds)


def find_tasks(config: Config, environment: EnvironmentOfPackage | None) -> TaskSet:
    """Tasks from files, a generator, or an environment of another package."""
    if environment is None:
        return load_tasks(config.data, config.seed)
    held_out = config.data.val_size or 0
    size = None if config.data.train_size is None else config.data.train_size + held_out
    tasks = environment.tasks(size)
    if len(tasks) <= held_out:
        raise InputError(f"the environment has {len(tasks)} tasks, and data.val_size={held_out} of them are held out")
    name = config.agent.environment
    train = tasks[: len(tasks) - held_out]
    about = f"{name}: {len(train)} training tasks, {held_out} validation tasks"
    return TaskSet(train, tasks[len(train) :], reward=None, description=about, warnings=_unused_data(config))


def _unused_data(config: Config) -> tuple[str, ...]:
    """Warnings about settings of tasks, where an environment has its own."""
    usual = DataConfig()
    names = ("name", "options", "train_files", "val_files", "system_prompt")
    given = [name for name in names if getattr(config.data, name) != getattr(usual, name)]
    return tuple(
        f"data.{name} has no effect: the environment of agent={config.agent.name} has tasks of its own"
        for name in given
    )


def find_environment(config: Config) -> EnvironmentOfPackage | None:
    """The environment of agent=verifiers, gymnasium, openenv or harbor."""
    if config.agent.name not in OWN_TASKS:
        return None
    if config.agent.name == "verifiers":
        from covey.agents.verifiers import load_verifiers

        return load_verifiers(config.agent)
    from covey.agents.packages import load_package

    return load_package(config)


def is_environment_missing(config: Config, environment: EnvironmentOfPackage | None) -> bool:
    """Whether the environment of the settings could not be loaded on this machine."""
    return config.agent.name in OWN_TASKS and environment is None


def find_agent(
    config: Config,
    toolbox: Toolbox | None,
    source: ModelSource | None,
    environment: EnvironmentOfPackage | None,
    custom: Any = None,
) -> Agent:
    """The agent passed in Python, or that of the settings; a chat agent in place of an environment that is missing."""
    if custom is not None:
        if config.agent.tools:
            raise InputError("tools= are for the built-in agents\n  fix: let your own agent call them, or agent='hf'")
        return as_agent(config.agent.name, custom, config.agent)
    if config.agent.name == "gateway":
        return make_gateway(config, source)
    if is_environment_missing(config, environment):
        return ChatAgent()
    if environment is not None:
        from covey.agents.verifiers import VerifiersAgent

        if source is None or not isinstance(environment, VerifiersAgent):
            return environment
        return replace(environment, format=tool_format(config, source))
    toolbox = toolbox or Toolbox(ToolSet(()))  # the tools are not on this machine
    if source is None:
        return make_agent(config.agent, toolbox)
    if config.agent.name == "gui" and source.vision is None:
        raise InputError(
            f"agent=gui looks at screenshots, but {source.name} reads text only\n  use a vision-language model"
        )
    return make_agent(config.agent, toolbox, source.tokenizer, source.config.model_type, source.vision)


def find_rewards(config: Config, custom: Any, task_reward: str | None, sandbox: SandboxFactory) -> RewardSet:
    """The rewards passed in Python, or those of the settings."""
    r = config.reward
    return resolve_rewards(custom or r.name, task_reward, r.weights, r.only_if, r.options, sandbox=sandbox)


def open_workers(agent: Agent, rewards: RewardSet, resources: ExitStack) -> WorkerPool | None:
    """Processes for the user's functions. Open them before weights are loaded and the run's folder is locked: they are
    forks of this process."""
    functions = {**rewards.worker_functions(), **(agent.functions if isinstance(agent, UsesWorkers) else {})}
    if not functions:
        return None
    pool = WorkerPool(functions)
    resources.callback(pool.close)
    return pool


def with_workers(agent: Agent, pool: WorkerPool | None) -> Agent:
    return agent.in_workers(pool) if pool is not None and isinstance(agent, UsesWorkers) else agent


def open_rewards(config: Config, rewards: RewardSet, workers: WorkerPool | None, resources: ExitStack) -> RewardSet:
    """The rewards connected to their worker processes; reward models are loaded."""
    from covey.models.loading import pick_device

    seconds = config.reward.seconds
    opened = rewards.in_workers(workers, seconds)
    resources.callback(opened.close)
    opened.open(seconds=seconds, device=str(pick_device(config.model.device)))
    return opened
