"""agent=verifiers: environments of the package `verifiers`, with sampling by Covey's engine.

    covey train agent=verifiers agent.environment=gsm8k-v1
    covey train agent=verifiers agent.environment=my_env.py:make

`agent.environment` is the id of an installed environment, or `file.py:name`: an `Env`, an `EnvConfig`, or a function
that returns one. `agent.environment_options` is the package's `env` block (`taskset`, roles, limits). The run trains on
the environment's tasks. The environment's reward is the built-in reward `given`; each of its rewards and metrics is
reported as well.

A role without its own harness is played by a chat loop in this process. The package's default would let the model run
commands on this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from covey.agents.environment import EnvironmentFailed, without_task
from covey.config.schema import AgentConfig
from covey.errors import InputError, describe_error, traceback_location, with_location
from covey.imports import load_function, no_exit, require
from covey.protocols import Policy
from covey.types import Episode, Messages, RewardTable, StopReason, Task

if TYPE_CHECKING:
    from covey.tool_calls import Format

HARNESS = "covey_chat"  # the module name under which the package finds our chat loop
REPLACED = ("bash", "null")  # harnesses of the package that the chat loop replaces


def require_verifiers() -> Any:
    v1 = require("verifiers.v1", "verifiers", "agent=verifiers needs the package verifiers")
    from covey.agents import verifiers_runtime

    sys.modules.setdefault(HARNESS, verifiers_runtime)  # the package imports harnesses by module name
    verifiers_runtime.install()
    return v1


def load_verifiers(config: AgentConfig) -> VerifiersAgent:
    if not config.environment:
        raise InputError("agent=verifiers needs an environment\n  fix: agent.environment=NAME, or file.py:function")
    return VerifiersAgent(load_environment(config.environment, config.environment_options, config.max_turns))


def load_environment(name: str, options: Mapping[str, Any], max_turns: int) -> Any:
    """The `Env` with this name."""
    vf = require_verifiers()
    if ":" in name:
        value = load_function("environment", name)
        with no_exit(f"environment {name}"):
            value = value if isinstance(value, (vf.Env, vf.EnvConfig)) else value(**options)
        if isinstance(value, vf.Env):
            return value
        if not isinstance(value, vf.EnvConfig):
            raise InputError(f"environment {name}: neither an Env nor an EnvConfig, but {type(value).__name__}")
        return vf.load_environment(_with_defaults(vf, value, max_turns))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that modules in the working folder are found
    block = dict(options)
    block["taskset"] = {**block.get("taskset", {}), "id": name}
    try:
        return vf.load_environment(_with_defaults(vf, vf.resolve_env_config(block), max_turns))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"environment {name}: {error}") from error


def _with_defaults(vf: Any, config: Any, max_turns: int) -> Any:
    """The configuration with our chat loop for roles without a program, and a limit for roles without max_turns."""
    from verifiers.v1.configs.agent import agent_config_fields

    default = vf.default_harness_id(config.taskset.id)
    roles = {}
    for role, spec in agent_config_fields(config).items():
        harness = spec.harness.id if spec.harness is not None else default
        changes: dict[str, Any] = {} if spec.max_turns else {"max_turns": max_turns}
        if harness in REPLACED:
            changes["harness"] = vf.HarnessConfig(id=HARNESS)
            if "runtime" not in spec.model_fields_set:
                changes["runtime"] = vf.SubprocessConfig()  # just a folder: the chat loop needs no container
        roles[role] = spec.model_copy(update=changes)
    return config.model_copy(update=roles)


@dataclass(frozen=True)
class VerifiersAgent:
    """Runs the environment's own episodes, with the policy as their model."""

    environment: Any
    format: Format | None = None  # the tool-call format, if the environment has tools
    _server: EnvironmentServer = field(default_factory=lambda: EnvironmentServer(), repr=False)
    _tasks: dict[str, Any] = field(default_factory=dict, repr=False)  # the package's tasks by the id of the Covey task

    reward: ClassVar[str] = "given"

    def tasks(self, size: int | None = None) -> tuple[Task, ...]:
        """The tasks of the taskset, or the first `size` of them."""
        taskset = self.environment.taskset
        if size is None and not taskset.bounded:
            raise InputError("this environment has an endless taskset\n  fix: data.train_size=N")
        tasks = []
        for task in itertools.islice(taskset, size):
            tasks.append(_convert_task(self.environment.config.env_id, task))
            self._tasks[tasks[-1].id] = task
        return tuple(tasks)

    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        from covey.agents.verifiers_runtime import MODEL, PolicyClient

        vf = require_verifiers()
        if task.id not in self._tasks:
            raise InputError(f"task {task.id} is not of this environment: agent=verifiers brings its own tasks")
        client = PolicyClient(policy, self.format)
        clients = await self._server.clients(self.environment)
        # The package looks up a client by its configuration: this one is unique to the episode.
        client_config = vf.TrainClientConfig(base_url=f"http://policy.invalid/{uuid.uuid4().hex}", api_key_var="NONE")
        key = client_config.model_dump_json()
        clients[key] = client
        try:
            context = vf.ModelContext(model=MODEL, client=client_config, sampling=vf.SamplingConfig())
            result = await self.environment.run_episode(self._tasks[task.id], context, on_trace=client.watch)
        finally:
            del clients[key]
        if client.fatal_error is not None:
            raise client.fatal_error
        return self._to_episode(policy, task, client, result)

    def _to_episode(self, policy: Policy, task: Task, client: Any, result: Any) -> Episode:
        if not result.ok:
            errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
            text = _error_text(errors[0]) if errors else "it did not complete"
            timed_out = result.is_timeout or any(trace.is_timeout for trace in result.traces)
            raise EnvironmentFailed("environment_timeout" if timed_out else "environment", text)
        trained = [trace for trace in result.traces if trace.agent.trainable]
        conversation = client.conversations.get(trained[-1].id, []) if trained else []
        stop = policy.turns[-1].stop if policy.turns else None
        if any(trace.stop_condition == "max_turns" for trace in trained):
            stop = StopReason.TURNS
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *without_task(conversation, task.messages)),
            stop=StopReason.LENGTH if client.no_room else stop,
            given=_rewards(trained),
        )

    def announce_to(self, report: Callable[[str], None]) -> None:
        """Set the function that reports waiting for a tool server."""
        from covey.agents import verifiers_runtime

        verifiers_runtime.HostRuntime.report = staticmethod(report)

    async def aclose(self) -> None:
        await self._server.close()


