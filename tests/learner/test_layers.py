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
from covey.models.forwards import replaced_forwards
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


def test_forwards_are_restored_after_an_error() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError), replaced_forwards([(one, abs), (other, abs)]):
        assert one(torch.tensor(-3)) == 3
        raise RuntimeError
    assert "forward" not in one.__dict__ and "forward" not in other.__dict__


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


def test_a_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    cos, sin = torch.randn(2, 3, 8)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    for x, other in zip((q, k), expected, strict=True):
        torch.testing.assert_close(attention.rotated(x, cos, sin), other)


@needs_triton
@pytest.mark.parametrize("answers", [0, 3])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(14, 2, 64), (3, 3, 80), (4, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_kernels_compute_what_plain_torch_does(
    dtype: torch.dtype, heads: int, kv: int, dim: int, answers: int
) -> None:
    from covey.learner.kernels import rotate_back, rotate_heads

    torch.manual_seed(0)
    tokens = 5
    q, k = (torch.randn(tokens, n, dim, device=DEVICE).to(dtype) for n in (heads, kv))
    cos, sin = torch.randn(2, tokens, dim, device=DEVICE).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    exact = [x.double().requires_grad_() for x in (q, k)]
    expected = [attention.rotated(x, cos.double(), sin.double()) for x in exact]
    for ours, other in zip(rotate_heads(q, k, cos, sin), expected, strict=True):
        torch.testing.assert_close(ours.double(), other, atol=tolerance, rtol=tolerance)

    # Gradients of all tokens, and further ones of the last queries and the first keys.
    to_q, to_k = torch.randn_like(q), torch.randn_like(k)
    more = [torch.randn_like(q[tokens - answers :]), torch.randn_like(k[: tokens - answers])] if answers else None
    whole = [to_q.double(), to_k.double()]
    if more is not None:
        whole[0][tokens - answers :] += more[0].double()
        whole[1][: tokens - answers] += more[1].double()
    torch.autograd.backward(expected, whole)
    for ours, other in zip(rotate_back(to_q, to_k, cos, sin, more), exact, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(ours.double(), other.grad, atol=tolerance, rtol=tolerance)


@needs_triton
@pytest.mark.parametrize(("heads", "dim"), [(14, 64), (3, 80)])
def test_attention_over_two_parts_is_merged_by_their_sums(heads: int, dim: int) -> None:
    from covey.learner.kernels import merge_in_place

    torch.manual_seed(0)
    scores = torch.randn(heads, 6, 9, dtype=torch.float64, device=DEVICE) * 4  # of 6 tokens to 9 keys
    values = torch.randn(9, heads, dim, dtype=torch.float64, device=DEVICE)

    def over(keys: slice, rows: slice) -> tuple[Tensor, Tensor]:
        part = scores[:, rows, keys]
        out = torch.einsum("htk,khd->thd", part.softmax(-1), values[keys])
        return out.float().contiguous(), part.logsumexp(-1).float().contiguous()

    out, lse = over(slice(0, 5), slice(None))
    before = out.clone()
    merge_in_place(out, lse, *over(slice(5, 9), slice(2, 6)))
    expected, expected_lse = over(slice(None), slice(2, 6))
    torch.testing.assert_close(out[2:], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[:, 2:], expected_lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(out[:2], before[:2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
def test_rotary_attention_on_a_gpu_has_the_values_and_gradients_of_plain_attention() -> None:
    torch.manual_seed(0)
    layout = packed().layout
    tokens = layout.prompt_tokens + sum(map(sum, layout.answers))
    q, k, v = (torch.randn(tokens, n, 64, dtype=torch.bfloat16) for n in (4, 2, 2))
    angle = torch.outer(torch.arange(tokens), 0.5 ** torch.arange(32).double()).repeat(1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    to_out = torch.randn(tokens, 4, 64, dtype=torch.bfloat16)
    module = family("llama").model.layers[0].self_attn

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        with attention.packed_attention(layout.to(torch.device(device))):
            turn = (cos.to(device, dtype), sin.to(device, dtype))
            out = attention.rotary_attention(module, inputs[0], inputs[1], inputs[2], *turn, 0.125)
            out.backward(to_out.to(device, dtype))
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    for ours, exact in zip(run("cuda", torch.bfloat16), run("cpu", torch.float64), strict=True):
        assert float((ours.cpu().double() - exact).norm() / exact.norm()) < 1e-2


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
