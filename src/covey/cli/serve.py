"""covey serve: a model behind an OpenAI-compatible endpoint that records episodes."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

from covey.app.loaded_model import load_model, prepare_model
from covey.app.serving import serve
from covey.cli.parse import parse
from covey.gateway.server import bind, require_packages

USAGE = """\
covey serve MODEL_OR_RUN [--folder DIR] [key=value ...]

  An OpenAI-compatible endpoint on this machine. Each key is an episode of its own. Episodes are written to a folder,
  token by token, when they are closed, after a day without requests, or when the server ends (Ctrl-C).
  MODEL_OR_RUN   a model (folder, Hugging Face id, smollm2-135m), a run (outputs/DATE/TIME) or a checkpoint of one
  --folder DIR   where episodes.jsonl is written; default outputs/serve/DATE_TIME

  covey serve smollm2-135m gateway.port=9999 rollout.max_tokens=512
"""


def main(argv: list[str]) -> int:
    args = parse(argv, values=("--folder", "--config-name", "--config"))
    require_packages()
    model = load_model(prepare_model(args, USAGE, needs_tasks=False))
    config = model.prepared.config
    bind(config.gateway.port).close()
    named = args.value("--folder")
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(named) if named else Path(config.logging.output_dir) / "serve" / now
    asyncio.run(serve(model, folder, lambda text: print(text, flush=True)))
    return 0
