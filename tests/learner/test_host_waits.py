"""No operation between two micro-batches reads a value of the device: on a GPU each would wait for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from covey.algorithms import make
from covey.algorithms.aggregation import divide
from covey.algorithms.likelihood import Likelihood
from covey.config.schema import CriticConfig, LearnerConfig
from covey.learner import learner as learner_module
from covey.learner.learner import Learner
from covey.models.loading import set_checkpointing
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of

READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique"}


class Reads(TorchDispatchMode):
    """Operations that read values, or whose result's size depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in READS or by_mask:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def counts_on_the_host(*args: Any) -> Any:
    with _disable_current_modes():  # its batch is in CPU memory
        return divide(*args)


@pytest.mark.parametrize("name", ["grpo", "gvpo", "ppo", "gspo", "sft", "entropy", "checkpointing"])
def test_micro_batches_are_not_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "divide", counts_on_the_host)
    config = LearnerConfig(micro_batch_size=2, entropy_coef=0.1 * (name == "entropy"))
    critic = CriticConfig(shared=True) if name == "ppo" else None
    model = tiny_llama()
    if name == "checkpointing":
        set_checkpointing(model, True)
        monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("the random state is read"))
    learner = Learner(model, config, total_updates=1, critic=critic)
    algorithm: Any = Likelihood() if name == "sft" else make(name if name in ("gvpo", "ppo", "gspo") else "grpo")
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    if critic is not None:
        zeros = torch.zeros_like(batch.advantages_RT)
        batch = learner_module.replace(batch, values_RT=zeros, returns_RT=zeros)
        learner.critic.steps = 1  # past its warm-up
    accumulate, reads = learner._accumulate_gradients, Reads()

    def watched(*args: Any) -> Any:
        with reads:
            return accumulate(*args)

    monkeypatch.setattr(learner, "_accumulate_gradients", watched)
    learner.update(batch, algorithm)
    assert reads.found == []


def test_scoring_reads_its_results_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, reads = Learner(tiny_llama(), LearnerConfig(micro_batch_size=2), total_updates=1), Reads()
    rows = rows_of(2, 4)
    whole = Learner(learner.model, LearnerConfig(), total_updates=1).logprobs(rows, 1.0)
    with reads:
        found = learner.logprobs(rows, 1.0)
    assert reads.found == []
    torch.testing.assert_close(found, whole)
