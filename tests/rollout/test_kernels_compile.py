"""The kernels compile for a GPU, without one: the compiler refuses types and shapes that the interpreter accepts.

Needs Triton, and not TRITON_INTERPRET=1, which replaces the compiler.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.rollout.triton_support import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton, and not its interpreter"
)

BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
CACHE = {"keys": BF16, "values": BF16, "table": INT32, "position": INT64, "eps": "fp32", "scale": "fp32"}
TURN = {"cos": BF16, "sin": BF16, "norm": BF16}
SPLIT = {"part": FP32, "part_m": FP32, "part_l": FP32}


def compiled(name: str, types: dict[str, str], constants: dict[str, Any], warps: int = 4) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from covey.rollout.embedded import kernels

    kernel = getattr(kernels, name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    hopper = GPUTarget("cuda", 90, 32)
    return triton.compile(ASTSource(kernel, signature, values), target=hopper, options={"num_warps": warps})


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("group", "heads", "dim"), [(7, 2, 64), (6, 2, 128), (1, 8, 80), (4, 1, 256)])
def test_attention(group: int, heads: int, dim: int, norms: bool) -> None:
    import triton

    from covey.rollout.embedded.kernels import TILE

    pad, group_pad = triton.next_power_of_2(dim), triton.next_power_of_2(group)
    head = {"D": dim, "DPAD": pad}
    cache = {"K": heads, "SIZE": 64, **head}
    kind = {"ROTATES": True, "NORMS": norms}
    compiled("_write", {"k": BF16, "v": BF16, **TURN, **CACHE}, {"KPAD": 8, "TILE": TILE, **cache, **kind})
    rotate = {"H": heads * group, "HPAD": 16, **head, "NORMS": norms}
    compiled("_rotate", {"q": BF16, "out": BF16, "eps": "fp32", **TURN}, rotate)
    for splits in (1, 4):
        constants = {**cache, **kind, "G": group, "GPAD": max(16, group_pad), "SPLITS": splits}
        inputs = {"q": BF16, "k": BF16, "v": BF16, "k_norm": BF16, **TURN}
        compiled("_attend", {**inputs, "out": BF16, **CACHE, **SPLIT}, constants)
    warps = 4 if TILE * group_pad * pad <= 8192 else 8
    prompt = {**cache, "G": group, "GPAD": group_pad, "TILE": TILE}
    metadata = compiled("_attend_prompt", {"q": BF16, "out": BF16, **CACHE}, prompt, warps).metadata
    assert metadata.shared <= 100_000  # bytes: two programs fit on a processor


def test_combining_and_sampling() -> None:
    compiled("_combine", {**SPLIT, "out": BF16}, {"D": 64, "DPAD": 64, "SPLITS": 4})
    tiles = {"TILES": 38, "TILE": 4096}
    scan = {"logits": BF16, "temperature": FP32, "top": FP32, "mass": FP32, "best": INT32}
    compiled("_scan", scan, tiles, warps=8)
    state = {"uniform": FP32, "ends": INT64, "limit": INT64, "ids": INT64, "position": INT64, "step": INT32}
    out = {"out_ids": INT64, "out_logprobs": FP32}
    compiled("_pick", {**scan, **state, **out}, {**tiles, "TILES_PAD": 64, "ENDS": 2}, warps=8)
