"""On-policy distillation against GRPO, at equal samples: a tiny model learns to add.

    .venv/bin/python benchmarks/distill.py [--seeds 0 1 2] [--steps 300] [--write]

A teacher (two layers of 64) learns the sums of two numbers from 0 to 9 with GRPO, three times as long. Students (two
layers of 32, random) then learn from the same questions: from the reward (GRPO), from the teacher alone (KL of sampled
tokens, or over the vocabulary), or from both. A step has 10 questions × 16 answers; only the signal differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiny import make_model, table, write_section

import covey

SYMBOLS = "0123456789+="
TASKS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
TEACHER_STEPS = 3  # times those of a student
SIDES: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm": "grpo"},
    "teacher, sampled": {"algorithm": "grpo", "teacher.alone": True, "teacher.kl": "sampled"},
    "teacher, full": {"algorithm": "grpo", "teacher.alone": True, "teacher.kl": "full"},
    "GRPO + teacher": {"algorithm": "grpo", "teacher.kl": "sampled", "teacher.coef": 0.5},
}


def train(model: Path, seed: int, steps: int, out: Path, **settings: Any) -> covey.Run:
    return covey.train(
        model=str(model),
        tasks=TASKS,
        validation=TASKS,
        reward="exact",
        seed=seed,
        rollout={"group_size": 16, "max_tokens": 3},
        data={"train_batch_size": 10},
        learner={"lr": 1e-3, "entropy_coef": 0.02},
        loop={"total_steps": steps},
        eval={"every": max(1, steps // 3), "before": False},
        logging={"to": [], "output_dir": str(out), "verbosity": "warning"},
        resume="disable",
        **settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="write the table into docs/distillation.md")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for seed in chosen.seeds:
            start = make_model(folder / f"start-{seed}", SYMBOLS, seed=1000 + seed, initializer_range=0.1, width=64)
            steps = TEACHER_STEPS * chosen.steps
            taught = train(start, seed, steps, folder / "runs", algorithm="grpo")
            teacher = taught.path / "checkpoints" / f"step-{steps:06d}" / "model"
            student = make_model(folder / f"student-{seed}", SYMBOLS, seed=seed, initializer_range=0.1)
            for name, settings in SIDES.items():
                words = settings if name == "GRPO" else {**settings, "teacher.name": str(teacher)}
                run = train(student, seed, chosen.steps, folder / "runs", **words)
                found = [f"{100 * metrics['eval/accuracy']:.0f}" for _, metrics in run.evaluations]
                best = f"{100 * taught.evaluations[-1][1]['eval/accuracy']:.0f}"
                rows.append((str(seed), best, name, *found[:3]))
                print(rows[-1], file=sys.stderr, flush=True)
    thirds = [f"after {chosen.steps * part // 3} steps" for part in (1, 2, 3)]
    text = table(("seed", "teacher, %", "student learns from", *thirds), rows)
    print(text)
    if chosen.write:
        write_section("distill", text, Path(__file__).parent.parent / "docs" / "distillation.md")


if __name__ == "__main__":
    main()
