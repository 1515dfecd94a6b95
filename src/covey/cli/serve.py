"""covey serve: a model behind an OpenAI-compatible endpoint that records what is played."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from covey.app.loaded_model import Bench, open_bench, sampling
from covey.app.parts import tool_format
from covey.app.prepare import training_sampling
from covey.cli.words import parse
from covey.gateway import EpisodeRules, OpenEpisode, Registry
from covey.gateway.server import Server, bind, require_packages
from covey.redact import hide_known
from covey.storage import writing
from covey.telemetry.jsonl import PartWriter, whole_lines

USAGE = """\
covey serve MODEL_OR_RUN [--folder DIR] [key=value ...]

  An OpenAI-compatible endpoint on this machine. Each key is an episode of its own; what was played is written to a
  folder, token by token, when an episode is closed, after a day of silence, or when the server ends (Ctrl-C).
  MODEL_OR_RUN   a model (folder, Hugging Face id, smollm2-135m), a run (outputs/DATE/TIME) or a checkpoint of one
  --folder DIR   where episodes.jsonl goes; without it outputs/serve/DATE_TIME

  covey serve smollm2-135m gateway.port=9999 rollout.max_tokens=512
"""
HELLO = """\
serving {model} at {url}/v1
token    {token}
episodes {path}

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{token}:my-episode")   # another name, another episode
  reply = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])

Ctrl-C ends it.
"""


def main(argv: list[str]) -> int:
    words = parse(argv, values=("--folder", "--config-name", "--config"))
    if words.help:
        print(USAGE)
        return 0
    require_packages()
    bench = open_bench(words, USAGE, asks_tasks=False)
    config = bench.prepared.config
    bind(config.gateway.port).close()
    named = words.text("--folder")
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(named) if named else Path(config.logging.output_dir) / "serve" / now
    asyncio.run(serve(bench, folder, lambda text: print(text, flush=True)))
    return 0


async def serve(bench: Bench, folder: Path, say: Callable[[str], None]) -> None:
    """Until the process is told to end."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with closing(Recorder(folder, bench.collector.renderer.decode)) as record:
        registry = make_registry(bench, record)
        async with sampling(bench):
            server = Server(registry, bench.prepared.config.gateway.port)
            await server.start()
            say(HELLO.format(model=registry.rules.model, url=server.url, token=registry.shown_token, path=record.path))
            try:
                await ended.wait()
            finally:
                await server.stop()
    say(f"{record.count} episodes in {record.path}")


def make_registry(bench: Bench, on_closed: Callable[[OpenEpisode], None]) -> Registry:
    from covey.rollout.policy import EpisodePolicy

    prepared, collector = bench.prepared, bench.collector
    config, source = prepared.config, prepared.model
    assert source is not None
    numbers = itertools.count()

    def new_policy() -> EpisodePolicy:
        return EpisodePolicy(
            bench.engine,
            collector.renderer,
            training_sampling(config),
            (config.seed, "serve", next(numbers)),
            max_response_tokens=collector.max_response_tokens,
        )

    return Registry(
        EpisodeRules(config.model.name, tool_format(config, source)), new_policy=new_policy, on_closed=on_closed
    )


class Recorder:
    """episodes.jsonl as a run writes it (docs/metrics.md); what only a learner knows is null."""

    def __init__(self, folder: Path, decode: Callable[..., str]) -> None:
        self.path = folder / "episodes.jsonl"
        self.writer: PartWriter | None = None  # with the first episode
        self.count = 0
        self.decode = decode

    def __call__(self, open_episode: OpenEpisode) -> None:
        episode = open_episode.to_episode()
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
        record = finite(line | {"id": open_episode.id, "metadata": open_episode.metadata})
        self.writer.write(hide_known(json.dumps(record, default=str)).encode() + b"\n")
        self.count += 1

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
