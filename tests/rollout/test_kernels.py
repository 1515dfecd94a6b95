"""The Triton kernels against plain torch. On a GPU, or anywhere with Triton and TRITON_INTERPRET=1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.rollout.embedded.cache import KvCache, PagedDecode, Prefill
from covey.rollout.embedded.runner import draw
from covey.streams import uniform
from covey.types import Sampling
from tests.rollout.triton_support import DEVICE, needs_triton

pytestmark = needs_triton

SHAPES = [  # query heads, key heads, head size, block size, window, splits
    (14, 2, 64, 64, 0, 1),
    (14, 2, 64, 64, 0, 4),
    (9, 3, 64, 32, 0, 2),
    (4, 4, 80, 16, 20, 2),
    (4, 2, 8, 16, 1, 1),
    (6, 2, 96, 16, 16, 4),
    (8, 1, 128, 16, 0, 8),
    (2, 1, 16, 16, 1000, 16),
]
DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_blocks_is_that_of_plain_torch(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    from covey.rollout.embedded.kernels import paged_attention

    torch.manual_seed(0)
    heads, kv, dim, size, window, splits = shape
    rows, count, layers = 5, 4, 2
    q, k, v = (torch.randn(rows, n, 1, dim, device=DEVICE, dtype=dtype) for n in (heads, kv, kv))
    cache, reference = KvCache(40, size, layers), KvCache(40, size, layers)
    for number in range(layers):
        for slab, other in zip(cache.layer(number, k), reference.layer(number, k), strict=True):
            other.copy_(slab.normal_())
    assert cache.keys is not None and cache.values is not None
    table = torch.randperm(40, device=DEVICE)[: rows * count].view(rows, count)
    position = torch.tensor([0, 3, size - 1, size, count * size - 1], device=DEVICE)
    step = PagedDecode(reference, table, position)
    for layer in range(layers):
        found = paged_attention(q, k, v, cache.keys, cache.values, layer, table.int(), position, 0.2, window, splits)
        expected = step.attend(layer, q, k, v, 0.2, window or None)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.keys, reference.keys) and torch.equal(cache.values, reference.values)


def test_rows_of_a_larger_buffer_are_read_by_their_strides() -> None:
    """As the graphs do: a slice of the table, and queries that are slices of one projection."""
    from covey.rollout.embedded.kernels import paged_attention

    torch.manual_seed(0)
    rows, heads, kv, dim, size = 3, 4, 2, 16, 16
    joint = torch.randn(rows, 1, (heads + 2 * kv) * dim, device=DEVICE)
    q, k, v = (
        part.view(rows, 1, -1, dim).transpose(1, 2) for part in joint.split([heads * dim, kv * dim, kv * dim], -1)
    )
    cache, reference = KvCache(10, size, 1), KvCache(10, size, 1)
    for slab, other in zip(cache.layer(0, k), reference.layer(0, k), strict=True):
        other.copy_(slab.normal_())
    assert cache.keys is not None and cache.values is not None
    table = torch.randperm(10, device=DEVICE).int().view(2, 5).repeat(2, 1)[:rows, :3]
    table[2] = torch.tensor([9, 9, 9])
    position = torch.tensor([40, 33, 2], device=DEVICE)
    found = paged_attention(q, k, v, cache.keys, cache.values, 0, table, position, 0.3, 0, 2)
    expected = PagedDecode(reference, table.long(), position).attend(0, q.contiguous(), k, v, 0.3, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_enough_programs_for_the_processors_and_never_too_many() -> None:
    from covey.rollout.embedded.kernels import splits_for

    for rows, heads in ((1, 2), (8, 2), (256, 8), (3, 3)):
        splits = splits_for(rows, heads, 132)
        assert splits & (splits - 1) == 0
        assert splits == 32 or splits * rows * heads >= 2 * 132 or (splits == 1 and rows * heads >= 132)


PROMPTS = [  # query heads, key heads, head size, block size, window
    (14, 2, 64, 64, 0),
    (4, 4, 80, 16, 20),
    (6, 2, 8, 16, 1),
    (8, 1, 128, 16, 0),
    (3, 1, 16, 16, 1000),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PROMPTS)
def test_prompt_tokens_attend_like_plain_torch(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Sequences that begin, continue, end inside of a tile, take several tiles, and continue in a later tile."""
    from covey.rollout.embedded.kernels import TILE, paged_prefill

    torch.manual_seed(0)
    heads, kv, dim, size, window = shape
    spans = [(0, 0, 5), (1, 7, 7 + 2 * TILE + 3), (2, 0, TILE), (2, TILE, TILE + 9), (3, 2 * size + 1, 2 * size + 2)]
    width = -(-max(end for _, _, end in spans) // size)
    tiles = [(row, at, min(at + TILE, end)) for row, start, end in spans for at in range(start, end, TILE)]
    blocks = torch.randperm(4 * width, device=DEVICE).view(4, width)
    position = torch.full((len(tiles) + 1, TILE), -1, device=DEVICE)  # the last tile is empty
    table = torch.zeros(len(tiles) + 1, width, dtype=torch.int32, device=DEVICE)
    for number, (row, start, end) in enumerate(tiles):
        position[number, : end - start] = torch.arange(start, end, device=DEVICE)
        table[number] = blocks[row].int()
    used = position.view(-1) >= 0
    q, k, v = (torch.randn(used.numel(), n, 1, dim, device=DEVICE, dtype=dtype) for n in (heads, kv, kv))
    cache, reference = KvCache(4 * width, size, 1), KvCache(4 * width, size, 1)
    for slab, other in zip(cache.layer(0, k), reference.layer(0, k), strict=True):
        other.copy_(slab.normal_())
    assert cache.keys is not None and cache.values is not None
    found = paged_prefill(q, k, v, cache.keys, cache.values, 0, table, position.view(-1), 0.2, window)
    rows = torch.repeat_interleave(torch.tensor([row for row, _, _ in tiles] + [0], device=DEVICE), TILE)[used]
    for row in range(4):
        mine = used.nonzero()[:, 0][rows == row]
        at = position.view(-1)[mine]
        step = Prefill(reference, blocks[row : row + 1], at[:1], at[-1:] - at[:1] + 1, len(mine))
        parts = (x[mine, :, 0].transpose(0, 1)[None] for x in (q, k, v))
        expected = step.attend(0, *parts, 0.2, window or None)[0]
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[mine, 0], expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.keys, reference.keys) and torch.equal(cache.values, reference.values)


