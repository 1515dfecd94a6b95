"""Saving and restoring a learner, on any number of ranks, and exporting its model.

    model/                               an ordinary model folder (or a peft adapter)
    optimizer.safetensors                moments, float32 masters if the weights are half precision, and the reference
                                         if it moves
    optimizer-00001-of-00002.safetensors the same for sharded weights: one file per rank
    critic.safetensors                   weights and optimiser state of the critic, if there is one

A rank's file holds some rows of each tensor. Its header says which, as JSON: {"rows": {NAME: [first, last + 1]}}, and
"columns" likewise for tensors of which it does not have all columns. A rank that restores reads its part from all
files, so the number of ranks may change.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.config.schema import ModelConfig
from covey.errors import Absent, InputError, RunFailed
from covey.learner.parallel import Block, Ranks, Span
from covey.models.adapters import adapter_base, require_peft
from covey.models.families import auto_model, vision_family
from covey.models.folder import MAIN, RemoteCodeNeeded, check_file, explain_errors, load_weights, read_config
from covey.models.hub import ADAPTER, check_adapter, no_pickles
from covey.models.loading import Located, locate, open_source
from covey.storage import sync_tree, writing
from covey.weights.names import full_weights


class NonFiniteWeights(RunFailed):
    """Weights or optimiser state are NaN or infinite, so a checkpoint of them would be useless."""


def check_finite(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Raise `NonFiniteWeights` with the name of the first non-finite tensor, the same on all ranks. Every rank must
    pass tensors of the same names in the same order."""
    names = list(tensors)
    bad = next((place for place, name in enumerate(names) if not _is_finite(tensors[name])), len(names))
    first = ranks.min(bad)
    if first < len(names):
        raise NonFiniteWeights(
            f"no checkpoint was written: {names[first]} is not finite\n"
            "  likely causes: learner.lr (or critic.lr) too high, or float16 (try model.dtype=bfloat16)"
        )


def _is_finite(tensor: Tensor) -> bool:
    """Checks minimum and maximum, which are NaN if any element is: `isfinite` would allocate a copy."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in tensor.detach().aminmax())


Blocks = Mapping[str, Block]  # by weight


def save_model(model: Any, folder: Path, ranks: Ranks, *, sharded: bool) -> None:
    """Write the model folder. The first rank writes; the others send it their shards, one weight at a time."""
    adapter = hasattr(model, "get_base_model")  # only the adapter is written
    weights: dict[str, Tensor] = {}
    for name, weight in full_weights(model, trained_only=adapter) if sharded else ():
        if ranks.is_first:
            weights[name] = weight.cpu()
    if not ranks.is_first:
        return
    if sharded:
        dtype = next(iter(weights.values())).dtype
        model.save_pretrained(folder, state_dict=weights)
        if not adapter:  # transformers writes the dtype of the shards, which may be more precise
            _edit_json(folder / "config.json", lambda config: config | {"dtype": str(dtype).removeprefix("torch.")})
    else:
        model.save_pretrained(folder)
    if adapter:
        _edit_json(folder / "adapter_config.json", _sort_target_modules)


def _edit_json(path: Path, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text())), indent=2, sort_keys=True) + "\n")


def _sort_target_modules(config: dict[str, Any]) -> dict[str, Any]:
    """peft keeps them in a set, whose order differs between processes."""
    modules = config.get("target_modules")
    return config | {"target_modules": sorted(modules)} if isinstance(modules, list) else config


def save_state(
    tensors: Mapping[str, Tensor], blocks: Blocks, folder: Path, ranks: Ranks, replicated: Set[str] = frozenset()
) -> None:
    """`replicated`: weights that another rank saves."""
    if not blocks:
        if ranks.is_first:
            save_tensors(tensors, folder / "optimizer.safetensors")
        return
    tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[2] not in replicated}
    held = {name: blocks[weight] for name in tensors if (weight := weight_of(name))}
    metadata = {
        "rows": json.dumps({name: rows for name, (rows, _) in held.items()}),
        "columns": json.dumps({name: columns for name, (_, columns) in held.items() if columns is not None}),
    }
    save_tensors(tensors, folder / f"optimizer-{ranks.rank + 1:05d}-of-{ranks.world_size:05d}.safetensors", metadata)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def load_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def load_state(folder: Path, blocks: Blocks) -> dict[str, Tensor]:
    """The optimiser state of this rank: every tensor whole, or the block of it in `blocks`."""
    with ExitStack() as open_files:
        paths = sorted(folder.glob("optimizer*.safetensors"))
        files = [_File.of(open_files.enter_context(safe_open(path, framework="pt"))) for path in paths]
        names = dict.fromkeys(name for file in files for name in file.names)
        return {name: _read(name, files, blocks.get(weight_of(name) or "")) for name in names}


@dataclass(frozen=True)
class _File:
    """One rank's file, or the only one."""

    handle: Any
    names: Sequence[str]
    rows: Mapping[str, Span]
    columns: Mapping[str, Span]

    @classmethod
    def of(cls, handle: Any) -> _File:
        metadata = handle.metadata() or {}
        rows, columns = (json.loads(metadata.get(key, "{}")) for key in ("rows", "columns"))
        return cls(handle, sorted(handle.keys()), rows, columns)

    def block(self, name: str) -> tuple[Span, Span | None, tuple[int, ...]]:
        """The rows and columns of a tensor in this file, and the shape of that part."""
        shape = tuple(self.handle.get_slice(name).get_shape())
        columns = tuple(self.columns[name]) if name in self.columns else None
        return tuple(self.rows.get(name, (0, shape[0]))), columns, shape  # type: ignore[return-value]


