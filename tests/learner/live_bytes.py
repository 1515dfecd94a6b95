"""Bytes of tensors alive during a forward and backward pass, counted by torch's dispatcher, on any device: on the meta
device for models of any size, with flash attention as on a GPU."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covey.learner import attention
from covey.learner.attention import Layout
from covey.learner.packing import Packed, pack
from covey.learner.token_scores import TeacherInput, TokenQuery, score_tokens
from covey.models.loading import Reference
from covey.types import Sample, TeacherTop


class LiveBytes(TorchDispatchMode):
    """`now` and `peak`: bytes of all storages made since it was entered and still alive."""

    def __init__(self, existing: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "covey_learner.attend" in str(func):
            attention._state.layers += 1  # as the implementation on a GPU does
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:
            self.now -= self._live.pop(key)[1]
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._live and storage._cdata not in self._existing:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        return out


@dataclass(frozen=True)
class Measured:
    tokens: int
    held: int  # when the forward pass is over
    peak: int


def measure(
    model: Any,
    prompt: int,
    answers: list[int],
    *,
    chunk: int | None = None,
    reference: Any = None,
    teacher: Any = None,
    top: int = 0,
) -> Measured:
    """One group's forward and backward pass, with log-probs, and with the KL to a reference and to a teacher or to its
    `top` most likely tokens. On the meta device it uses flash attention. Gradients of weights are dropped as soon as
    they are made, as the learner does once it has added them to the masters'."""
    ids, lengths = (5,) * prompt, [length + 1 for length in answers]
    rows = [Sample(ids, (5,) * n, (True,) * n, (0.0,) * n, (0,) * n, i) for i, n in enumerate(lengths)]
    packed = pack(rows, [[*range(len(rows))]])
    if model.device.type == "meta":
        packed = on_meta(packed)
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if p.requires_grad]
    others = [model, *(other for other in (reference, teacher) if other is not None)]
    compared: dict[str, Any] = {"entropy_gradient": False, "logit_rows": chunk}
    query = TokenQuery(full_kl=reference is not None, teacher_kl=teacher is not None or top > 0)
    if teacher is not None:
        compared["teacher"] = TeacherInput(Reference(teacher), packed)
    elif top:
        count = len(packed.target_M)
        likely = TeacherTop(torch.arange(top).repeat(count, 1), torch.full((count, top), -math.log(2 * top)))
        compared["teacher"] = TeacherInput(top=likely)
    start = None if reference is None else Reference(reference)
    zeros = torch.zeros(len(packed.target_M), device=model.device)
    live = LiveBytes(tensor for other in others for tensor in (*other.parameters(), *other.buffers()))
    with attention.packed_attention(packed.layout), live:
        scores = score_tokens(model, packed, 1.0, query, zeros, None, start, **compared)
        held = live.now
        sum(x.sum() for x in (scores.logprobs, scores.full_kl, scores.teacher_kl) if x is not None).backward()
    for hook in hooks:
        hook.remove()
    return Measured(len(packed.ids_T), held, live.peak)


def _drop(weight: torch.Tensor) -> None:
    weight.grad = None


def on_meta(packed: Packed) -> Packed:
    """On the meta device, with the layout of a GPU."""
    layout = Layout(packed.layout.prompts, packed.layout.answers, (torch.zeros(1),) * 3)
    columns = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed) if f.name != "layout"}
    tensors = {name: column.to("meta") for name, column in columns.items() if column is not None}
    return dataclasses.replace(packed, layout=layout, **tensors)
