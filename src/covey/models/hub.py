"""The model hub: whether it can be reached, revisions, and which files may be read from a model's folder.

huggingface_hub retries an unanswered request five times with pauses, so without a network a name that is not in its
cache fails only after half a minute. Here the hub is probed first; if it does not answer, huggingface_hub is put into
its offline mode, in which it reads only its cache.

Only safetensors and JSON files are read from a model's folder. Files that can run programs when they are read are
refused: pickles (`pytorch_model.bin`, `*.pt`) always, the model's own Python code (`auto_map`) unless
`model.trust_remote_code=true`. Every library call that reads a model runs inside `no_pickles`, so that no file name in
a configuration can get around this.
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

TIMEOUT_S = 2.0  # of the probe, unless huggingface_hub's own HF_HUB_ETAG_TIMEOUT is set
VALID_S = 60.0  # how long a result is reused: a model is read in several steps


@dataclass
class _State:
    probed: float = float("-inf")  # time of the last probe, on the monotonic clock
    endpoint: str = ""
    reason: str | None = None  # why the hub cannot be reached; None: it answered, or was not probed


_state = _State()


def check_reachable() -> None:
    """Put huggingface_hub into offline mode if the hub does not answer, and out of it if it does. The user's
    HF_HUB_OFFLINE is respected."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and _state.reason is None:
        return
    if _state.endpoint == constants.ENDPOINT and time.monotonic() < _state.probed + VALID_S:
        return
    constants.HF_HUB_OFFLINE = False
    _state.reason = _probe(constants.ENDPOINT)
    _state.probed, _state.endpoint = time.monotonic(), constants.ENDPOINT
    constants.HF_HUB_OFFLINE = _state.reason is not None


def unreachable() -> str | None:
    """Why the hub could not be reached by the last probe; None if it could."""
    return _state.reason


def _probe(endpoint: str) -> str | None:
    """Send one request with huggingface_hub's proxies and certificates. Any response counts, even an HTTP error."""
    from huggingface_hub.utils import get_session

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or TIMEOUT_S)
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
    """The HTTP library of huggingface_hub (httpx or httpx2), for its exceptions."""
    packages = (sys.modules[kind.__module__.partition(".")[0]] for kind in type(session).__mro__)
    return next(package for package in packages if hasattr(package, "TransportError"))


# -- Files of a model --------------------------------------------------------------------------------------------------

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
FIX = (
    "  a pickle can run any program when it is read; Covey reads safetensors\n"
    "  fix: if you trust the file, load it once with transformers and write it with save_pretrained"
)


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION`: a branch, tag or commit of the hub after the name."""
    ident, _, revision = name.partition("@")
    return ident, revision or None


def weight_files(folder: Path, config: Any = None) -> list[Path]:
    """The safetensors files with a folder's weights. `config`: the model's, which may name a file too.

    Other kinds of files, and paths out of the folder, are refused. The files need not exist.
    """
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
                f"{folder}: its weights should be in {name}, which is not a safetensors file of this folder\n{FIX}"
            )
    if names == [WEIGHTS[0]] and not (folder / WEIGHTS[0]).is_file():
        _refuse_pickles(folder)
        raise InputError(f"{folder} has no weights: {WEIGHTS[0]} is missing\n  fix: copy or download it again")
    return [folder / name for name in names]


def check_config(name: str, config: Any) -> None:
    """Refuse a configuration that names code of the hub as its attention implementation."""
    implementation = str(getattr(config, "_attn_implementation", "") or "")
    if "/" in implementation:
        raise InputError(
            f"{name}: its config.json asks for code of the hub ({implementation}), which is not run\n"
            "  fix: remove attn_implementation from the file, or if you trust the model: model.trust_remote_code=true"
        )


def check_adapter(folder: Path) -> None:
    if not (folder / ADAPTER).is_file():
        _refuse_pickles(folder)
        raise InputError(f"{folder} has no weights: {ADAPTER} is missing\n  fix: copy or download it again")


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise InputError(f"{folder}: its weights are a pickle ({pickles[0]}), which is not loaded\n{FIX}")


def _shards(index: Path) -> list[str]:
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{index}: not an index of weight files ({type(error).__name__})") from error
    if not names:
        raise InputError(f"{index}: it names no files\n  fix: copy or download it again")
    return sorted(names)


@contextmanager
def no_pickles(name: str) -> Iterator[None]:
    """Disable torch.load, which reads pickles, while a library reads the model `name`."""
    import torch

    def refused(file: Any, *_: Any, **__: Any) -> Any:
        raise InputError(f"{name}: {Path(str(file)).name} is a pickle, which is not loaded\n{FIX}")

    before = torch.load
    torch.load = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = before
