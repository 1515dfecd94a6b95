"""Other libraries, each at its best settings: TRL's GRPOTrainer, transformers' generate, vLLM.

TRL: `generate` samples the whole step at once, no reference model (beta=0), one optimiser step per batch, fused AdamW,
no gradient checkpointing, the given micro-batch, no logging, saving or evaluation. In bfloat16, its weights and its
optimiser state are bfloat16, its fastest setting. Covey keeps float32 masters.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.agents import AgentTurn, play_agents
from kit.measure import now, reset_peak
from kit.models import write_config
from kit.pipeline import Timed, score


def trl_steps(model: Any, tokenizer: Any, settings: dict[str, Any]) -> tuple[list[Timed], set[tuple[int, ...]]]:
    """Timed steps after the warm-up, and the prompts as the trainer tokenised them."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[Timed] = []
    prompts: set[tuple[int, ...]] = set()
    begun, sampling, tokens = 0.0, 0.0, 0

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            nonlocal sampling, tokens
            start = now()
            found = super()._generate_and_score_completions(inputs)
            sampling = now() - start
            tokens = int(found["completion_mask"].sum())
            if not prompts:  # once, during the warm-up
                rows = zip(found["prompt_ids"].tolist(), found["prompt_mask"].tolist(), strict=True)
                prompts.update(tuple(i for i, kept in zip(ids, mask, strict=True) if kept) for ids, mask in rows)
            return found

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            nonlocal begun
            if state.global_step == settings["warmup"]:
                reset_peak()
            begun = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(Timed(sampling, now() - begun - sampling, tokens))

    def checksum(completions: Any, **_: Any) -> list[float]:
        return [score(messages[-1]["content"]) for messages in completions]

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in settings["prompts"]]})
    with tempfile.TemporaryDirectory() as folder:
        trainer = Watched(
            model,
            reward_funcs=checksum,
            args=GRPOConfig(**trl_arguments(settings, folder)),
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return steps[settings["warmup"] :], prompts


def trl_arguments(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    answers = len(settings["prompts"]) * settings["group"]
    micro_batch = min(settings["micro_batch"], answers)
    assert answers % micro_batch == 0, f"micro-batches of {micro_batch} do not divide {answers} answers"
    length = settings["max_tokens"]
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": answers // micro_batch,
        "num_generations": settings["group"],
        "max_completion_length": length,
        # Suppresses the end of an answer; TRL cuts an answer off where it sees one.
        "generation_kwargs": {"min_new_tokens": length} if settings["fixed"] else None,
        "max_steps": settings["warmup"] + settings["steps"],
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "grpo",
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": False,  # no autocast: the weights themselves have the precision that is measured
        "use_cpu": settings["device"] == "cpu",
        "use_vllm": False,
        "torch_compile": False,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


class Generate:
    """transformers' `generate`, without log-probs: it could only return all logits of all steps."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor(prompts, device=self.model.device)
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def vllm_settings(name: str, folder: str, *, max_tokens: int, max_sequences: int) -> dict[str, Any]:
    """vLLM with made-up weights of the shape, its CUDA graphs captured and its layers compiled. Prefixes are cached, by
    default."""
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # or it would not start
    return {
        "model": str(write_config(name, Path(folder))),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max_tokens,
        "max_num_seqs": max_sequences,
        "gpu_memory_utilization": 0.85,
        "seed": 0,
    }


def vllm_sampling(tokens: int, logprobs: bool) -> Any:
    """Exactly this many tokens: the end of an answer is ignored."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if logprobs else None,  # 0: of the sampled token alone
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


class Vllm:
    """All requests at once, through `LLM`."""

    def __init__(self, name: str, *, max_tokens: int, max_sequences: int) -> None:
        from vllm import LLM

        self.folder = tempfile.TemporaryDirectory()  # lives as long as the engine does
        self.llm = LLM(**vllm_settings(name, self.folder.name, max_tokens=max_tokens, max_sequences=max_sequences))

    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int | Sequence[int], logprobs: bool) -> int:
        """Tokens that were sampled: `tokens` of each prompt."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        found = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            [vllm_sampling(length, logprobs) for length in lengths],
            use_tqdm=False,
        )
        return sum(len(answer.outputs[0].token_ids) for answer in found)


class AsyncVllm:
    """Requests at any time, through `AsyncLLM`, the engine of vLLM's server. Returns log-probs."""

    def __init__(self, name: str, *, max_tokens: int, max_sequences: int) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.folder = tempfile.TemporaryDirectory()  # lives as long as the engine does
        settings = vllm_settings(name, self.folder.name, max_tokens=max_tokens, max_sequences=max_sequences)
        self.loop = asyncio.Runner()
        self.requests = itertools.count()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

        self.engine = self.loop.run(start())

    def agents(self, work: Sequence[Sequence[AgentTurn]]) -> int:
        return self.loop.run(play_agents(self._generate, work))

    async def _generate(self, ids: Sequence[int], tokens: int, seed: int) -> Sequence[int]:
        request, prompt = str(next(self.requests)), {"prompt_token_ids": list(ids)}
        async for done in self.engine.generate(prompt, vllm_sampling(tokens, logprobs=True), request):
            answer = done.outputs[0]
        assert len(answer.logprobs) == len(answer.token_ids)
        return list(answer.token_ids)

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.close()
