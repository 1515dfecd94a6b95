"""Routing replay for mixtures of experts: the experts that the policy chose at the start of a step are used in all of
its updates.

Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071, section 5.3

A small update of the weights may send a token to other experts, so that its ratio to the old policy jumps. With replay,
the first pass of a step records the experts of every token; later passes take these and compute their weights from
the current router, through which gradients flow as before.

Deviations: the routes are the learner's at the start of the step, not those of an engine while it sampled.
Shapes: T tokens of a packed sequence, L routers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covey.errors import InputError
from covey.learner.packing import MicroBatch, row_indices
from covey.models.families import ROUTERS
from covey.models.forwards import replaced_forwards
from covey.types import Sample

Segment = tuple[tuple[int, ...], tuple[int, ...] | None]  # a prompt, and the response to it (None: the prompt itself)


class RoutingReplay:
    def __init__(self, model: Any) -> None:
        self.routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
        if not self.routers:
            kind = getattr(model.config, "model_type", type(model).__name__)
            raise InputError(
                f"learner.replay_routing: {kind} models have no routers whose choices Covey can replay\n"
                "  remove it; docs/models.md lists those that have"
            )
        self.routes: dict[Segment, Tensor] = {}  # [tokens, L, K]
        self.recording = False
        self.is_suspended = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Passes in this context record routes and forget those of the step before."""
        self.routes, self.recording = {}, True
        try:
            yield
        finally:
            self.recording = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Passes in this context, of a reference or a teacher that shares the routers, choose experts by themselves."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    @contextmanager
    def active(self, rows: Sequence[Sample], micro_batch: MicroBatch) -> Iterator[None]:
        """Record or replay the routes of a micro-batch; neither if none were recorded. Open until the backward pass is
        over, which may compute layers again."""
        segments = _segments(rows, micro_batch)
        if not self.recording and not self.routes:
            yield
            return
        given: Sequence[Tensor | None] = [None] * len(self.routers)
        if not self.recording:
            device = next(self.routers[0].parameters()).device
            routes_TLK = torch.cat([self.routes[segment] for segment, _ in segments]).to(device, torch.int64)
            given = routes_TLK.unbind(1)
        with ExitStack() as patched:
            chosen = [
                patched.enter_context(self._patched(router, one))
                for router, one in zip(self.routers, given, strict=True)
            ]
            yield
        if self.recording:
            routes_TLK = torch.stack([one[-1] for one in chosen], 1).to("cpu", torch.int16)
            parts = routes_TLK.split([length for _, length in segments])
            self.routes |= {segment: part for (segment, _), part in zip(segments, parts, strict=True)}

    @contextmanager
    def _patched(self, router: Any, given: Tensor | None) -> Iterator[list[Tensor]]:
        """Within this context the router takes the `given` experts; without, its own, which are added to the list."""
        forward, chosen = router.forward, list[Tensor]()

        def with_routes(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self.is_suspended else _TopK(given, chosen):
                return forward(*args, **kwargs)

        with replaced_forwards([(router, with_routes)]):
            yield chosen


def _segments(rows: Sequence[Sample], micro_batch: MicroBatch) -> list[tuple[Segment, int]]:
    """The segments of a packed sequence with their lengths, in its order (packing.py)."""
    prompts = [rows[group[0]].prompt_ids for group in micro_batch]
    answers = [rows[index] for index in row_indices(micro_batch)]
    return [
        *(((prompt, None), len(prompt)) for prompt in prompts),
        *(((row.prompt_ids, row.response_ids), max(len(row.response_ids) - 1, 0)) for row in answers),
    ]


class _TopK(TorchFunctionMode):
    """Replaces the result of torch.topk, by which a router chooses experts, or keeps it."""

    def __init__(self, given: Tensor | None, chosen: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.chosen = chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        if self.given is not None:
            return torch.return_types.topk((args[0].gather(-1, self.given), self.given))
        found = func(*args, **(kwargs or {}))
        self.chosen.append(found.indices.detach())
        return found


def replaying(replay: RoutingReplay | None, rows: Sequence[Sample], micro_batch: MicroBatch) -> Any:
    return nullcontext() if replay is None else replay.active(rows, micro_batch)


def suspending(replay: RoutingReplay | None) -> Any:
    return nullcontext() if replay is None else replay.suspended()
