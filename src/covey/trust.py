"""What a model's folder may bring: tensors and JSON. Files that run programs when they are read are refused.

A pickle (`pytorch_model.bin`, `*.pt`) is a program in disguise, and so is the Python beside a model (`auto_map`). The
first is never read, the second only where model.trust_remote_code=true says so. Whatever library reads a model does it
within `no_pickles`, so that no file name in a configuration leads around this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from covey.errors import InputError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
FIX = (
    "  a pickle can run any program when it is read; Covey reads safetensors\n"
    "  fix: where you trust the file, load it once with transformers and write it with save_pretrained"
)


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` of the hub: a branch, a tag or a commit behind the name."""
    place, _, revision = name.partition("@")
    return place, revision or None


def weight_files(folder: Path, config: Any = None) -> list[Path]:
    """The safetensors files with a folder's weights, by names that stay in it. `config`: the model's own, which may
    name a file too. Other kinds of files are refused; a file that is named need not be there."""
    named = getattr(config, "transformers_weights", None)
    if isinstance(named, str):
        names = _shards(folder / named) if named.endswith(".index.json") else [named]
    elif (folder / WEIGHTS[0]).is_file() or not (folder / WEIGHTS[1]).is_file():
        names = [WEIGHTS[0]]
    else:
        names = _shards(folder / WEIGHTS[1])
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise InputError(
                f"{folder}: its weights are said to be in {name}, which is no safetensors file here\n{FIX}"
            )
    if names == [WEIGHTS[0]] and not (folder / WEIGHTS[0]).is_file():
        _refuse_pickles(folder)
        raise InputError(f"{folder} has no weights: {WEIGHTS[0]} is missing\n  fix: copy or download it again")
    return [folder / name for name in names]


def check_config(name: str, config: Any) -> None:
    """A configuration may name code of the hub as its attention: that is the model's own code too."""
    wanted = str(getattr(config, "_attn_implementation", "") or "")
    if "/" in wanted:
        raise InputError(
            f"{name}: its config.json asks for code of the hub ({wanted}), which is not run\n"
            "  fix: take attn_implementation out of the file, or model.trust_remote_code=true where you trust the model"
        )


def check_adapter(folder: Path) -> None:
    if not (folder / ADAPTER).is_file():
        _refuse_pickles(folder)
        raise InputError(f"{folder} has no weights: {ADAPTER} is missing\n  fix: copy or download it again")


def _refuse_pickles(folder: Path) -> None:
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if found:
        raise InputError(f"{folder}: its weights are a pickle ({found[0]}), which is not loaded\n{FIX}")


def _shards(index: Path) -> list[str]:
    try:
        found = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: no list of a model's files ({type(error).__name__})") from error
    if not found:
        raise InputError(f"{index}: it names no files\n  fix: copy or download it again")
    return sorted(found)


@contextmanager
def no_pickles(name: str) -> Iterator[None]:
    """While a library reads the model `name`: torch.load, its way to a pickle, is barred."""
    import torch

    def refused(file: Any, *_: Any, **__: Any) -> Any:
        raise InputError(f"{name}: {Path(str(file)).name} is a pickle, which is not loaded\n{FIX}")

    before = torch.load
    torch.load = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = before
