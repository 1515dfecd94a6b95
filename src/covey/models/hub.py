"""Whether the model hub answers, asked once before a model is read there.

huggingface_hub repeats a request that gets no answer five times, with pauses in between: without a network, a name that
is not in its cache is refused after half a minute or more. Here the hub is asked for a sign of life first. If there is
none, huggingface_hub is put into its offline mode, in which it reads its cache and asks nobody.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError

SECONDS = 2.0  # to wait for an answer, unless HF_HUB_ETAG_TIMEOUT, huggingface_hub's own setting for this, is given
VALID = 60.0  # seconds that an answer is believed: a model is read in several steps


@dataclass
class _State:
    asked: float = float("-inf")  # when, on the monotonic clock
    endpoint: str = ""
    reason: str | None = None  # why the hub cannot be reached; None: it answered, or was not asked


_state = _State()


def check_reachable() -> None:
    """Switch huggingface_hub's offline mode on where the hub does not answer, and off again where it does. What the
    user chose with HF_HUB_OFFLINE stays."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _state.reason is None:
        return
    if _state.endpoint == constants.ENDPOINT and time.monotonic() < _state.asked + VALID:
        return
    constants.HF_HUB_OFFLINE = False
    _state.reason = _ask(constants.ENDPOINT)
    _state.asked, _state.endpoint = time.monotonic(), constants.ENDPOINT
    constants.HF_HUB_OFFLINE = _state.reason is not None


def unreachable() -> str | None:
    """Why the hub could not be reached when it was last asked; None where it could."""
    return _state.reason


def _ask(endpoint: str) -> str | None:
    """One request, with the proxies and certificates of huggingface_hub. Any answer will do, also an error's number."""
    from huggingface_hub.utils import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    session = get_session()
    library = _library(session)
    try:
        session.head(endpoint, timeout=seconds)
    except library.TimeoutException:
        return f"{endpoint} does not answer within {seconds:g} s (HF_HUB_ETAG_TIMEOUT=20 waits longer)"
    except library.TransportError as error:
        return f"{endpoint} does not answer: {error or type(error).__name__}"
    return None


def _library(session: Any) -> Any:
    """The library that huggingface_hub sends requests with, httpx or httpx2, for its errors."""
    packages = (sys.modules[kind.__module__.partition(".")[0]] for kind in type(session).__mro__)
    return next(package for package in packages if hasattr(package, "TransportError"))


# -- What a model's folder may bring: tensors and JSON. Files that run programs when they are read are refused ---------
# A pickle (`pytorch_model.bin`, `*.pt`) is a program in disguise, and so is the Python beside a model (`auto_map`). The
# first is never read, the second only where model.trust_remote_code=true says so. Whatever library reads a model does
# it within `no_pickles`, so that no file name in a configuration leads around this.

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
