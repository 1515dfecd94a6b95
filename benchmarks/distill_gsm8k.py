"""A teacher against the reward, with a real model on one GPU: GSM8K, the same minutes of training from the same start.

    python benchmarks/distill_gsm8k.py --student qwen2.5-coder-0.5b-instruct/ --teacher qwen2.5-coder-1.5b-instruct/
        --data gsm8k/ [--methods grpo teacher both] [--write]
    python benchmarks/distill_gsm8k.py --tiny          random models on a CPU, in a minute

    grpo        the reward alone
    teacher     the teacher alone: reverse KL over the vocabulary, on the student's own answers
    both        GRPO, and the teacher's log-probs of the sampled tokens as a part of the advantages

Nothing else differs. Student and teacher are evaluated greedily on the whole test split, and each method after every
part of its training. A call works for at most `--limit` minutes and says whether another one is needed: the same
command continues. `--write` puts the table into docs/distillation.md and a record into benchmarks/records/learning.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import string
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kit.command import run_covey
from tiny import make_model, table, write_section

PAGE = Path(__file__).parent.parent / "docs" / "distillation.md"
RECORDS = Path(__file__).parent / "records" / "learning"
# Inside quotes, Hydra reads a backslash as itself, unless a quote follows.
SYSTEM = r'"Solve the problem step by step. Put the final answer in \boxed{}."'
TASK = ["reward=math_equal", f"data.system_prompt={SYSTEM}"]
SETTINGS = [
    *("algorithm=grpo", "data.train_batch_size=64", "rollout.group_size=8", "rollout.max_sequences=512"),
    *("learner.lr=3e-6", "learner.warmup_steps=5", "loop.total_steps=1000", "loop.keep_last=1"),
    *("eval.before=false", "eval.after=false", "logging.experiment=distill_gsm8k"),
]
METHODS = {
    "grpo": [],
    "teacher": ["teacher.alone=true", "teacher.kl=full"],
    "both": ["teacher.kl=sampled", "teacher.coef=0.05"],
}
LEARNS_FROM = {"grpo": "the reward", "teacher": "the teacher", "both": "both"}
REST = 2.0  # minutes of a part besides training: loading, compiling, evaluating
EVAL = "eval/greedy/math_equal"


@dataclass(frozen=True)
class Job:
    """A model to evaluate, or a part of a training to make and then to evaluate."""

    name: str
    model: str = ""  # to evaluate
    method: str = ""  # to train


@dataclass(frozen=True)
class Course:
    """What one method did."""

    accuracy: tuple[float, ...]  # after each part
    steps: int
    seconds: float
    tokens: float
    reward: tuple[float, float]  # of the first and the last ten steps
    kl: tuple[float, float] | None  # to the teacher, likewise


class Comparison:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        data = options.data
        self.data = [*TASK, f"data.train_files={data / 'train.jsonl'}", f"data.val_files={data / 'test.jsonl'}"]
        self.data += [f"rollout.max_tokens={options.max_tokens}", "rollout.memory=0.3"]

    def jobs(self) -> list[Job]:
        models = [Job(name, model=str(getattr(self.options, name))) for name in ("student", "teacher")]
        parts = range(1, self.options.parts + 1)
        return models + [Job(f"{method}-{part}", method=method) for part in parts for method in self.options.methods]

    def result(self, job: Job) -> Path:
        return self.out / f"after-{job.name}.json"

    def run(self, job: Job) -> None:
        with (self.out / "log").open("ab") as log:
            model = job.model or str(self.train(job.method, log))
            words = [] if job.method else self.data
            target = self.out / f"draft-{job.name}.json"
            run_covey(["eval", model, *words, "--json", str(target)], stdout=log, stderr=log)
        target.rename(self.result(job))

    def train(self, method: str, log: Any) -> Path:
        """One more part; returns its checkpoint."""
        folder, chosen = self.out / method, self.options
        words = [f"model.name={chosen.student}", *self.data, *SETTINGS, *METHODS[method], *chosen.more]
        words += [f"teacher.name={chosen.teacher}"] if method != "grpo" else []
        words += [f"loop.max_minutes={chosen.minutes}", f"logging.output_dir={folder}"]
        run_covey(["train", *words], stdout=log, stderr=log)
        return max(folder.glob("*/*/checkpoints/step-*"))

    def accuracy(self, job: Job) -> float:
        return float(json.loads(self.result(job).read_text())[EVAL])

    def course(self, method: str) -> Course:
        (path,) = (self.out / method).glob("*/*/metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [record["metrics"] for record in records if record["kind"] == "step"]

        def ends(key: str) -> tuple[float, float]:
            return fmean(s[key] for s in steps[:10]), fmean(s[key] for s in steps[-10:])

        return Course(
            tuple(self.accuracy(job) for job in self.jobs() if job.method == method),
            len(steps),
            sum(step["timing/step"] for step in steps),
            sum(step["perf/generated_tokens"] for step in steps),
            ends("reward/mean"),
            ends("distill/kl") if "distill/kl" in steps[0] else None,
        )


def percent(share: float, problems: int) -> str:
    """With its standard error, over this many problems."""
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / problems):.1f}"


def report(record: dict[str, Any]) -> str:
    n = record["problems"]
    parts = [f"after {record['minutes'] * (i + 1):g} min, %" for i in range(record["parts"])]
    rows = []
    for method, course in record["methods"].items():
        kl = "–" if course["kl"] is None else "{:.3f} → {:.3f}".format(*course["kl"])
        rows.append([
            LEARNS_FROM[method], *(percent(share, n) for share in course["accuracy"]), str(course["steps"]),
            f"{course['tokens'] / 1e6:.1f} M", "{:.2f} → {:.2f}".format(*course["reward"]), kl,
        ])  # fmt: skip
    header = ["student learns from", *parts, "steps", "sampled tokens", "reward", "KL to the teacher"]
    before = (
        f"Before training the student solves {percent(record['student'], n)} % of the {n:,} test problems, the teacher "
        f"{percent(record['teacher'], n)} % (± one standard error over problems). On {record['device']}, "
        f"{record['minutes']:g} minutes of training per part; one run of each method."
    )
    return f"{before}\n\n{table(header, rows)}"


def device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"a CPU ({platform.machine()})"


def tiny_inputs(options: argparse.Namespace) -> None:
    """Random models and a few sums, in place of those that are given."""
    symbols = string.ascii_letters + string.digits + string.punctuation + " \n"
    for name, width in (("student", 32), ("teacher", 64)):
        folder = options.out / name
        if not (folder / "config.json").is_file():
            make_model(folder, symbols, seed=width, initializer_range=0.1, width=width, context=256)
        setattr(options, name, folder)
    options.data = options.out / "sums"
    options.data.mkdir(exist_ok=True)
    for split, first in (("train", 0), ("test", 5)):
        rows = [{"question": f"{a} + {a + 1} = ?", "answer": f"so\n#### {2 * a + 1}"} for a in range(first, first + 5)]
        (options.data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options.minutes, options.max_tokens = 0.05, 8
    options.more += ["data.train_batch_size=2", "rollout.group_size=2", "model.context_length=256", "logging.to=[]"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, help="a model folder")
    parser.add_argument("--teacher", type=Path, help="a model folder with the same tokenizer")
    parser.add_argument("--data", type=Path, help="the folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["grpo", "teacher"])
    parser.add_argument("--minutes", type=float, default=5.0, help="of training in a part")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--limit", type=float, default=8.0, help="minutes of one call; a part is not divided")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark-distill-gsm8k"))
    parser.add_argument("--tiny", action="store_true", help="random models and a few sums, on a CPU")
    parser.add_argument("--write", action="store_true", help="put the table into docs/distillation.md, with a record")
    options = parser.parse_args(argv)
    options.more = []
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        tiny_inputs(options)
    if not (options.student and options.teacher and options.data):
        parser.error("--student, --teacher and --data are needed")
    comparison, start = Comparison(options), time.monotonic()
    for job in comparison.jobs():
        if comparison.result(job).is_file():
            continue
        minutes = (time.monotonic() - start) / 60
        if minutes > 0 and minutes + (options.minutes if job.method else 0) + REST > options.limit and not options.tiny:
            print(f"next: {job.name}; call the same command again")
            return 0
        print(f"{job.name} ...", flush=True)
        comparison.run(job)
        print(f"{job.name}: {100 * comparison.accuracy(job):.1f} %", flush=True)
    student, teacher, *_ = comparison.jobs()
    record = {
        "name": "distill-gsm8k",
        "device": device(),
        "minutes": options.minutes,
        "parts": options.parts,
        "problems": sum(1 for line in (options.data / "test.jsonl").open() if line.strip()),
        "settings": [*comparison.data[:2], *SETTINGS, f"rollout.max_tokens={options.max_tokens}"],
        "student": comparison.accuracy(student),
        "teacher": comparison.accuracy(teacher),
        "methods": {method: asdict(comparison.course(method)) for method in options.methods},
    }
    (options.out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    text = report(record)
    print(f"\n{text}")
    if options.write:
        write_section("distill_gsm8k", text, PAGE)
        slug = record["device"].lower().replace(" ", "-")
        RECORDS.mkdir(exist_ok=True)
        (RECORDS / f"distill-gsm8k-{slug}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
