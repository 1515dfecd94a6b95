"""examples/rl_loop.py: its log-probs and masks against plain forward passes, and that it learns."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.examples.conftest import EXAMPLES

PATH = EXAMPLES / "rl_loop.py"


@pytest.fixture
def loop() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(PATH)))


@pytest.fixture
def policy(loop: SimpleNamespace, model_folder: Path) -> Any:
    torch.manual_seed(0)
    return loop.Policy(str(model_folder), torch.device("cpu"))


def test_it_is_one_readable_file() -> None:
    assert len(PATH.read_text().splitlines()) <= 250


def test_it_runs_and_prints_its_curve(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "2", "--epochs", "2", "--algorithm", "rloo", "--held-out", "4", "--model", str(model_folder)]
    monkeypatch.setattr(sys, "argv", [str(PATH), *words])
    runpy.run_path(str(PATH), run_name="__main__")
    before, first, last = capsys.readouterr().out.splitlines()
    assert before.startswith("before training  accuracy ")
    assert first.startswith("step   1  reward ") and "accuracy" not in first
    assert last.startswith("step   2  reward ") and "accuracy" in last


def questions(loop: SimpleNamespace) -> list[Any]:
    """Prompts of different lengths, so that the shorter one is padded."""
    return [loop.Question([{"role": "user", "content": text}], "a") for text in ("hm", "a longer question, 1 2 3")]


def test_logprobs_are_those_of_each_answer_alone(loop: SimpleNamespace, policy: Any) -> None:
    asked = questions(loop)
    answers, mask = policy.sample(policy.prompts(asked), 3, 6)
    found = policy.logprobs(policy.prompts(asked), 3, answers)
    for index, answer in enumerate(answers):
        (prompt,), _ = policy.prompts([asked[index // 3]])
        logits = policy.model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        torch.testing.assert_close(found[index][mask[index]], expected[mask[index]], atol=1e-4, rtol=1e-4)


def test_greedy_answers_are_those_of_generate(loop: SimpleNamespace, policy: Any) -> None:
    asked = questions(loop)
    answers, mask = policy.sample(policy.prompts(asked), 1, 8, greedy=True)
    for question, answer, shown in zip(asked, answers, mask, strict=True):
        prompt, attention = policy.prompts([question])
        expected = policy.model.generate(prompt, attention_mask=attention, max_new_tokens=8, do_sample=False)
        assert answer[shown].tolist() == expected[0, prompt.shape[1] :].tolist()


def test_an_answer_ends_with_its_end_token(loop: SimpleNamespace, policy: Any) -> None:
    answers, mask = policy.sample(policy.prompts(questions(loop)), 64, 8)
    end = policy.tokenizer.eos_token_id
    assert (answers == end).any()
    for answer, shown in zip(answers.tolist(), mask.tolist(), strict=True):
        length = answer.index(end) + 1 if end in answer else len(answer)
        assert shown == [place < length for place in range(len(answer))]


def test_the_largest_number_is_the_answer(loop: SimpleNamespace) -> None:
    question = loop.draw(random.Random(3))
    numbers = [int(word.strip(",?")) for word in question.messages[-1]["content"].split() if word.strip(",?").isdigit()]
    assert len(numbers) == 3 and question.answer == str(max(numbers))
    assert loop.reward(f" {question.answer}\n", question.answer) == 1
    assert loop.reward(f"It is {question.answer}", question.answer) == 0


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_its_training_step_teaches(algorithm: str, loop: SimpleNamespace, policy: Any) -> None:
    """The share of digits is raised, from that of a random model."""
    space = loop.train_step.__globals__
    space["reward"] = lambda reply, answer: sum(letter.isdigit() for letter in reply) / 4
    args = SimpleNamespace(algorithm=algorithm, group_size=16, max_tokens=4, epochs=1)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    means = [loop.train_step(policy, optimizer, questions(loop), args) for _ in range(20)]
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.3
