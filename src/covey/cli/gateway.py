"""Wiring of the gateway: agent=gateway in a run, and what covey serve shares with it."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from covey.agents.formats import Format
from covey.config.schema import Config
from covey.gateway import GatewayAgent, Rules
from covey.gateway.program import require_program
from covey.gateway.server import bind, require_packages
from covey.protocols import Agent
from covey.rewards import RewardSet
from covey.types import Sampling

if TYPE_CHECKING:
    from covey.learner.models import ModelSource


def make_gateway(config: Config, source: ModelSource | None) -> GatewayAgent:
    """The agent, with the tool-call format of the model where that is here."""
    rollout = config.rollout
    rules = Rules(
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
