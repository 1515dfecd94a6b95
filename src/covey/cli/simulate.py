"""covey simulate: step time, utilisation, staleness and memory before machines are rented."""

from __future__ import annotations

import json
from pathlib import Path

from covey.app.simulation import simulate
from covey.cli.parse import parse
from covey.errors import InputError
from covey.simulate.hardware import DEVICES
from covey.simulate.splits import report_json, report_text

USAGE = f"""\
covey simulate RECIPE_OR_RUN --gpus 512 [--gpu h200] [flags] [key=value ...]

  Step time, utilisation, staleness and memory for several splits of the devices into learner and rollout, before
  machines are rented. Figures of one device are measured where you bring some, else assumed; the report says which.

  RECIPE_OR_RUN            a recipe, a YAML file, or the folder of a run on one device, whose figures are then used
  --gpus 512               devices in all
  --gpu h200               {" | ".join(DEVICES)}; of a run: its own kind
  --figures A.json,B.json  benchmarks' results of one device (decode-*.json, scaling-*.json)
  --answer-tokens 700      median of an answer; without a run a third of rollout.max_tokens
  --prompt-tokens 256      of a prompt
  --turns 3                replies in an episode, where an agent has tools
  --tool-seconds 1:20      what a tool takes, one number or a range
  --json FILE              the same figures as JSON

  covey simulate gvpo_math --gpus 64 --gpu h100
  covey simulate outputs/2026-07-01/10-00-00 --gpus 16 --tool-seconds 1:20 mode.max_staleness=3
"""
VALUES = (
    *("--gpus", "--gpu", "--figures", "--answer-tokens", "--prompt-tokens", "--turns", "--tool-seconds", "--json"),
)


def main(argv: list[str]) -> int:
    args = parse(argv, values=VALUES)
    args.one("recipe or run", USAGE)
    if args.value("--gpus") is None:
        raise InputError(f"--gpus is missing: the number of devices\n\n{USAGE.rstrip()}")
    found = simulate(args)
    print(report_text(found.title, found.figures, found.predictions))
    if path := args.value("--json"):
        report = report_json(found.title, found.figures, found.predictions, found.settings)
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    return 0
