"""covey doctor: what this machine supports, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from covey.errors import Absent
from covey.imports import install, install_extra


@dataclass(frozen=True)
class Finding:
    mark: str  # ok | -- (optional, missing) | !! (needed, missing)
    what: str
    detail: str
    fix: str = ""


OPTIONAL = {  # package: (purpose, extra)
    "peft": ("LoRA training", "lora"),
    "pillow": ("images", "vision"),
    "bitsandbytes": ("QLoRA and the optimiser adamw8bit", "quantization"),
    "wandb": ("Weights & Biases logging", "wandb"),
    "tensorboard": ("TensorBoard logging", "tensorboard"),
    "mlflow-skinny": ("MLflow logging", "mlflow"),
    "trackio": ("Trackio logging", "trackio"),
}


def main(argv: list[str]) -> int:
    from covey.cli.parse import parse

    parse(argv)
    findings = list(examine())
    for finding in findings:
        print(f"{finding.mark:3} {finding.what:22} {finding.detail}")
        if finding.fix:
            print(f"{'':26} fix: {finding.fix}")
    broken = sum(finding.mark == "!!" for finding in findings)
    print(f"\n{'this machine can train' if not broken else f'{broken} things to fix before training'}")
    return 1 if broken else 0


def examine() -> Iterator[Finding]:
    yield Finding("ok", "python", platform.python_version())
    yield from _torch()
    yield _memory()
    for package in ("transformers", "safetensors", "hydra-core", "pyarrow", "rich", "matplotlib", "gguf", "accelerate"):
        version = _version(package)
        if version:
            yield Finding("ok", package, version)
        else:
            yield Finding("!!", package, "not installed", install(package))
    yield _builtin_model()
    yield _compile_cache()
    for package, (what, extra) in OPTIONAL.items():
        version = _version(package)
        missing = Finding("--", package, f"no {what}", install_extra(extra))
        yield Finding("ok", package, f"{version}: {what}") if version else missing
    yield _vllm()
    yield from _sandbox()
    for name, what in (("HF_TOKEN", "private models of the hub"), ("WANDB_API_KEY", "uploading to W&B")):
        is_set = bool(os.environ.get(name))
        yield Finding("ok" if is_set else "--", name, f"{'set' if is_set else 'not set'}: {what}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding("!!", "torch", "not installed", install("torch"))
        return
    yield Finding("ok", "torch", torch.__version__)
    cores = os.cpu_count() or 1
    yield Finding("ok", "CPU", f"{cores} cores, {torch.get_num_threads()} threads used")
    if not torch.cuda.is_available():
        yield Finding("--", "GPU", "torch sees none: training runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")


def _memory() -> Finding:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    disk = shutil.disk_usage(Path.cwd()).free / 2**30
    detail = f"{pages:.0f} GiB memory free, {disk:.0f} GiB disk free here"
    if pages < 4 or disk < 4:
        fix = "the built-in model needs about 4 GiB of memory, and 2 GiB of disk for each checkpoint"
        return Finding("--", "memory, disk", detail, fix)
    return Finding("ok", "memory, disk", detail)


def _builtin_model() -> Finding:
    from covey.errors import InputError
    from covey.models.builtin import GGUF_SHA256, cache_folder, find_gguf

    name = "smollm2-135m"
    ready = cache_folder() / "models" / f"{name}-{GGUF_SHA256[:12]}"
    if ready.is_dir():
        return Finding("ok", "built-in model", f"{name}, ready in {ready}")
    try:
        find_gguf(name)
    except InputError as error:
        lines = str(error).splitlines()
        return Finding("--", "built-in model", lines[0], lines[1].split(":", 1)[1].strip())
    return Finding("ok", "built-in model", f"{name}, unpacked on first use")


def _compile_cache() -> Finding:
    from covey.models.builtin import compile_cache

    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compile_cache())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Finding("ok", "compiled code", f"{size / 2**20:.0f} MiB, kept between runs in {folder}")


def _vllm() -> Finding:
    from covey.app.checks import require_vllm, vllm_version

    version = vllm_version()
    try:
        require_vllm()
    except Absent:
        fix = install_extra("vllm", upgrade=version is not None)
        return Finding("--", "vllm", f"{version or 'no'}: sampling with rollout=vllm", fix)
    return Finding("ok", "vllm", f"{version}: sampling with rollout=vllm")


def _sandbox() -> Iterator[Finding]:
    from covey.sandbox import describe

    for check in describe():
        good = check.works and not check.tier.weak
        weak = "; needs sandbox.allow_weak=true" if check.works and check.tier.weak else ""
        yield Finding("ok" if good else "--", f"sandbox: {check.tier.name}", check.detail + weak, check.fix)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