@pytest.mark.parametrize("splits", [1, 4])
def test_an_idle_row_writes_nothing_and_its_output_is_finite(splits: int) -> None:
    from covey.rollout.embedded.kernels import paged_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 1, 16, device=DEVICE) for n in (4, 2, 2))
    cache = KvCache(6, 16, 1)
    keys, values = (slab.fill_(math.nan) for slab in cache.layer(0, k))
    table, position = torch.arange(6, device=DEVICE).int().view(3, 2), torch.tensor([-1, 0, -1], device=DEVICE)
    assert cache.keys is not None and cache.values is not None
    out = paged_attention(q, k, v, cache.keys, cache.values, 0, table, position, 0.3, 0, splits)
    assert bool(out.isfinite().all())
    written = keys.isfinite() & values.isfinite()
    assert written[2, :, 0].all() and int(written.sum()) == 2 * 16


def test_rows_become_idle_at_an_end_token_and_at_their_limit() -> None:
    from covey.rollout.embedded.kernels import draw_and_advance

    rows, steps = 4, 6
    logits = torch.full((rows, 50), -1e4, device=DEVICE)
    for row, token in enumerate((7, 11, 11, 8)):
        logits[row, token] = 0.0
    ids, position = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.tensor([3, 5, -1, 0], device=DEVICE)
    step = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    out_ids = torch.zeros(rows, steps, dtype=torch.int64, device=DEVICE)
    out_logprobs = torch.zeros(rows, steps, device=DEVICE)
    ends, limit = torch.tensor([11, 12], device=DEVICE), torch.tensor([6, 99, 99, 99], device=DEVICE)
    for _ in range(steps):
        numbers = torch.full((rows, steps), 0.5, device=DEVICE)
        heat = torch.ones(rows, device=DEVICE)
        draw_and_advance(logits, heat, numbers, ends, limit, ids, position, step, out_ids, out_logprobs)
    # fed at 3, 4 and 5; the token at 5 ends; idle from the beginning; never ends
    assert out_ids.tolist() == [[7, 7, 7, -1, -1, -1], [11, *[-1] * 5], [-1] * 6, [8] * 6]
    assert position.tolist() == [-1, -1, -1, 6]


