"""covey eval: models, runs or checkpoints on held-out tasks, with confidence intervals and comparisons."""

from __future__ import annotations

import json
import shlex
import sys

from rich.console import Console

from covey.app.evaluation import EvalOptions, check_answered, evaluate, plan_evaluation, print_status
from covey.cli.parse import parse
from covey.errors import InputError
from covey.evaluation.report import flat_metrics
from covey.storage import write_atomically
from covey.telemetry.jsonl import finite

USAGE = """\
covey eval MODEL_OR_RUN... [--tasks gsm8k,math500] [--n 16] [--limit 100] [--out DIR] [key=value ...]

  Answers held-out tasks: pass@1, pass@k, maj@n, mean reward and lengths, with 95 % confidence intervals over tasks.
  MODEL_OR_RUN   a model (folder, Hugging Face id, smollm2-135m), a run (outputs/DATE/TIME) or a checkpoint of one;
                 a run brings its own tasks and rewards, and its best checkpoint. Several are compared with the first
  --tasks A,B    data sets, generated tasks or files (test.jsonl); without it the validation tasks of the settings
  --n 16         answers to each task: 1 (default) is greedy, more are sampled (eval.temperature, top_p, top_k, min_p)
  --limit 100    only the first tasks of each set
  --k 1,8        the k of pass@k; without it 1, 2, 4, ... n
  --solved 1     an answer is right if its reward is at least this
  --out DIR      the folder of answers.jsonl, results.json and results.md; default outputs/eval/DATE_TIME. The same
                 command with the same folder continues an interrupted evaluation
  --json FILE    one model on its own tasks: write the figures there too, under the names that a run logs

  covey eval smollm2-135m data=sort eval.modes=[greedy,sampled] eval.n=4
  covey eval outputs/A outputs/B --tasks arithmetic,countdown --n 8 --out outputs/eval/a-or-b
"""
FLAGS = ("--tasks", "--n", "--k", "--limit", "--solved", "--out", "--json", "--config-name", "--config")
WIDE = 160  # columns, if the output is not a terminal


def main(argv: list[str]) -> int:
    args = parse(argv, values=FLAGS)
    if not args.positional:
        raise InputError(f"name a model or a run\n\n{USAGE.rstrip()}")
    options = EvalOptions.read(args)
    plans = plan_evaluation(args, options)
    report, path = evaluate(plans, options, shlex.join(["covey", "eval", *argv]))
    write_atomically(path / "results.json", json.dumps(finite(report.as_data()), indent=1))
    write_atomically(path / "results.md", report.as_markdown())
    report.show(Console(width=None if sys.stdout.isatty() else WIDE, highlight=False))
    print_status(f"{path / 'results.md'}  results.json  answers.jsonl")
    if len(plans) == 1 and not options.tasks:
        metrics = flat_metrics(report.scores)
        for name, value in metrics.items():
            print(f"{name:40} {value:.4f}")
        if options.json is not None:
            write_atomically(options.json, json.dumps(metrics, indent=1))
    check_answered(report.scores)
    return 0
