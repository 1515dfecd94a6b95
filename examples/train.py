"""Train on your own rows and evaluate on held-out rows.

The training is ten lines; the rest makes the rows. SmolLM2-135M goes from 72 to 100 % of the held-out rows in 10 steps,
two minutes on one CPU core.

    python examples/train.py
    python examples/train.py --steps 5 --model ORG/NAME
"""

import argparse

import covey

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EXAMPLE = [
    {"role": "system", "content": "Reply with a number only."},
    {"role": "user", "content": "Write in digits: eighteen"},
    {"role": "assistant", "content": "18"},
]
ROWS = [  # a row has a `question`, or `messages` as here, where a worked example shows the form of the answer
    {"messages": [*EXAMPLE, {"role": "user", "content": f"Write in digits: {tens}-{ones}"}], "answer": f"{t}{o}"}
    for t, tens in enumerate(TENS, start=2)
    for o, ones in enumerate(ONES, start=1)
]

run = covey.train(
    model=args.model,
    tasks=[row for index, row in enumerate(ROWS) if index % 4],
    validation=[row for index, row in enumerate(ROWS) if index % 4 == 0],
    reward="exact",
    algorithm="grpo",
    data={"train_batch_size": 8},
    rollout={"group_size": 8, "max_tokens": 4},
    learner={"lr": 2e-5},
    loop={"total_steps": args.steps},
)
for step, metrics in run.evaluations:
    print(f"after {step} steps: {metrics['eval/accuracy']:.0%} of the held-out rows are right")
print(f"metrics, episodes and checkpoint: {run.path}")