def _error_text(error: Any) -> str:
    """An error recorded by the package, with the line of the environment's code that raised it."""
    return with_location(f"{error.type}: {error.message}", traceback_location(error.traceback or ""))


def _convert_task(environment: str, task: Any) -> Task:
    """Convert a task of the package to a Covey task. Fields that its author added become columns."""
    from verifiers.v1 import TaskData
    from verifiers.v1.dialects.chat import message_to_wire

    data = task.data
    messages: list[Mapping[str, Any]] = []
    if data.system_prompt:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_to_wire(message) for message in data.prompt or []]
    if not messages:
        messages.append({"role": "user", "content": ""})  # the environment's user writes the first message later
    own = {name: value for name, value in data.model_dump(mode="json").items() if name not in TaskData.model_fields}
    return Task(f"{environment}/{data.idx}", tuple(messages), answer=own.pop("answer", None), columns=own)


def _rewards(traces: Sequence[Any]) -> RewardTable | None:
    """The weighted sum that the package trains on, and every reward and metric by name. If several roles are trained,
    they share the mean, and the names have the role as a prefix."""
    if not traces:
        return None
    table: dict[str, float | None] = {"reward": fmean(trace.reward for trace in traces)}
    for trace in traces:
        role = f"{trace.agent.name}/" if len(traces) > 1 else ""
        for name, value in trace.rewards.items():
            table[f"{role}{name}"] = None if value is None else value.score
        for name, metric in trace.metrics.items():
            table.setdefault(f"{role}{name}", metric)
    return table


class EnvironmentServer:
    """The environment's server and shared tools, held open by a task. It starts at the first use and ends when it is
    closed or the event loop ends."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._ended = asyncio.Event()

    async def clients(self, environment: Any) -> dict[str, Any]:
        """The model clients of the environment's server, by their configuration as JSON."""
        if self._task is None or self._task.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._ended = asyncio.Event()
            self._task = asyncio.create_task(self._hold(environment, self._ready), name="verifiers")
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def _hold(self, environment: Any, ready: asyncio.Future[dict[str, Any]]) -> None:
        from verifiers.v1.interception import InterceptionServerConfig

        environment.config.interception = InterceptionServerConfig()  # a single server, whose clients we can register
        try:
            async with environment.serving():
                ready.set_result(environment._interception.clients)
                await self._ended.wait()
        except (Exception, SystemExit) as error:  # the package exits if the user is not logged in
            if ready.done():
                raise
            ready.set_exception(EnvironmentFailed("environment", describe_error(error)))

    async def close(self) -> None:
        if self._task is not None:
            self._ended.set()
            await asyncio.wait([self._task])
