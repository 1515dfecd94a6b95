"""An ordinary model folder out of trained weights: for other programs, in any precision, adapters merged."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from covey.config.schema import ModelConfig
from covey.errors import Absent, InputError
from covey.learner.adapters import adapter_base, require_peft
from covey.learner.models import Located, locate, open_source
from covey.model_folder import MAIN, OwnCode, check_file, explained, load_weights
from covey.storage import sync_tree, writing
from covey.trust import ADAPTER, check_adapter, no_pickles

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILE_SIZE = "5GB"  # larger models lie in several files


def export(folder: Path, out: Path, *, dtype: str | None = None, adapter: bool = False) -> str:
    """The model of `folder` in `out`, which is complete or does not exist; returns what was written, in words. An
    adapter is merged into its model, unless only the `adapter` is wanted. Without `dtype` weights keep theirs."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _export_beside(folder, out, dtype, adapter)
    return _description(folder, out, adapter)


def _export_beside(folder: Path, out: Path, dtype: str | None, adapter: bool) -> None:
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=".exporting-"))
    try:
        is_adapter = _is_adapter(folder)
        if is_adapter and adapter:
            _copy_adapter(folder, work, dtype)
        else:
            model = _merged(folder, dtype) if is_adapter else _loaded(Located(str(folder)), dtype)
            model.save_pretrained(work, max_shard_size=FILE_SIZE)
        _copy_tokenizer(folder, work)
        sync_tree(work)
        work.chmod(0o755)
        if out.is_dir():
            out.rmdir()  # it is empty
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _description(folder: Path, out: Path, adapter: bool) -> str:
    """What the folder holds now, by the headers of its files."""
    from safetensors import safe_open

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
    from transformers import AutoModelForCausalLM

    with explained(place.path):
        return load_weights(
            AutoModelForCausalLM, place.path, place.path, revision=place.revision, dtype=dtype or "auto"
        )


def _merged(folder: Path, dtype: str | None) -> Any:
    """The model below an adapter, with it: W + ΔW in float32, rounded once."""
    base = _loaded(locate(str(folder)), None)
    kept = DTYPES[dtype] if dtype else base.dtype
    with no_pickles(str(folder)):
        model = require_peft().PeftModel.from_pretrained(base.float(), folder)
    return model.merge_and_unload().to(kept)


def _copy_adapter(folder: Path, work: Path, dtype: str | None) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copy(folder / "adapter_config.json", work)
    weights = load_file(folder / "adapter_model.safetensors")
    if dtype:
        weights = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    save_file(weights, work / "adapter_model.safetensors", {"format": "pt"})


def _copy_tokenizer(folder: Path, work: Path) -> None:
    """The one beside the weights, or else that of the model below an adapter."""
    from transformers import AutoTokenizer

    here = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    place = Located(str(folder)) if here else locate(str(folder))
    found = AutoTokenizer.from_pretrained(place.path, trust_remote_code=False, revision=place.revision or MAIN)
    found.save_pretrained(work)


def check_export(folder: Path, out: Path, *, dtype: str | None, adapter: bool) -> None:
    """Before anything is loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is there already\n  name a folder that is not there, or an empty one")
    if adapter and not _is_adapter(folder):
        raise InputError(f"{folder} has no adapter\n  leave --adapter out")
    if adapter:  # copied as it is: its base model need not be here
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
    except OwnCode as error:
        raise InputError(
            f"{folder} needs Python code that comes with the model, which covey export does not run\n"
            "  its checkpoint is a model folder already: copy it"
        ) from error


def _check_base(folder: Path) -> None:
    """An adapter is merged into the model that it was trained on: a folder may have been moved since."""
    base = adapter_base(folder)
    try:
        locate(base)
    except InputError as error:
        raise Absent(f"the adapter of {folder} belongs to a model that is not here: {error}") from error
