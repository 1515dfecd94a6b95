"""A learner in a folder, and back: on any number of ranks.

    model/                               an ordinary model folder (or a peft adapter)
    optimizer.safetensors                moments, and float32 masters where the weights are half precision
    optimizer-00001-of-00002.safetensors the same where weights are shared out: a file of each rank
    critic.safetensors                   where there is a critic: its weights and its optimiser's state

A rank's file holds rows of each tensor; which, is written in its header as JSON: {"rows": {NAME: [first, last + 1]}},
and "columns" likewise for those of which it has not all columns. Who reads takes what it needs out of all files, so
that other ranks than those that wrote can go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.errors import RunFailed
from covey.learner.ranks import Ranks
from covey.learner.sharding import Block, Span, full_weights


class NonFiniteWeights(RunFailed):
    """Weights or optimiser state have become NaN or infinite: nothing could go on from a checkpoint of them."""


def check_finite(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raises `NonFiniteWeights` with the name of the first tensor that is not finite, the same on all ranks: each has
    tensors of the same names in the same order."""
    names = list(tensors)
    bad = next((place for place, name in enumerate(names) if not _is_finite(tensors[name])), len(names))
    first = ranks.smallest(bad)
    if first < len(names):
        raise NonFiniteWeights(
            f"no checkpoint was written: {names[first]} is not finite\n"
            "  likely causes: learner.lr (or critic.lr) too high, or float16 (try model.dtype=bfloat16)"
        )


def _is_finite(tensor: Tensor) -> bool:
    """By the extremes, which a NaN turns into NaN: `isfinite` would make a copy."""
    return not tensor.numel() or all(bool(extreme.isfinite()) for extreme in tensor.detach().aminmax())


Blocks = Mapping[str, Block]  # of weights


def save_model(model: Any, folder: Path, ranks: Ranks, *, sharded: bool) -> None:
    """Written by the first rank; the others hand it their rows, one weight at a time."""
    adapter = hasattr(model, "get_base_model")  # then the rest of the model is where it was loaded from
    if not sharded:
        if ranks.first:
            model.save_pretrained(folder)
            if adapter:
                _sort_modules(folder / "adapter_config.json")
        return
    weights: dict[str, Tensor] = {}
    for name, weight in full_weights(model, trained_only=adapter):
        if ranks.first:
            weights[name] = weight.cpu()
    if ranks.first:
        dtype = next(iter(weights.values())).dtype
        model.save_pretrained(folder, state_dict=weights)
        if adapter:
            _sort_modules(folder / "adapter_config.json")
        else:
            _say_precision(folder / "config.json", dtype)


def _say_precision(path: Path, dtype: torch.dtype) -> None:
    """Of the weights in the file: the shards in memory may be more precise."""
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _sort_modules(path: Path) -> None:
    """peft keeps the names of the modules that it changed in a set: every process would write them in another order."""
    config = json.loads(path.read_text())
    if isinstance(config.get("target_modules"), list):
        config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_state(
    tensors: Mapping[str, Tensor], blocks: Blocks, folder: Path, ranks: Ranks, twice: Set[str] = frozenset()
) -> None:
    """`twice`: weights that another rank writes the same of."""
    if not blocks:
        if ranks.first:
            save_tensors(tensors, folder / "optimizer.safetensors")
        return
    tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[2] not in twice}
    held = {name: blocks[weight] for name in tensors if (weight := weight_of(name))}
    about = {
        "rows": json.dumps({name: rows for name, (rows, _) in held.items()}),
        "columns": json.dumps({name: columns for name, (_, columns) in held.items() if columns is not None}),
    }
    save_tensors(tensors, folder / f"optimizer-{ranks.rank + 1:05d}-of-{ranks.world:05d}.safetensors", about)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, about)


def load_tensors(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(path)
    return found


def load_state(folder: Path, blocks: Blocks) -> dict[str, Tensor]:
    """What the optimiser of this rank needs: every tensor whole, or the block of it that is asked for."""
    with ExitStack() as held_open:
        paths = sorted(folder.glob("optimizer*.safetensors"))
        files = [_File.of(held_open.enter_context(safe_open(path, framework="pt"))) for path in paths]
        names = dict.fromkeys(name for file in files for name in file.names)
        return {name: _read(name, files, blocks.get(weight_of(name) or "")) for name in names}


@dataclass(frozen=True)
class _File:
    """A file of a rank, or the only one."""

    handle: Any
    names: Sequence[str]
    rows: Mapping[str, Span]
    columns: Mapping[str, Span]

    @classmethod
    def of(cls, handle: Any) -> _File:
        about = handle.metadata() or {}
        rows, columns = (json.loads(about.get(key, "{}")) for key in ("rows", "columns"))
        return cls(handle, sorted(handle.keys()), rows, columns)

    def block(self, name: str) -> tuple[Span, Span | None, tuple[int, ...]]:
        """Rows and columns that the file has of a tensor, and the shape of that part."""
        shape = tuple(self.handle.get_slice(name).get_shape())
        columns = tuple(self.columns[name]) if name in self.columns else None
        return tuple(self.rows.get(name, (0, shape[0]))), columns, shape  # type: ignore[return-value]


def _read(name: str, files: Sequence[_File], wanted: Block | None) -> Tensor:
    files = [file for file in files if name in file.names]
    if not files[0].handle.get_slice(name).get_shape():  # a number
        number: Tensor = files[0].handle.get_tensor(name)
        return number
    blocks = [file.block(name) for file in files]
    rows, columns = wanted or ((0, max(rows[1] for rows, _, _ in blocks)), None)
    if columns is None and any(held is not None for _, held, _ in blocks):
        columns = (0, max(held[1] for _, held, _ in blocks if held is not None))
    found: Tensor | None = None
    for file, (held_rows, held_columns, shape) in zip(files, blocks, strict=True):
        into, out = _overlap(rows, held_rows)
        part = file.handle.get_slice(name)[out]
        within = slice(None)
        if columns is not None:
            within, out = _overlap(columns, held_columns or (0, shape[1]))
            part = part[:, out]
        if found is None:
            size = (rows[1] - rows[0], *((columns[1] - columns[0], *shape[2:]) if columns else shape[1:]))
            found = torch.empty(size, dtype=part.dtype)
        if columns is None:
            found[into] = part
        else:
            found[into, within] = part
    assert found is not None
    return found


def _overlap(wanted: Span, held: Span) -> tuple[slice, slice]:
    """Where what both have lies in what is wanted, and in what is held."""
    first, last = max(wanted[0], held[0]), min(wanted[1], held[1])
    last = max(first, last)
    return slice(first - wanted[0], last - wanted[0]), slice(first - held[0], last - held[0])


def weight_of(name: str) -> str | None:
    """The weight that the rows of a tensor are rows of; None for a number that has none."""
    kind, _, weight = name.partition("/")
    return None if kind == "step" else weight
