"""The engine of a policy that is loaded: in this process, or vLLM beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from covey.cli.checks import engine_gpus, shares_gpu
from covey.cli.learner import Parts
from covey.protocols import RolloutEngine


def make_engine(prepared: Parts, policy: Any, *, log: Path | None = None, shared: bool | None = None) -> RolloutEngine:
    """The engine of a policy that is loaded. `log` is where vLLM's chatter goes. `shared`: whether vLLM is on the
    learner's GPU; None: what the settings say."""
    from covey.rollout.embedded import EmbeddedEngine

    source = prepared.model
    assert source is not None
    if prepared.config.rollout.name == "vllm":
        return _make_vllm(prepared, policy, log or Path(tempfile.mkdtemp(prefix="covey-")) / "vllm.log", shared)
    return EmbeddedEngine(
        policy,
        eos_ids=source.eos_ids(),
        decode=source.tokenizer.decode,
        max_sequences=prepared.config.rollout.max_sequences,
        context_length=prepared.config.model.context_length or source.context_length,
        memory=prepared.config.rollout.memory,
        eager=prepared.config.rollout.eager,
        drains=prepared.config.mode.update == "drain",
    )


def _make_vllm(prepared: Parts, policy: Any, log: Path, shared: bool | None) -> RolloutEngine:
    from covey.rollout.vllm import VllmEngine, VllmSettings

    source, config = prepared.model, prepared.config
    assert source is not None
    rollout, gpus = config.rollout, engine_gpus(config)
    colocated = shares_gpu(config, gpus) if shared is None else shared
    settings = VllmSettings(
        model=source.path,
        eos_ids=source.eos_ids(),
        dtype=str(policy.get_input_embeddings().weight.dtype).removeprefix("torch."),
        devices=gpus,
        tensor_parallel=rollout.tensor_parallel,
        context_length=config.model.context_length,
        max_sequences=rollout.max_sequences,
        memory=rollout.memory,
        eager=rollout.eager,
        sleeps=rollout.sleep and colocated,
        trust_remote_code=config.model.trust_remote_code,
        revision=source.revision,
    )
    here = policy.get_input_embeddings().weight.device.type == "cuda"  # elsewhere the policy is another process's
    return VllmEngine(settings, log=log, same_gpu=colocated and len(gpus) == 1 and here)