def _read(name: str, files: Sequence[_File], block: Block | None) -> Tensor:
    files = [file for file in files if name in file.names]
    if not files[0].handle.get_slice(name).get_shape():  # a scalar
        scalar: Tensor = files[0].handle.get_tensor(name)
        return scalar
    blocks = [file.block(name) for file in files]
    rows, columns = block or ((0, max(rows[1] for rows, _, _ in blocks)), None)
    if columns is None and any(held is not None for _, held, _ in blocks):
        columns = (0, max(held[1] for _, held, _ in blocks if held is not None))
    tensor: Tensor | None = None
    for file, (held_rows, held_columns, shape) in zip(files, blocks, strict=True):
        into, out = _overlap(rows, held_rows)
        part = file.handle.get_slice(name)[out]
        within = slice(None)
        if columns is not None:
            within, out = _overlap(columns, held_columns or (0, shape[1]))
            part = part[:, out]
        if tensor is None:
            size = (rows[1] - rows[0], *((columns[1] - columns[0], *shape[2:]) if columns else shape[1:]))
            tensor = torch.empty(size, dtype=part.dtype)
        if columns is None:
            tensor[into] = part
        else:
            tensor[into, within] = part
    assert tensor is not None
    return tensor


def _overlap(wanted: Span, held: Span) -> tuple[slice, slice]:
    """The intersection of two spans, as a slice of each."""
    first, last = max(wanted[0], held[0]), min(wanted[1], held[1])
    last = max(first, last)
    return slice(first - wanted[0], last - wanted[0]), slice(first - held[0], last - held[0])


def weight_of(name: str) -> str | None:
    """The weight whose rows a tensor has; None for a scalar."""
    kind, _, weight = name.partition("/")
    return None if kind == "step" else weight


# -- Export ------------------------------------------------------------------------------------------------------------

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_SIZE = "5GB"  # larger models are written in several files


def export(folder: Path, out: Path, *, dtype: str | None = None, adapter: bool = False) -> str:
    """Write the model of `folder` as an ordinary model folder `out`, and return a description of it.

    An adapter is merged into its base model, unless `adapter` exports it alone. Without `dtype` weights keep theirs.
    `out` is complete or does not exist.
    """
    is_adapter = _is_adapter(folder)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=out.parent, prefix=".exporting-"))
        try:
            if is_adapter and adapter:
                _copy_adapter(folder, work, dtype)
            else:
                model = _merged(folder, dtype) if is_adapter else _loaded(Located(str(folder)), dtype)
                model.save_pretrained(work, max_shard_size=FILE_SIZE)
            _copy_tokenizer(folder, work)
            if not (is_adapter and adapter):
                _copy_image_processor(folder, work)
            sync_tree(work)
            work.chmod(0o755)
            if out.is_dir():
                out.rmdir()  # it is empty
            work.rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return _description(folder, out, adapter)


