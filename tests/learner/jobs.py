"""Jobs for the ranks of a test, which a single process can run too, so that results can be compared."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from covey.algorithms import make
from covey.algorithms.distill import Teacher
from covey.config.schema import CriticConfig, LearnerConfig
from covey.learner.learner import Learner
from covey.learner.parallel import Ranks, local_part, tensor_parallel_dim
from covey.models.loading import Reference
from covey.protocols import Needs
from covey.types import Batch, Samples
from covey.weights.names import full_weights, named_weights
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of


def tiny_qwen3(seed: int, dtype: torch.dtype, **changes: Any) -> Any:
    """Queries and keys go through a norm whose weights all heads share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**sizes | heads | changes)).to(dtype).eval()


def tiny_gemma3(seed: int, dtype: torch.dtype, **changes: Any) -> Any:
    """A vision-language model, trained on text alone. Its vision tower comes first and has layers too."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = sizes | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    text |= {"max_position_embeddings": 512, "sliding_window": 6}
    vision = sizes | {"num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    marks = {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62}
    torch.manual_seed(seed)
    config = Gemma3Config(text_config=text | changes, vision_config=vision, **marks)
    return Gemma3ForConditionalGeneration(config).to(dtype).eval()


FAMILIES = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}


@dataclass(frozen=True)
class Case:
    """A learner and its data."""

    algorithm: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)
    parallel: str = "ddp"
    dtype: torch.dtype = torch.float64
    lora: int = 0
    reference: bool = False
    teacher: Teacher | None = None
    family: str = "llama"
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    groups: int = 3
    critic: CriticConfig | None = None

    def random(self, seed: int) -> Any:
        return FAMILIES[self.family](dtype=self.dtype, initializer_range=0.08, seed=seed, **self.model)

    def policy(self, folder: Path | None = None) -> Any:
        """A random start, or the weights of a checkpoint."""
        import peft
        from transformers import AutoModelForCausalLM

        # Small weights: the norms of transformers compute in float32, so a gradient is only as exact as it is small.
        model = self.random(0)
        if self.lora and folder is not None:
            model = peft.PeftModel.from_pretrained(model, folder / "model", is_trainable=True)
        elif self.lora:
            torch.manual_seed(5)
            settings = peft.LoraConfig(r=self.lora, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, settings).to(self.dtype)
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # they start at zero, and would hide the first gradients of A
                    torch.nn.init.normal_(weight, std=0.05)
        elif folder is not None:
            model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=self.dtype, attn_implementation="sdpa")
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.lora:
                model.enable_input_require_grads()
        return model.train(self.checkpointing)

    def learner(self, ranks: Ranks, folder: Path | None = None) -> Learner:
        ranks = ranks.with_tensor_parallel(self.settings.get("tensor_parallel", 1))
        policy, reference = self.policy(folder), None
        if self.reference:
            reference = Reference(policy if self.lora else self.random(1))
        config = LearnerConfig(lr=1e-2, parallel=self.parallel, entropy_coef=0.01, **self.settings)
        own = self.critic is not None and not self.critic.shared
        backbone = tiny_llama(dtype=self.dtype, initializer_range=0.08, seed=2) if own else None
        more: dict[str, Any] = {"critic": self.critic, "critic_backbone": backbone, "ranks": ranks}
        if self.teacher is not None:
            more["teacher"] = Reference(self.random(1))
        learner = Learner(policy, config, total_updates=10, reference=reference, **more)
        if learner.critic is not None:
            learner.critic.steps = 1  # the first training step has started: no warm-up
        return learner

    def batch(self, number: int) -> Batch:
        dtype = torch.promote_types(self.dtype, torch.float32)
        batch = batch_of(rows_of(self.groups, 4, seed=number, gaps=True), 4, dtype=dtype, seed=number)
        if self.critic is None:
            return batch
        return replace(batch, returns_RT=batch.advantages_RT, values_RT=torch.zeros_like(batch.advantages_RT))

    def steps(self, learner: Learner, numbers: range) -> list[dict[str, float]]:
        algorithm = replace(make(self.algorithm, **self.options), teacher=self.teacher)
        return [learner.update(self.batch(number), algorithm)[0] for number in numbers]


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.cpu().clone() for name, weight in full_weights(learner.model)}


def sharded_parts(ranks: Ranks, case: Case) -> tuple[list[str], set[str]]:
    """The modules that are gathered as one, and the weights that tensor parallelism splits."""
    from torch.distributed.fsdp import FSDPModule

    model = case.learner(ranks).model
    gathered = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return gathered, {name for name, weight in model.named_parameters() if tensor_parallel_dim(weight) is not None}


def train(ranks: Ranks, case: Case) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], torch.Tensor]:
    """Three steps: the weights, the metrics, and log-probs afterwards, also under the reference if there is one."""
    learner = case.learner(ranks)
    metrics = case.steps(learner, range(3))
    scores = learner.logprobs(case.batch(7).rows, 0.7)
    if learner.reference is not None:
        with learner.reference.active() as model:
            scores = torch.cat([scores, learner.logprobs(case.batch(7).rows, 0.7, model)])
    return weights_of(learner), metrics, scores


def train_and_save(ranks: Ranks, case: Case, folder: Path) -> dict[str, Any]:
    learner = case.learner(ranks)
    case.steps(learner, range(2))
    learner.save(folder)
    return learner.counters()


def resume_training(ranks: Ranks, case: Case, folder: Path, counters: dict[str, Any]) -> dict[str, torch.Tensor]:
    learner = case.learner(ranks, folder)
    learner.restore(folder, counters)
    case.steps(learner, range(2, 4))
    return weights_of(learner)


def resave(ranks: Ranks, case: Case, folder: Path, counters: dict[str, Any], out: Path) -> None:
    learner = case.learner(ranks, folder)
    learner.restore(folder, counters)
    learner.save(out)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for path in (folder / "model").glob("*.safetensors") for name, tensor in load_file(path).items()
    }


def broken_update(ranks: Ranks, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """The weights before and after an update in which one row has an infinite advantage."""
    learner, batch = case.learner(ranks), case.batch(0)
    before = weights_of(learner)
    batch.advantages_RT[0] = math.inf
    metrics, _ = learner.update(batch, make("grpo"))
    return before, weights_of(learner), metrics["optim/skipped"]


def overflow(ranks: Ranks, case: Case) -> tuple[float, bool]:
    """The scale of the loss after an update in which the first rank alone saw an infinite gradient, and whether the
    weights were updated."""
    learner = case.learner(ranks)
    learner.scaler.scale(torch.ones(()))
    optimizer = learner.optimizer
    for weight in optimizer.working.values() if optimizer.sharded else optimizer.masters.values():
        weight.grad = torch.zeros_like(weight)
        if ranks.is_first:
            local_part(weight.grad).fill_(math.inf)
    _, _, updated = optimizer.step()
    learner.scaler.update()
    return learner.scaler.get_scale(), updated


def published(ranks: Ranks, case: Case) -> dict[str, torch.Tensor]:
    """The weights that a separate engine receives after an update."""
    learner = case.learner(ranks)
    case.steps(learner, range(1))
    return {name: weight.clone() for name, weight in named_weights(learner.weights())}


def from_settings(ranks: Ranks, settings: list[str], folder: Path | None) -> dict[str, Any]:
    """The learner that a command line describes, after an update; saved in `folder`."""
    from covey.algorithms import algorithm_schemas
    from covey.app.models import make_learner
    from covey.app.prepare import prepare
    from covey.config import compose
    from covey.training.samples import minibatches

    prepared = prepare(compose(settings, algorithms=algorithm_schemas()))
    learner = make_learner(prepared, None, ranks)
    rows = rows_of(2, 4, vocabulary=40)
    width = max(len(row.response_ids) for row in rows)
    mask = torch.tensor([[*row.mask, *[False] * (width - len(row.mask))] for row in rows])
    samples = Samples(
        rows=tuple(rows),
        group_N=torch.arange(8) // 4,
        rewards={"reward": torch.arange(8.0)},
        weights={"reward": 1.0},
        longest_N=mask.sum(1),
        truncated_N=torch.zeros(8, dtype=torch.bool),
        episode_R=torch.arange(8),
        mask_RT=mask,
        old_logprobs_RT=torch.where(mask, -3.7, 0.0),
    )
    samples = learner.annotate(samples, prepared.algorithm.needs)
    for batch in minibatches(samples, prepared.algorithm.advantages(samples), groups_per_batch=None, epochs=1):
        learner.update(batch, prepared.algorithm)
    if folder is not None:
        learner.save(folder)
    return {"weights": weights_of(learner), "sharded": learner.sharded, "ref_logprobs": samples.ref_logprobs_RT}


def reference_course(ranks: Ranks, case: Case, steps: range, folder: Path, save_after: int) -> list[torch.Tensor]:
    """Log-probs under a reference that moves every two steps, in each step; saved in `folder` after so many steps."""
    learner = case.learner(ranks)
    found = []
    for step in steps:
        found.append(_moved(learner, case, step))
        if step + 1 == save_after:
            learner.save(folder)
            if ranks.is_first:
                (folder / "counters.json").write_text(json.dumps(learner.counters()))
    return found


def resume_moving(ranks: Ranks, case: Case, steps: range, folder: Path, *, moving: bool = True) -> list[torch.Tensor]:
    learner = case.learner(ranks, folder)
    learner.restore(folder, json.loads((folder / "counters.json").read_text()), moving=moving)
    return [_moved(learner, case, step, every=2 if moving else 0) for step in steps]


def _moved(learner: Learner, case: Case, step: int, every: int = 2) -> torch.Tensor:
    batch = case.batch(step)
    samples = Samples(
        rows=batch.rows,
        group_N=batch.group_N,
        rewards={},
        weights={},
        longest_N=batch.length_N,
        truncated_N=torch.zeros(len(batch.group_N), dtype=torch.bool),
        episode_R=batch.episode_R,
        mask_RT=batch.mask_RT,
        old_logprobs_RT=batch.old_logprobs_RT,
    )
    found = learner.annotate(samples, Needs(reference=True, reference_every=every)).ref_logprobs_RT
    assert found is not None
    learner.update(batch, make("grpo"))
    fixed = case.batch(0)
    assert learner.reference is not None
    with learner.reference.active() as model:
        return learner.logprobs(fixed.rows, 1.0, model)
