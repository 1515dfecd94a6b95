"""Demonstrations as the turns that a model would have taken, token for token as in sampling.

Each message of the assistant becomes a turn: the prompt that `EpisodePolicy` would have sent (what is there already,
and what the template adds), and the reply as the model would have sampled it, its end of turn included. Where the
template rewrites history the next prompt starts anew, and the demonstration forks into several rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from covey.rollout.rendering import Renderer, Said, Tools
from covey.types import Messages, StopReason, Turn


def demonstrated(renderer: Renderer, messages: Messages, tools: Tools, ends: Sequence[int]) -> tuple[Turn, ...]:
    """The turns of the assistant. `ends` are the ids that may end a turn. Raises `TemplateError`."""
    turns: list[Turn] = []
    said: Said | None = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tuple(messages[:place])
        prompt = None if said is None else renderer.next_prompt(said, before[len(said.messages) + 1 :])
        if prompt is None:
            prompt = renderer.prompt(before, tools)
        reply = renderer.reply(before, message, tools, ends)
        turns.append(Turn(prompt, reply, (0.0,) * len(reply), (0,) * len(reply), StopReason.EOS))
        said = Said(before, tools, prompt, reply, StopReason.EOS, message)
    return tuple(turns)
