"""The learner's fused layers against transformers' own, and their kernels against plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.learner import attention, forward
from covey.learner.layers import FusedLayers
from covey.learner.packing import Packed, pack
from covey.models.families import FUSED_ATTENTION, decoder
from covey.types import Sample
from tests.learner.test_forward import family
from tests.rollout.triton_support import DEVICE, needs_triton

FUSED = ["llama", "qwen2", "qwen3", "mistral"]


def packed() -> Packed:
    """Two prompts with three answers, of different lengths."""
    shapes = [((5, 6, 7, 8), 5, 0), ((5, 6, 7, 8), 2, 0), ((9, 10), 7, 1)]
    rows = [
        Sample(prompt, tuple(range(11, 11 + n)), (True,) * n, (0.0,) * n, (0,) * n, group)
        for prompt, n, group in shapes
    ]
    return pack(rows, [[0, 1], [2]])


def gradients(model: Any, *, fused: bool) -> dict[str, Tensor]:
    """Of a weighted sum of the hidden states; with the sum itself."""
    layers = FusedLayers(list(decoder(forward.causal_lm(model)).layers))
    assert layers.patches
    given = packed()
    with attention.packed_attention(given.layout):
        if fused:
            with layers.active():
                hidden = forward.hidden_states(model, given)
        else:
            hidden = forward.hidden_states(model, given)
        weight = torch.arange(hidden.numel(), dtype=hidden.dtype).cos().view(hidden.shape)
        total = (hidden * weight).sum()
        total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"sum": total.detach(), **found}


def test_the_families_here_are_those_of_the_table() -> None:
    assert sorted(FUSED) == sorted(name.removesuffix("Attention").lower() for name in FUSED_ATTENTION)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_have_the_values_and_gradients_of_plain_ones(name: str, adapters: bool) -> None:
    model = family(name).double()
    for p in model.parameters():  # biases are zero at first, which would hide them
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    if adapters:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).double()
    expected = gradients(copy.deepcopy(model), fused=False)
    found = gradients(model, fused=True)
    assert found.keys() == expected.keys() and len(found) > 5
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-10, rtol=1e-10)
    assert "forward" not in vars(decoder(forward.causal_lm(model)).layers[0].self_attn), "plain again afterwards"


def test_the_gradient_of_a_rotation_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 3, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: attention.rotate(q, k, cos, sin), (q, k))


def test_a_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
    cos, sin = torch.randn(2, 1, 3, 8)
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for found, other in zip(attention.rotate(q, k, cos, sin), expected, strict=True):
        torch.testing.assert_close(found, other.transpose(1, 2))


@needs_triton
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(14, 2, 64), (3, 3, 80), (4, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_kernel_computes_what_plain_torch_does(
    dtype: torch.dtype, heads: int, kv: int, dim: int, transposed: bool
) -> None:
    from covey.learner.kernels import rotate_heads

    torch.manual_seed(0)
    # In the layout that attention's gradients have, [H, T, D] in memory.
    q, k = (torch.randn(1, n, 5, dim).to(dtype).transpose(1, 2) for n in (heads, kv))
    cos, sin = torch.randn(2, 1, 5, dim).to(dtype)
    expected = attention._rotate_cpu(q.double(), k.double(), cos.double(), sin.double(), transposed)
    found = rotate_heads(*(x.to(DEVICE) for x in (q, k, cos, sin)), transposed)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), other, atol=tolerance, rtol=tolerance)


@needs_triton
@pytest.mark.parametrize("shape", [(3,), (70, 131), (4096 * 3,)])
def test_gradients_are_summed_in_float32(shape: tuple[int, ...]) -> None:
    from covey.learner.kernels import add_in_place

    torch.manual_seed(0)
    total = torch.randn(shape, device=DEVICE)
    part = (torch.randn(shape, device=DEVICE) * 1e-3).bfloat16()  # would round away in bfloat16
    expected = total + part.float()
    add_in_place(total, part)
    assert torch.equal(total, expected)
