"""The optimiser's state in files of several ranks: any rows can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covey.learner.ranks import Ranks
from covey.learner.saving import load_state, save_state


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_rows_that_three_wrote_are_read_by_any_number(tmp_path: Path, readers: int) -> None:
    """Eight rows by 3, 3 and 2, and a weight of one row, which only the first rank has."""
    whole = {"exp_avg/big": torch.rand(8, 2), "exp_avg/small": torch.rand(1, 2), "step/big": torch.tensor(4.0)}
    for rank in range(3):
        rows = {"big": (3 * rank, min(8, 3 * rank + 3)), "small": (min(rank, 1), 1)}
        held = {"exp_avg/big": whole["exp_avg/big"][slice(*rows["big"])], "step/big": whole["step/big"]}
        held["exp_avg/small"] = whole["exp_avg/small"][slice(*rows["small"])]
        save_state(held, rows, tmp_path, Ranks(rank, 3))
    each = -(-8 // readers)
    for reader in range(readers):
        first, last = min(8, each * reader), min(8, each * (reader + 1))
        small = (min(reader, 1), 1)
        found = load_state(tmp_path, {} if readers == 1 else {"big": (first, last), "small": small})
        assert torch.equal(found["exp_avg/big"], whole["exp_avg/big"][first:last])
        assert torch.equal(found["exp_avg/small"], whole["exp_avg/small"][slice(*small)])
        assert torch.equal(found["step/big"], whole["step/big"])
