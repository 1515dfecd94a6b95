"""Serves a loaded model at an OpenAI-compatible endpoint and records the episodes (covey serve)."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from covey.app.loaded_model import LoadedModel, sampling
from covey.app.parts import tool_format
from covey.app.prepare import training_sampling
from covey.gateway.registry import EpisodeRules, OpenEpisode, Registry
from covey.gateway.server import Server
from covey.redact import hide_known
from covey.storage import writing
from covey.telemetry.jsonl import PartWriter, whole_lines

HELLO = """\
serving {model} at {url}/v1
token    {token}
episodes {path}

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{token}:my-episode")   # another name, another episode
  reply = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])

Ctrl-C ends it.
"""


async def serve(model: LoadedModel, folder: Path, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    with closing(Recorder(folder, model.collector.renderer.decode)) as recorder:
        registry = make_registry(model, recorder)
        async with sampling(model):
            server = Server(registry, model.prepared.config.gateway.port)
            await server.start()
            name, token = registry.rules.model, registry.shown_token
            report(HELLO.format(model=name, url=server.url, token=token, path=recorder.path))
            try:
                await stopped.wait()
            finally:
                await server.stop()
    report(f"{recorder.count} episodes in {recorder.path}")


def make_registry(model: LoadedModel, on_closed: Callable[[OpenEpisode], None]) -> Registry:
    from covey.rollout.policy import EpisodePolicy

    prepared, collector = model.prepared, model.collector
    config, source = prepared.config, prepared.model
    assert source is not None
    numbers = itertools.count()

    def new_policy() -> EpisodePolicy:
        return EpisodePolicy(
            model.engine,
            collector.renderer,
            training_sampling(config),
            (config.seed, "serve", next(numbers)),
            max_response_tokens=collector.max_response_tokens,
            keep_images=collector.keep_images,
        )

    return Registry(
        EpisodeRules(config.model.name, tool_format(config, source)), new_policy=new_policy, on_closed=on_closed
    )


class Recorder:
    """Writes closed episodes to episodes.jsonl in the format of a run (docs/metrics.md).

    Fields that only a learner fills in are null. The file is created with the first episode.
    """

    def __init__(self, folder: Path, decode: Callable[..., str]) -> None:
        self.path = folder / "episodes.jsonl"
        self.writer: PartWriter | None = None
        self.count = 0
        self.decode = decode

    def __call__(self, live: OpenEpisode) -> None:
        episode = live.to_episode()
        if not episode.turns:
            return
        from covey.rewards.builtin import given
        from covey.telemetry import TokenRow, episode_record
        from covey.telemetry.jsonl import finite
        from covey.training.samples import episode_rows

        nothing = [math.nan]
        rows = [TokenRow(row, *[nothing * len(row.response_ids)] * 3) for row in episode_rows(episode, 0)]
        scored: dict[str, Any] = given(episode) or {}
        line = episode_record(
            step=0,
            task_id=episode.task.id,
            group=self.count,
            attempt=0,
            episode=episode,
            rewards=episode.given or {},
            total_reward=scored.get("reward"),
            advantage=None,
            tokens=rows,
            decode=lambda ids: self.decode(ids, special=True),
        )
        if self.writer is None:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = PartWriter(self.path, whole_lines(self.path))
        record = finite(line | {"id": live.id, "metadata": live.metadata})
        self.writer.write(hide_known(json.dumps(record, default=str)).encode() + b"\n")
        self.count += 1

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