def drawn(logits_BV: Tensor, temperature_B: Tensor, uniform_BT: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Token ids and log-probs of all steps, by rows that do not end."""
    from covey.rollout.embedded.kernels import draw_and_advance

    rows, steps = uniform_BT.shape
    ids, position = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.arange(rows, device=DEVICE)
    step = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    out_ids = torch.zeros(rows, steps, dtype=torch.int64, device=DEVICE)
    out_logprobs = torch.zeros(rows, steps, device=DEVICE)
    ends, limit = torch.tensor([-1], device=DEVICE), torch.full((rows,), 10**6, device=DEVICE)
    for now in range(steps):
        draw_and_advance(
            logits_BV, temperature_B, uniform_BT, ends, limit, ids, position, step, out_ids, out_logprobs, tile
        )
        assert torch.equal(ids, out_ids[:, now])
    assert position.tolist() == [row + steps for row in range(rows)]
    assert step.tolist() == [steps] * rows
    return out_ids.cpu(), out_logprobs.cpu()


@pytest.mark.parametrize(("vocabulary", "tile"), [(1000, 4096), (5000, 1024), (64, 64), (4097, 4096)])
def test_tokens_are_drawn_as_plain_torch_draws_them(vocabulary: int, tile: int) -> None:
    torch.manual_seed(0)
    settings = [Sampling(temperature=t, seed=n) for n, t in enumerate((1.0, 0.7, 1.0, 0.0, 1.3, 0.2))]
    logits = torch.randn(len(settings), vocabulary, device=DEVICE) * 3
    numbers = torch.tensor([[uniform(s.seed, t) for t in range(4)] for s in settings], device=DEVICE)
    temperature = torch.tensor([s.temperature for s in settings], device=DEVICE)
    ids, logprobs = drawn(logits, temperature, numbers, tile)
    for step in range(4):
        expected_ids, expected = draw(logits.cpu(), settings, [step] * len(settings))
        assert ids[:, step].tolist() == expected_ids.tolist()
        torch.testing.assert_close(logprobs[:, step], expected, atol=1e-5, rtol=0)


def test_the_ends_of_the_distribution_can_be_drawn_and_what_has_no_probability_cannot() -> None:
    logits = torch.full((3, 200), -1e4, device=DEVICE)
    logits[:, 70], logits[:, 130] = 0.0, 0.0
    numbers = torch.tensor([[0.0], [1.0], [0.75]], device=DEVICE)  # 1: what a number just below becomes in float32
    ids, logprobs = drawn(logits, torch.ones(3, device=DEVICE), numbers, tile=64)
    assert ids[0, 0] == 70
    assert ids[2, 0] == 130
    assert int(ids[1, 0]) in (70, 130)
    torch.testing.assert_close(logprobs, torch.full((3, 1), 0.5).log())


@pytest.mark.parametrize("vocabulary", [1000, 5000])
def test_logits_that_are_no_numbers_give_a_token_and_no_log_prob(vocabulary: int) -> None:
    """A token outside of the vocabulary would end the process: the next step looks it up on the GPU."""
    logits = torch.zeros(8, vocabulary, device=DEVICE)
    logits[:2] = math.nan
    logits[2:4, -1] = math.nan
    logits[4:6, vocabulary // 2] = math.inf
    temperature = torch.tensor([1.0, 0.0] * 4, device=DEVICE)
    ids, logprobs = drawn(logits, temperature, torch.full((8, 1), 0.5, device=DEVICE), tile=4096)
    assert bool(((ids >= 0) & (ids < vocabulary)).all())
    assert bool(logprobs[:6].isnan().all())
    assert bool(logprobs[6:].isfinite().all()) and float(logprobs[7]) == 0.0


@pytest.mark.parametrize("vocabulary", [151_936, 49_152, 5000])
def test_a_number_next_to_one_draws_a_token_that_has_probability(vocabulary: int) -> None:
    """Partial sums of a parallel scan wobble by a rounding, so several tiles may lie on either side of a number that is
    as large as their sum: the tile after the last has no token."""
    rows = 512 if DEVICE.type == "cuda" else 16
    torch.manual_seed(0)
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 2
    peak = torch.randint(vocabulary, (rows,), device=DEVICE)
    logits[torch.arange(rows, device=DEVICE), peak] += torch.linspace(15, 40, rows, device=DEVICE)
    tiny = 2.0**-24
    numbers = torch.tensor([1.0, 1 - tiny, 1 - 2 * tiny, 1 - 3 * tiny, 0.0, tiny], device=DEVICE).repeat(rows, 1)
    ids, logprobs = drawn(logits, torch.ones(rows, device=DEVICE), numbers, tile=4096)
    assert bool(logprobs.isfinite().all())
    exact = torch.log_softmax(logits.double().cpu(), -1)
    torch.testing.assert_close(logprobs.double(), exact.gather(-1, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_does_not_read_what_a_sequence_does_not_have(window: int, splits: int) -> None:
    """Freed blocks keep what was in them, also what was not finite."""
    from covey.rollout.embedded.kernels import paged_attention

    torch.manual_seed(0)
    rows, heads, kv, dim, size = 3, 4, 2, 16, 16
    q, k, v = (torch.randn(rows, n, 1, dim, device=DEVICE) for n in (heads, kv, kv))
    position = torch.tensor([3, 16, 40], device=DEVICE)
    table = torch.arange(9, device=DEVICE).view(rows, 3)
    found = []
    for filler in (0.0, math.nan):
        cache = KvCache(9, size, 1)
        for slab in cache.layer(0, k):
            torch.manual_seed(1)
            slab.fill_(filler)
            for row, last in enumerate(position.tolist()):
                for at in range(max(0, last - window + 1) if window else 0, last):
                    slab[table[row, at // size], :, at % size] = torch.randn(kv, dim, device=DEVICE)
        assert cache.keys is not None and cache.values is not None
        found.append(paged_attention(q, k, v, cache.keys, cache.values, 0, table.int(), position, 0.3, window, splits))
        eager = PagedDecode(cache, table, position).attend(0, q, k, v, 0.3, window or None)
        torch.testing.assert_close(eager, found[-1], atol=1e-5, rtol=1e-5)
    assert bool(found[0].isfinite().all())
    assert torch.equal(found[0], found[1])
