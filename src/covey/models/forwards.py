"""Modules of a model with another forward function for a while: compiled, fused, or with given experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Each module runs with the forward function beside it in this context, and with its own after it."""
    replaced: list[Any] = []
    try:
        for module, forward in forwards:
            module.forward = forward
            replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.forward


def prepare_to_compile_layers() -> None:
    """Settings of torch for layers that share their code."""
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # a layer's index must not cause a recompilation
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
