"""Environments of the package `verifiers`: its tasks, its turns, its tools and its rewards, with tokens of our own.

    covey train agent=verifiers agent.environment=gsm8k-v1
    covey train agent=verifiers agent.environment=my_env.py:make

`agent.environment` is the id of an installed environment, or a name of yours: an `Env`, an `EnvConfig`, or a function
that returns one. `agent.environment_options` is the package's own `env` block (`taskset`, roles, limits). Its tasks are
trained on, and its reward is the built-in reward `given`, with each reward and metric measured beside it.

A role that has no harness of its own is played by a chat loop in this process, instead of the package's default, which
would let the model run commands on this machine.
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

from covey.agents.environment import EnvironmentFailed, beyond
from covey.config.schema import AgentConfig
from covey.errors import InputError, describe_error, traceback_location, with_location
from covey.imports import install_extra, load_function, no_exit
from covey.protocols import Policy
from covey.types import Episode, Messages, RewardTable, StopReason, Task

if TYPE_CHECKING:
    from covey.agents.formats import Format

HARNESS = "covey_chat"  # the name under which the package finds our chat loop
REPLACED = ("bash", "null")  # harnesses of the package that the chat loop stands in for


def require_verifiers() -> Any:
    try:
        from verifiers import v1
    except ImportError as error:
        raise InputError(f"agent=verifiers needs the package ({error})\n  {install_extra('verifiers')}") from error
    from covey.agents import verifiers_runtime

    sys.modules.setdefault(HARNESS, verifiers_runtime)  # harnesses are found by the name of a module
    verifiers_runtime.install()
    return v1


def load_verifiers(config: AgentConfig) -> VerifiersAgent:
    if not config.environment:
        raise InputError("agent=verifiers plays an environment\n  agent.environment=NAME, or file.py:function")
    return VerifiersAgent(load_environment(config.environment, config.environment_options, config.max_turns))


def load_environment(name: str, options: Mapping[str, Any], max_turns: int) -> Any:
    """The `Env` that a name stands for."""
    vf = require_verifiers()
    if ":" in name:
        found = load_function("environment", name)
        with no_exit(f"environment {name}"):
            found = found if isinstance(found, (vf.Env, vf.EnvConfig)) else found(**options)
        if isinstance(found, vf.Env):
            return found
        if not isinstance(found, vf.EnvConfig):
            raise InputError(f"environment {name}: neither an Env nor an EnvConfig, but {type(found).__name__}")
        return vf.load_environment(_played(vf, found, max_turns))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module beside, as well as an installed one
    block = dict(options)
    block["taskset"] = {**block.get("taskset", {}), "id": name}
    try:
        return vf.load_environment(_played(vf, vf.resolve_env_config(block), max_turns))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"environment {name}: {error}") from error


def _played(vf: Any, config: Any, max_turns: int) -> Any:
    """The configuration with our chat loop where no program is named, and a limit of turns where there is none."""
    from verifiers.v1.configs.agent import agent_config_fields

    default = vf.default_harness_id(config.taskset.id)
    roles = {}
    for role, spec in agent_config_fields(config).items():
        harness = spec.harness.id if spec.harness is not None else default
        changes: dict[str, Any] = {} if spec.max_turns else {"max_turns": max_turns}
        if harness in REPLACED:
            changes["harness"] = vf.HarnessConfig(id=HARNESS)
            if "runtime" not in spec.model_fields_set:
                changes["runtime"] = vf.SubprocessConfig()  # a folder: the chat loop needs no machine of its own
        roles[role] = spec.model_copy(update=changes)
    return config.model_copy(update=roles)


@dataclass(frozen=True)
class VerifiersAgent:
    """Plays each episode as the environment does, with the policy as its model."""

    environment: Any
    format: Format | None = None  # how the model calls tools; needed if the environment has some
    _served: Served = field(default_factory=lambda: Served(), repr=False)
    _tasks: dict[str, Any] = field(default_factory=dict, repr=False)  # the package's own, by the id of ours

    reward: ClassVar[str] = "given"

    def tasks(self, size: int | None = None) -> tuple[Task, ...]:
        """What there is to train on: all of the taskset, or the first `size` of it."""
        taskset = self.environment.taskset
        if size is None and not taskset.bounded:
            raise InputError("this environment makes tasks without end\n  data.train_size says how many to take")
        found = []
        for task in itertools.islice(taskset, size):
            found.append(_task(self.environment.config.env_id, task))
            self._tasks[found[-1].id] = task
        return tuple(found)

    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        from covey.agents.verifiers_runtime import MODEL, PolicyClient

        vf = require_verifiers()
        if task.id not in self._tasks:
            raise InputError(f"task {task.id} is not of this environment: agent=verifiers brings its own tasks")
        client = PolicyClient(policy, self.format)
        clients = await self._served.clients(self.environment)
        place = vf.TrainClientConfig(base_url=f"http://policy.invalid/{uuid.uuid4().hex}", api_key_var="NONE")
        key = place.model_dump_json()  # a client is found by its configuration: this one is of this episode only
        clients[key] = client
        try:
            context = vf.ModelContext(model=MODEL, client=place, sampling=vf.SamplingConfig())
            played = await self.environment.run_episode(self._tasks[task.id], context, on_trace=client.watch)
        finally:
            del clients[key]
        if client.broken is not None:
            raise client.broken
        return self._episode(policy, task, client, played)

    def _episode(self, policy: Policy, task: Task, client: Any, played: Any) -> Episode:
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            text = _told(errors[0]) if errors else "it did not complete"
            late = played.is_timeout or any(trace.is_timeout for trace in played.traces)
            raise EnvironmentFailed("environment_timeout" if late else "environment", text)
        trained = [trace for trace in played.traces if trace.agent.trainable]
        said = client.said.get(trained[-1].id, []) if trained else []
        stop = policy.turns[-1].stop if policy.turns else None
        if any(trace.stop_condition == "max_turns" for trace in trained):
            stop = StopReason.TURNS
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *beyond(said, task.messages)),
            stop=StopReason.LENGTH if client.full else stop,
            given=_given(trained),
        )

    def announce_to(self, tell: Callable[[str], None]) -> None:
        """Where to report that a tool server is being waited for."""
        from covey.agents import verifiers_runtime

        verifiers_runtime.HostRuntime.tell = staticmethod(tell)

    async def aclose(self) -> None:
        await self._served.close()


def _told(error: Any) -> str:
    """An error as the package records it, with the line of the environment's code that raised it."""
    return with_location(f"{error.type}: {error.message}", traceback_location(error.traceback or ""))