def _description(folder: Path, out: Path, adapter: bool) -> str:
    """A description of the exported folder, from the headers of its files."""
    count, dtypes = 0, set()
    for path in out.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                count += math.prod(part.get_shape())
                dtypes.add(part.get_dtype())
    size = sum(path.stat().st_size for path in out.iterdir()) / 2**20
    names = sorted(SAFETENSORS_DTYPES.get(kind, kind) for kind in dtypes)
    figures = f"{count:,} weights in {' and '.join(names)}, {size:,.1f} MiB"
    if not _is_adapter(folder):
        return f"a whole model, {figures}"
    base = adapter_base(folder)
    if adapter:
        return f"an adapter for {base}, which programs load beside it, {figures}"
    return f"a whole model: the adapter is merged into {base}, {figures}"


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _loaded(place: Located, dtype: str | None) -> Any:
    auto = auto_model(read_config(place.path, place.path, revision=place.revision))
    with explain_errors(place.path):
        return load_weights(auto, place.path, place.path, revision=place.revision, dtype=dtype or "auto")


def _merged(folder: Path, dtype: str | None) -> Any:
    """An adapter merged into its base model: W + ΔW in float32, rounded once. Tensors of another precision than the
    model's, such as the biases of GLM's routers, keep theirs."""
    base = _loaded(locate(str(folder)), None)
    wanted = DTYPES[dtype] if dtype else base.dtype
    exceptions = {name: tensor.dtype for name, tensor in _tensors_of(base) if tensor.dtype != base.dtype}
    with no_pickles(str(folder)):
        model = require_peft().PeftModel.from_pretrained(base.float(), folder).merge_and_unload()
    for name, tensor in _tensors_of(model):
        tensor.data = tensor.data.to(exceptions.get(name, wanted))
    return model


def _tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _copy_adapter(folder: Path, work: Path, dtype: str | None) -> None:
    shutil.copy(folder / "adapter_config.json", work)
    weights = load_file(folder / "adapter_model.safetensors")
    if dtype:
        weights = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    save_file(weights, work / "adapter_model.safetensors", {"format": "pt"})


def _copy_tokenizer(folder: Path, work: Path) -> None:
    """The tokenizer in the folder, or else that of the adapter's base model."""
    from transformers import AutoTokenizer

    here = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    place = Located(str(folder)) if here else locate(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(place.path, trust_remote_code=False, revision=place.revision or MAIN)
    tokenizer.save_pretrained(work)


def _copy_image_processor(folder: Path, work: Path) -> None:
    """The image processor of a model that sees images."""
    base = locate(str(folder))
    if vision_family(read_config(base.path, base.path, revision=base.revision)) is not None:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(
            base.path, backend="pil", trust_remote_code=False, revision=base.revision or MAIN
        )
        processor.save_pretrained(work)


def check_export(folder: Path, out: Path, *, dtype: str | None, adapter: bool) -> None:
    """Refuse an export that cannot work, before anything is loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already exists\n  name a new folder, or an empty one")
    if adapter and not _is_adapter(folder):
        raise InputError(f"{folder} has no adapter\n  remove --adapter")
    if adapter:  # copied as it is, without its base model
        check_adapter(folder)
        check_file(folder / ADAPTER)
        return
    try:
        if _is_adapter(folder):
            _check_base(folder)
        open_source(ModelConfig(name=str(folder)))
    except Absent as error:
        if not _is_adapter(folder):
            raise
        raise Absent(f"{error}\n  --adapter writes the adapter alone, without this model") from error
    except RemoteCodeNeeded as error:
        raise InputError(
            f"{folder} needs Python code that comes with the model, which covey export does not run\n"
            "  its checkpoint is a model folder already: copy it"
        ) from error


def _check_base(folder: Path) -> None:
    """The base model may have been moved since the adapter was trained."""
    base = adapter_base(folder)
    try:
        locate(base)
    except InputError as error:
        raise Absent(f"the adapter of {folder} needs its base model, which is not here: {error}") from error
