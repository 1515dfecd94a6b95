"""Matrix products by oneDNN, beside torch's own in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from covey.models import products
from covey.models.products import block_rows, fast_linear, fast_linears, prefers_onednn, product, sum_of_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Products as small as these are computed by oneDNN, on any processor. Returns the shapes that it computed."""
    shapes: list[tuple[int, ...]] = []
    compute = products._onednn

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*x.shape, len(weight)))
        return compute(x, weight, bias)

    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1)
    monkeypatch.setattr(products, "BLOCK", 8)
    monkeypatch.setattr(products, "STEP", 4)
    monkeypatch.setattr(products, "_onednn", recorded)
    return shapes


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 8, 21])
@pytest.mark.parametrize("wide", [False, True])
def test_products_and_their_sums_over_rows(rows: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDE", 1 if wide else 2**23)
    a, b, c = random(rows, 5), random(5, 3), random(rows, 3)
    close(product(a, b), a.double() @ b.double())
    close(sum_of_products(a, c), a.double().t() @ c.double())


@pytest.mark.parametrize("shape", [(6, 5), (1, 21, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients(shape: tuple[int, ...], bias: bool) -> None:
    given = [random(*shape), random(3, 5), random(3)][: 2 + bias]
    ours = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    out, expected = fast_linear(*ours), linear(*exact)
    close(out, expected)
    weights = random(*out.shape)
    (out * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    for x, y in zip(ours, exact, strict=True):
        assert x.grad is not None and y.grad is not None
        close(x.grad, y.grad)


def test_any_number_of_rows_needs_few_shapes(taken: list[tuple[int, ...]]) -> None:
    weight = random(3, 5).requires_grad_()
    for rows in range(1, 40):
        fast_linear(random(rows, 5).requires_grad_(), weight).sum().backward()
    sizes = (1, 2, 3, 4, 8)  # at most STEP rows are not padded
    assert set(taken) == {shape for m in sizes for shape in ((m, 5, 3), (m, 3, 5), (3, m, 5))}
    assert [block_rows(n) for n in (3, 4, 17)] == [3, 4, 16]


def test_layers_of_any_module_within_the_context_alone(taken: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    x = random(9, 5)
    plain = model(x)
    assert not taken
    with pytest.raises(ZeroDivisionError), fast_linears():
        close(model(x), plain.double())
        assert taken == [(8, 5, 6), (1, 5, 6), (8, 6, 2), (1, 6, 2)]
        raise ZeroDivisionError
    taken.clear()
    assert torch.equal(model(x), plain) and not taken


def test_checkpointed_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)

    def gradient(fast: bool) -> Tensor:
        layer.zero_grad()
        if fast:
            with fast_linears():
                checkpoint(lambda x: layer(layer(x)).tanh(), random(9, 5), use_reentrant=False).sum().backward()
        else:
            layer(layer(random(9, 5))).tanh().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    close(gradient(True), gradient(False).double())


def test_a_frozen_weight_gets_no_gradient() -> None:
    weight = random(3, 5)
    x = random(4, 5).requires_grad_()
    fast_linear(x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    close(x.grad, weight.double().sum(0).expand(4, 5))


def test_torch_computes_other_precisions_and_small_products(
    taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        a, b = random(4, 5).to(dtype), random(5, 3).to(dtype)
        assert torch.equal(product(a, b), a @ b)
        assert torch.equal(fast_linear(a, b.t()), linear(a, b.t()))
    monkeypatch.setattr(products, "LEAST", 4 * 5 * 3 + 1)
    assert torch.equal(sum_of_products(random(4, 5), random(4, 3)), random(4, 5).t() @ random(4, 3))
    assert not taken


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)],
)
def test_only_where_mkl_leaves_half_of_the_processor_unused(
    vendor: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert prefers_onednn.__wrapped__() is expected