def _task(environment: str, task: Any) -> Task:
    """A task of the package as one of ours. What its author added to it travels along."""
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
        messages.append({"role": "user", "content": ""})  # the user opens: nobody knows yet with what
    own = {name: value for name, value in data.model_dump(mode="json").items() if name not in TaskData.model_fields}
    return Task(f"{environment}/{data.idx}", tuple(messages), answer=own.pop("answer", None), columns=own)


def _given(traces: Sequence[Any]) -> RewardTable | None:
    """The weighted sum that the package trains on, and every reward and metric by its name. Several roles that learn
    share the mean; their names stand before those of their rewards."""
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


class Served:
    """What an environment needs while it is played (its server, its shared tools), held by a task of its own: opened
    when first used, and left when it is closed or the event loop ends."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._leave = asyncio.Event()

    async def clients(self, environment: Any) -> dict[str, Any]:
        """The model clients of the environment's server, by their configuration."""
        if self._task is None or self._task.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._leave = asyncio.Event()
            self._task = asyncio.create_task(self._hold(environment, self._ready), name="verifiers")
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def _hold(self, environment: Any, ready: asyncio.Future[dict[str, Any]]) -> None:
        from verifiers.v1.interception import InterceptionServerConfig

        environment.config.interception = InterceptionServerConfig()  # one server: its clients are known
        try:
            async with environment.serving():
                ready.set_result(environment._interception.clients)
                await self._leave.wait()
        except (Exception, SystemExit) as error:  # the package exits where it is not logged in
            if ready.done():
                raise
            ready.set_exception(EnvironmentFailed("environment", describe_error(error)))

    async def close(self) -> None:
        if self._task is not None:
            self._leave.set()
            await asyncio.wait([self._task])
