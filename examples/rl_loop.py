"""A complete RL loop in one file: sample groups of answers, score them, compute advantages, update, evaluate.

    python examples/rl_loop.py
    python examples/rl_loop.py --algorithm rloo --steps 40 --model ORG/NAME

torch and transformers do the work. Covey supplies the two functions that make an algorithm: `covey.advantages`
(rewards → advantages) and `covey.policy_loss` (advantages and log-probs → loss). Copy the file and change anything.

Measured: SmolLM2-135M, default options, one core of an AMD EPYC, float32, 286 seconds of CPU time.

    steps                        0       1–5      6–10     11–15     16–20
    mean reward, sampled               0.37      0.80      0.89      0.91
    accuracy, greedy          0.24               0.92                0.88        (50 held-out questions)
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey

# Shapes: N answers, T tokens of the longest allowed answer, P prompt tokens, V vocabulary.

# -- the task ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    messages: list[dict[str, str]]
    answer: str


def draw(rng: random.Random) -> Question:
    """Which of three numbers is the largest? One worked example shows the form of the answer."""

    def ask(numbers: list[int]) -> str:
        return f"Which is the largest: {numbers[0]}, {numbers[1]} or {numbers[2]}?"

    numbers = rng.sample(range(10, 100), 3)
    messages = [
        {"role": "system", "content": "Reply with a number only."},
        {"role": "user", "content": ask([23, 81, 45])},
        {"role": "assistant", "content": "81"},
        {"role": "user", "content": ask(numbers)},
    ]
    return Question(messages, str(max(numbers)))


def reward(reply: str, answer: str) -> float:
    return float(reply.strip() == answer)


# -- the policy -------------------------------------------------------------------------------------------------------


class Policy:
    """A causal model and its tokenizer. The prompt of a group is computed once."""

    def __init__(self, name: str, device: torch.device) -> None:
        path = covey.model_path(name)  # the folder of a built-in model; other names are unchanged
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
        self.device = device

    def prompts(self, questions: list[Question]) -> tuple[Tensor, Tensor]:
        """Token ids [B, P], padded on the left, and their attention mask."""
        messages = [q.messages for q in questions]
        texts = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to(self.device)
        return encoded["input_ids"], encoded["attention_mask"]

    def forward(self, tokens: Tensor, attention: Tensor, cache: Any = None, **options: Any) -> Any:
        """`attention` covers the tokens in the cache and the new ones. Positions do not count padding."""
        positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        options |= {"attention_mask": attention, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        return self.model(tokens, **options)

    def start(self, prompts: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor, Any]:
        """`count` answers to each prompt begin: logits of their first token [N, 1, V], attention mask, cache."""
        ids, attention = prompts
        out = self.forward(ids, attention, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(count)
        return out.logits.repeat_interleave(count, 0), attention.repeat_interleave(count, 0), out.past_key_values

    @torch.no_grad()
    def sample(
        self, prompts: tuple[Tensor, Tensor], count: int, max_tokens: int, greedy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Answers [N, T] and the mask of their tokens; the token that ends an answer belongs to it."""
        logits, attention, cache = self.start(prompts, count)
        answers = attention.new_empty(len(attention), 0)
        while True:
            last = logits[:, -1].float()
            token = last.argmax(-1, keepdim=True) if greedy else torch.multinomial(last.softmax(-1), 1)
            answers = torch.cat([answers, token], 1)
            if answers.shape[1] == max_tokens:
                ends = (answers == self.tokenizer.eos_token_id).long()
                return answers, ends.cumsum(1) - ends == 0  # no end before this token
            attention = torch.cat([attention, torch.ones_like(token)], 1)
            logits = self.forward(token, attention, cache).logits

    def logprobs(self, prompts: tuple[Tensor, Tensor], count: int, answers: Tensor) -> Tensor:
        """Log-probs of the answers' tokens, with gradient: [N, T]. Tokens after an answer's end are masked later."""
        first, attention, cache = self.start(prompts, count)
        inputs = answers[:, :-1]
        rest = self.forward(inputs, torch.cat([attention, torch.ones_like(inputs)], 1), cache).logits
        return torch.cat([first, rest], 1).float().log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)

    def texts(self, answers: Tensor, mask: Tensor) -> list[str]:
        kept = [answer[is_kept] for answer, is_kept in zip(answers, mask, strict=True)]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=True)


# -- learning ---------------------------------------------------------------------------------------------------------


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, questions: list[Question], args: Any) -> float:
    """Sample, score, compare, update: returns the mean reward of the sampled answers."""
    prompts = policy.prompts(questions)
    answers, mask = policy.sample(prompts, args.group_size, args.max_tokens)
    repeated = [question for question in questions for _ in range(args.group_size)]  # the question of each answer
    groups = [number for number in range(len(questions)) for _ in range(args.group_size)]
    texts = policy.texts(answers, mask)
    rewards = [reward(text, question.answer) for text, question in zip(texts, repeated, strict=True)]
    advantages = covey.advantages(args.algorithm, rewards, groups).to(policy.device)  # [N]

    old: Tensor | None = None
    for _ in range(args.epochs):
        logprobs = policy.logprobs(prompts, args.group_size, answers)
        old = logprobs.detach() if old is None else old  # before the first update these are the sampling policy's
        loss, _ = covey.policy_loss(args.algorithm, logprobs, old, advantages, mask, groups=groups)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    return sum(rewards) / len(rewards)


def evaluate(policy: Policy, questions: list[Question], max_tokens: int) -> float:
    """Accuracy with greedy decoding."""
    texts = policy.texts(*policy.sample(policy.prompts(questions), 1, max_tokens, greedy=True))
    return sum(reward(text, q.answer) for text, q in zip(texts, questions, strict=True)) / len(questions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a folder, a Hugging Face id, or smollm2-135m")
    parser.add_argument("--algorithm", default="grpo", help="any that needs neither critic nor reference")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=8, help="per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers per question")
    parser.add_argument("--epochs", type=int, default=1, help="updates per batch of answers")
    parser.add_argument("--max-tokens", type=int, default=5, help="of an answer")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--held-out", type=int, default=50, help="questions of an evaluation")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    policy = Policy(args.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=args.lr, weight_decay=0.0)
    held_out = [draw(random.Random(1 + number)) for number in range(args.held_out)]  # the same for every --seed
    known = {question.messages[-1]["content"] for question in held_out}
    rng = random.Random(args.seed)
    start = time.perf_counter()
    print(f"before training  accuracy {evaluate(policy, held_out, args.max_tokens):.2f}", flush=True)
    for step in range(1, args.steps + 1):
        questions: list[Question] = []
        while len(questions) < args.questions:
            question = draw(rng)
            if question.messages[-1]["content"] not in known:  # held-out questions are never trained on
                questions.append(question)
        mean = train_step(policy, optimizer, questions, args)
        line = f"step {step:3}  reward {mean:.2f}  {time.perf_counter() - start:4.0f} s"
        if step % args.eval_every == 0 or step == args.steps:
            line += f"  accuracy {evaluate(policy, held_out, args.max_tokens):.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
