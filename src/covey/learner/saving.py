"""A learner in a folder, and back: on any number of ranks.

    model/                               an ordinary model folder (or a peft adapter)
    optimizer.safetensors                moments, and float32 masters where the weights are half precision
    optimizer-00001-of-00002.safetensors the same where weights are shared out: a file of each rank
    critic.safetensors                   where there is a critic: its weights and its optimiser's state

A rank's file holds rows of each tensor; which, is written in its header as JSON: {"rows": {NAME: [first, last + 1]}}.
Who reads takes the rows it needs out of all files, so that other ranks than those that wrote can go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.learner.ranks import Ranks
from covey.learner.sharding import full_weights

Rows = Mapping[str, tuple[int, int]]  # of weights: first and last + 1


def save_model(model: Any, folder: Path, ranks: Ranks, *, sharded: bool) -> None:
    """Written by the first rank; the others hand it their rows, one weight at a time."""
    if not sharded:
        if ranks.first:
            model.save_pretrained(folder)
        return
    adapter = hasattr(model, "get_base_model")  # then the rest of the model is where it was loaded from
    weights: dict[str, Tensor] = {}
    for name, weight in full_weights(model, trained_only=adapter):
        if ranks.first:
            weights[name] = weight.cpu()
    if ranks.first:
        dtype = next(iter(weights.values())).dtype
        model.save_pretrained(folder, state_dict=weights)
        if not adapter:
            _say_precision(folder / "config.json", dtype)


def _say_precision(path: Path, dtype: torch.dtype) -> None:
    """Of the weights in the file: the shards in memory may be more precise."""
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_state(tensors: Mapping[str, Tensor], rows: Rows, folder: Path, ranks: Ranks) -> None:
    if not rows:
        if ranks.first:
            save_tensors(tensors, folder / "optimizer.safetensors")
        return
    held = {name: rows[weight] for name in tensors if (weight := weight_of(name))}
    path = folder / f"optimizer-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors"
    save_tensors(tensors, path, {"rows": json.dumps(held)})


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, about)


def load_tensors(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(path)
    return found


def load_state(folder: Path, rows: Rows) -> dict[str, Tensor]:
    """What the optimiser of this rank needs: every tensor whole, or the rows of it that are asked for."""
    with ExitStack() as held_open:
        paths = sorted(folder.glob("optimizer*.safetensors"))  # in the order of the ranks, and so of rows
        files = [held_open.enter_context(safe_open(path, framework="pt")) for path in paths]
        names = dict.fromkeys(name for file in files for name in file.keys())  # noqa: SIM118
        return {name: _read(name, files, rows.get(weight_of(name) or "")) for name in names}


def _read(name: str, files: Sequence[Any], wanted: tuple[int, int] | None) -> Tensor:
    parts: list[Tensor] = []
    for file in files:
        about = json.loads((file.metadata() or {}).get("rows", "{}"))
        if name not in about:  # a file that holds tensors whole
            whole: Tensor = file.get_tensor(name) if wanted is None else file.get_slice(name)[slice(*wanted)]
            return whole
        first, last = about[name]
        start, stop = wanted or (first, last)
        start, stop = max(start, first), min(stop, last)
        parts.append(file.get_slice(name)[start - first : max(start, stop) - first])
    return torch.cat(parts)


def weight_of(name: str) -> str | None:
    """The weight that the rows of a tensor are rows of; None for a number that has none."""
    kind, _, weight = name.partition("/")
    return None if kind == "step" else weight
