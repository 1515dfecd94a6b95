"""GVPOTrainer: one GVPO step from prompts, completions and rewards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from covey import GVPOTrainer
from covey.algorithms.functional import GVPOLoss
from tests.conftest import byte_tokenizer, tiny_llama

PROMPTS = ["2 + 2 = ?", "capital of France?"]
COMPLETIONS = [["4", "Four", "2+2=4"], ["Paris", "Lyon", "I do not know"]]
REWARDS = [[1.0, 0.8, 0.9], [1.0, 0.0, 0.2]]


def pair() -> tuple[Any, Any, Any]:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer))
    reference = tiny_llama(vocabulary=len(tokenizer), seed=1)
    return model, reference, tokenizer


def logprobs(model: Any, tokenizer: Any, prompt: str, completion: str) -> torch.Tensor:
    """The log-prob of the completion and its end token, by one plain forward pass."""
    start = tokenizer(prompt)["input_ids"]
    ids = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
    found = torch.log_softmax(model(torch.tensor([start + ids])).logits[0], -1)[len(start) - 1 : -1]
    return found.gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_the_step_has_the_gradient_of_the_loss_on_completion_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, tokenizer = pair()
    plain = copy.deepcopy(model)
    trainer = GVPOTrainer(model, reference, tokenizer, beta=0.2, num_samples_per_prompt=3)
    monkeypatch.setattr(trainer.learner.optimizer, "step", lambda: (0.0, 0.0, True))
    metrics = trainer.train_step(PROMPTS, COMPLETIONS, REWARDS)
    pairs = [(p, c) for p, texts in zip(PROMPTS, COMPLETIONS, strict=True) for c in texts]
    pad = torch.nn.utils.rnn.pad_sequence
    ours = pad([logprobs(plain, tokenizer, p, c) for p, c in pairs], batch_first=True)
    with torch.no_grad():
        theirs = pad([logprobs(reference, tokenizer, p, c) for p, c in pairs], batch_first=True)
    loss = GVPOLoss(beta=0.2)(ours, theirs, torch.tensor(REWARDS).flatten(), [0, 0, 0, 1, 1, 1])
    loss.backward()
    assert metrics["gvpo/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad, atol=1e-5, rtol=1e-4)


def test_repeated_steps_raise_the_better_completions() -> None:
    model, _, tokenizer = pair()
    trainer = GVPOTrainer(model, copy.deepcopy(model), tokenizer, num_samples_per_prompt=3, lr=1e-3)
    with torch.no_grad():
        before = [float(logprobs(model, tokenizer, PROMPTS[1], c).sum()) for c in COMPLETIONS[1]]
    for _ in range(5):
        trainer.train_step(PROMPTS, COMPLETIONS, REWARDS)
    with torch.no_grad():
        after = [float(logprobs(model, tokenizer, PROMPTS[1], c).sum()) for c in COMPLETIONS[1]]
    assert after[0] - before[0] > after[1] - before[1]


def test_a_reward_function_scores_if_no_rewards_are_given() -> None:
    model, reference, tokenizer = pair()
    seen: list[tuple[str, str]] = []

    def score(prompt: str, completion: str) -> float:
        seen.append((prompt, completion))
        return float(len(completion))

    trainer = GVPOTrainer(model, reference, tokenizer, num_samples_per_prompt=3, reward_function=score)
    assert trainer.train_step(PROMPTS, COMPLETIONS)["gvpo/mean_reward"] == pytest.approx((1 + 4 + 5 + 5 + 4 + 13) / 6)
    assert seen[0] == (PROMPTS[0], "4")
    with pytest.raises(ValueError, match="reward_function"):
        GVPOTrainer(model, reference, tokenizer, num_samples_per_prompt=3).train_step(PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("completions", "rewards", "message"),
    [
        (COMPLETIONS[:1], REWARDS, "2 prompts, 1 lists of completions"),
        ([["a", "b"], ["a", "b", "c"]], REWARDS, "prompt 0: 2 completions and 3 rewards"),
        (COMPLETIONS, [[1.0], REWARDS[1]], "prompt 0: 3 completions and 1 rewards"),
    ],
)
def test_mismatched_shapes_are_refused(completions: Any, rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GVPOTrainer(*pair(), num_samples_per_prompt=3).train_step(PROMPTS, completions, rewards)


def test_one_sample_per_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        GVPOTrainer(*pair(), num_samples_per_prompt=1)
