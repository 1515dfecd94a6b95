"""An agent with a tool: the model calls your function to look up a fact.

    python examples/tool_agent.py

A tool is a plain function; the model sees its name, docstring and parameters. The reward is 1 for the right price,
which only the tool knows. Two worked examples show how to write a call; a model that was trained to call tools needs
none. If a model never writes a valid call, it gets no reward signal: imitate demonstrations first (docs/sft.md).
SmolLM2-135M: the mean reward of sampled episodes rises from 0.21 in the first step to 0.74 in the fourth and fifth.
"""

import argparse

import covey

GOODS = "apples bread butter cheese chairs cups eggs flour flowers fish grapes honey jam juice lamps lemons milk nuts "
GOODS += "oil olives onions pans paper pears pencils pepper plates plums rice salt shirts shoes soap socks soup spoons "
GOODS += "sugar tables tea toys"
PRICES = {item: 3 + 7 * number % 90 for number, item in enumerate(GOODS.split())}


def price(item: str) -> int:
    """Look up what an item costs, in euros.

    Args:
        item: Its name.
    """
    return PRICES[item.strip().lower()]


CALL = '<tool_call>\n{{"name": "price", "arguments": {{"item": "{item}"}}}}\n</tool_call>'
EXAMPLES = [
    {"role": role, "content": text.format(item=item, price=price)}
    for item, price in (("bikes", 252), ("roses", 9))
    for role, text in (
        ("user", "What do {item} cost?"),
        ("assistant", CALL),
        ("user", "<tool_response>\n{price}\n</tool_response>"),
        ("assistant", "{price}"),
    )
]


def rows(items: list[str]) -> list[dict[str, object]]:
    return [
        {"messages": [*EXAMPLES, {"role": "user", "content": f"What do {item} cost?"}], "answer": str(PRICES[item])}
        for item in items
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()

    run = covey.train(
        model=args.model,
        tasks=rows(list(PRICES)[::2]),
        validation=rows(list(PRICES)[1::2]),
        reward="number",
        algorithm="grpo",
        tools=[price],
        agent={"max_turns": 3},
        data={"train_batch_size": 6},
        rollout={"group_size": 8, "max_tokens": 32},
        learner={"lr": 3e-5},
        loop={"total_steps": args.steps},
    )
    for step, metrics in run.evaluations:
        print(f"after {step} steps: {metrics['eval/accuracy']:.0%} of the prices are right")
