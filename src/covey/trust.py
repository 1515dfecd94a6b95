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
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
FIX = (
    "  a pickle can run any program when it is read; Covey reads safetensors\n"
    "  fix: where you trust the file, load it once with transformers and write it with save_pretrained"
)


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` of the hub: a branch, a tag or a commit behind the name."""
    place, _, revision = name.partition("@")
    return place, revision or None


def check_weights(folder: Path, config: Any = None) -> None:
    """Before anything is read: a folder whose weights are safetensors, by names that stay in it. `config`: the model's
    own, which may name a file too."""
    named = getattr(config, "transformers_weights", None)
    index = folder / (named if isinstance(named, str) and named.endswith(".index.json") else WEIGHTS[1])
    names = [named] if isinstance(named, str) and not named.endswith(".index.json") else []
    if not (folder / WEIGHTS[0]).is_file() and index.is_file():
        names += sorted(set(_shards(index)))
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise InputError(
                f"{folder}: its weights are said to be in {name}, which is no safetensors file here\n{FIX}"
            )
    if not any((folder / name).is_file() for name in (*WEIGHTS, *names)):
        _refuse_pickles(folder)


def check_config(name: str, config: Any) -> None:
    """A configuration may name code of the hub as its attention: that is the model's own code too."""
    wanted = str(getattr(config, "_attn_implementation", "") or "")
    if "/" in wanted:
        raise InputError(
            f"{name}: its config.json asks for code of the hub ({wanted}), which is not run\n"
            "  fix: take attn_implementation out of the file, or model.trust_remote_code=true where you trust the model"
        )


def check_adapter(folder: Path) -> None:
    if not (folder / "adapter_model.safetensors").is_file():
        _refuse_pickles(folder)


def _refuse_pickles(folder: Path) -> None:
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if found:
        raise InputError(f"{folder}: its weights are a pickle ({found[0]}), which is not loaded\n{FIX}")


def _shards(index: Path) -> list[str]:
    try:
        found = list(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: no list of a model's files ({type(error).__name__})") from error
    return [str(name) for name in found]


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
