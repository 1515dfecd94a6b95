"""Train on rows of your own and evaluate on rows that are held out.

Ten lines are the training; the rest makes the rows.

    python examples/train.py
    python examples/train.py --steps 5 --model ORG/NAME
"""

import argparse

import covey

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
parser.add_argument("--steps", type=int, default=15)
args = parser.parse_args()

# A row has a `question`, or `messages` as here, where two worked examples show the form of the answer.
SHOWN = [("Is 12 odd or even?", "even"), ("Is 45 odd or even?", "odd")]
EXAMPLES = [
    message
    for question, answer in SHOWN
    for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
]
ROWS = [
    {
        "messages": [*EXAMPLES, {"role": "user", "content": f"Is {number} odd or even?"}],
        "answer": "odd" if number % 2 else "even",
    }
    for number in range(100, 400)
]

run = covey.train(
    model=args.model,
    tasks=[row for index, row in enumerate(ROWS) if index % 5],
    validation=[row for index, row in enumerate(ROWS) if index % 5 == 0],
    reward="exact",
    algorithm="grpo",
    data={"train_batch_size": 8},
    rollout={"group_size": 8, "max_tokens": 4},
    learner={"lr": 3e-5},
    loop={"total_steps": args.steps},
)
for step, metrics in run.evaluations:
    print(f"after {step} steps: {metrics['eval/accuracy']:.0%} of the held-out rows are right")
print(f"metrics, episodes and checkpoint: {run.path}")
