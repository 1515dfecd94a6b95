"""GVPO on completions you already have: one optimiser step from prompts, completions and rewards.

    trainer = GVPOTrainer(model, ref_model, tokenizer, beta=0.1, num_samples_per_prompt=4)
    metrics = trainer.train_step(prompts, completions, rewards)

Works on any pair of Hugging Face causal models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from covey.algorithms import make
from covey.algorithms.ops import make_batch
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.protocols import Metrics
from covey.types import Sample

RewardFunction = Callable[[str, str], float]


class GVPOTrainer:
    def __init__(
        self,
        model: Any,
        ref_model: Any,
        tokenizer: Any,
        beta: float = 0.1,
        num_samples_per_prompt: int = 4,
        *,
        lr: float = 1e-6,
        reward_function: RewardFunction | None = None,
        max_grad_norm: float = 1.0,
    ) -> None:
        if num_samples_per_prompt < 2:
            raise ValueError("num_samples_per_prompt must be at least 2: GVPO compares completions of one prompt")
        self.tokenizer = tokenizer
        self.ref_model = ref_model.requires_grad_(False).eval()
        self.num_samples_per_prompt = num_samples_per_prompt
        self.reward_function = reward_function
        self.algorithm = make("gvpo", beta=beta, reference="initial")
        config = LearnerConfig(lr=lr, grad_clip=max_grad_norm)
        self.learner = Learner(model.eval(), config, total_updates=1)

    def train_step(
        self,
        prompts: Sequence[str],
        completions: Sequence[Sequence[str]],
        rewards: Sequence[Sequence[float]] | None = None,
    ) -> Metrics:
        """One update. `completions[i]` and `rewards[i]` belong to `prompts[i]`; without rewards the trainer's
        reward_function scores each completion."""
        if rewards is None:
            if self.reward_function is None:
                raise ValueError("pass rewards to train_step, or reward_function=f(prompt, completion) to GVPOTrainer")
            score = self.reward_function
            rewards = [[score(p, text) for text in texts] for p, texts in zip(prompts, completions, strict=True)]
        self._check(prompts, completions, rewards)
        pairs = [(prompt, text) for prompt, texts in zip(prompts, completions, strict=True) for text in texts]
        rows = [self._row(prompt, text, episode) for episode, (prompt, text) in enumerate(pairs)]
        ref_RT = self.learner.logprobs(rows, 1.0, self.ref_model)
        mask_RT = torch.zeros_like(ref_RT, dtype=torch.bool)
        for index, row in enumerate(rows):
            mask_RT[index, : len(row.response_ids)] = True
        batch = make_batch(
            rows=tuple(rows),
            group_N=torch.tensor([group for group, texts in enumerate(completions) for _ in texts]),
            rewards_N=torch.tensor([r for row in rewards for r in row], dtype=torch.float32).to(ref_RT.dtype),
            episode_R=torch.arange(len(rows)),
            mask_RT=mask_RT,
            old_logprobs_RT=ref_RT,  # the completions were not sampled by the policy: ratios are to the reference
            ref_logprobs_RT=ref_RT,
            advantages_RT=torch.zeros_like(ref_RT),
        )
        metrics, _ = self.learner.update(batch, self.algorithm)
        return metrics

    def _row(self, prompt: str, completion: str, episode: int) -> Sample:
        """Prompt and completion are tokenised separately, which keeps the boundary between them. The end token is part
        of the completion."""
        prompt_ids = tuple(self.tokenizer(prompt)["input_ids"])
        ids = tuple(self.tokenizer(completion, add_special_tokens=False)["input_ids"])
        if self.tokenizer.eos_token_id is not None:
            ids += (self.tokenizer.eos_token_id,)
        if not prompt_ids or not ids:
            raise ValueError(
                f"{'prompt' if not prompt_ids else 'completion'} without tokens: {prompt!r} {completion!r}"
            )
        return Sample(prompt_ids, ids, (True,) * len(ids), (0.0,) * len(ids), (0,) * len(ids), episode)

    def _check(
        self, prompts: Sequence[str], completions: Sequence[Sequence[str]], rewards: Sequence[Sequence[float]]
    ) -> None:
        if not len(prompts) == len(completions) == len(rewards):
            raise ValueError(
                f"{len(prompts)} prompts, {len(completions)} lists of completions, {len(rewards)} lists of rewards"
            )
        for number, (texts, scores) in enumerate(zip(completions, rewards, strict=True)):
            if len(texts) != self.num_samples_per_prompt or len(scores) != len(texts):
                raise ValueError(
                    f"prompt {number}: {len(texts)} completions and {len(scores)} rewards, "
                    f"but num_samples_per_prompt={self.num_samples_per_prompt}"
                )
