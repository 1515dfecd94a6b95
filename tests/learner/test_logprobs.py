"""Log-probs in chunks against autograd's own derivative, and the kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covey import memory
from covey.learner import logprobs
from tests.conftest import tiny_llama
from tests.rollout.triton_support import DEVICE, needs_triton


def by_autograd(hidden: Tensor, weight: Tensor, target: Tensor, u: Tensor, v: Tensor | None) -> list[Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    plain = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    chosen, entropy = plain.gather(-1, target[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    ((chosen * u).sum() + (0 if v is None else (entropy * v).sum())).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [chosen, entropy, hidden.grad, weight.grad]


def ours(hidden: Tensor, weight: Tensor, target: Tensor, u: Tensor, v: Tensor | None, rows: int) -> list[Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in (hidden, weight))
    chosen, entropy = logprobs.LinearLogProb.apply(hidden, weight, target, 0.7, v is not None, rows)
    ((chosen * u).sum() + (0 if v is None else (entropy * v).sum())).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [chosen, entropy, hidden.grad, weight.grad]


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_chunks_give_the_same_result_as_one_product(
    dtype: torch.dtype, tolerance: float, rows: int, with_entropy: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 16).to(dtype), torch.randn(60, 16).to(dtype)
    target, u, v = torch.randint(60, (11,)), torch.randn(11).to(dtype), torch.randn(11).to(dtype)
    given = (hidden, weight, target, u, v if with_entropy else None)
    for found, expected in zip(ours(*given, rows), by_autograd(*given), strict=True):
        apart = (found.detach().double() - expected.detach()).norm() / expected.detach().norm()
        assert float(apart) < tolerance


def test_frozen_weights_get_no_gradient() -> None:
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8)
    chosen, entropy = logprobs.LinearLogProb.apply(hidden, weight, torch.arange(5), 1.0, False, 2)
    assert not entropy.requires_grad
    chosen.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@needs_triton
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_the_kernels_compute_what_plain_torch_does(vocabulary: int, with_entropy: bool) -> None:
    from covey.learner.kernels import gradient_in_place, row_statistics

    torch.manual_seed(0)
    logits = torch.randn(6, vocabulary + 7, device=DEVICE)[:, :vocabulary] * 4  # rows of a larger buffer
    target = torch.tensor([0, 1, vocabulary - 1, 7, 20, 49], device=DEVICE)
    u, v = torch.randn(2, 6, device=DEVICE)
    log_p = torch.log_softmax(logits.double() / 0.7, -1)
    p, entropy = log_p.exp(), -(log_p.exp() * log_p).sum(-1)
    lse, chosen, found_entropy = row_statistics(logits, target, 0.7)
    torch.testing.assert_close(chosen.double(), log_p.gather(-1, target[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy.double(), entropy, atol=1e-4, rtol=1e-4)
    expected = torch.nn.functional.one_hot(target, vocabulary) - p
    expected = u[:, None] * expected - (v[:, None] * p * (log_p + entropy[:, None]) if with_entropy else 0)
    given = (logits.clone(), target, lse, found_entropy, u, v if with_entropy else None, 0.7)
    torch.testing.assert_close(gradient_in_place(*given).double(), expected / 0.7, atol=1e-5, rtol=1e-3)


def test_the_token_budget_is_extrapolated_from_two_measurements() -> None:
    each, fixed = 1_000_000, 500_000_000
    peaks = (fixed + 256 * each, fixed + 1280 * each)
    assert memory.tokens_within(4.5e9, memory.PROBES, peaks) == 4000
    assert memory.tokens_within(1e12, memory.PROBES, peaks) == memory.MOST_TOKENS
    assert (
        memory.tokens_within(0, memory.PROBES, peaks) == memory.PROBES[0]
    )  # too little memory for any: try the smallest


def test_on_a_cpu_the_activations_of_a_pass_fit_into_memory() -> None:
    assert memory.affordable_tokens(torch.device("cpu"), lambda _: pytest.fail("nothing to try"), 1) == 8192
    token = memory.bytes_per_token(tiny_llama())
    assert token == 2 * (10 * 32 + 4 * 64) * 4  # layers × vectors × bytes
    gib, smollm2 = 2**30, 30 * (10 * 576 + 4 * 1536) * 4  # 1.4 MB a token
    assert [memory.cpu_tokens(size * gib, smollm2) for size in (24, 16, 8, 4, 1)] == [8192, 4096, 2048, 1024, 256]
