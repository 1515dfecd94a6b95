"""A ledger of every comparison with another implementation.

`ledger.same` measures a deviation and fails beyond the tolerance; `ledger.differs` records one that is meant, with its
reason. The run ends with a table; `--oracle-table FILE` also writes it as a page, and then nothing may be skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TOLERANCE = 1e-6


@dataclass
class Row:
    cases: int = 0
    largest: float = 0.0
    slope: float | None = None  # the same of the gradient, where there is one
    reason: str = ""


Rows = dict[tuple[str, str], Row]  # by what is Covey's and what is theirs


class Ledger:
    def __init__(self) -> None:
        self.same_rows: Rows = {}
        self.other_rows: Rows = {}

    def same(self, covey: str, oracle: str, ours: Tensor | float, theirs: Tensor | float) -> None:
        found = deviation(ours, theirs)
        _add(self.same_rows, covey, oracle, found)
        assert found <= TOLERANCE, f"{covey} deviates from {oracle} by {found:.3g}\nours   {ours}\ntheirs {theirs}"

    def same_loss(self, covey: str, oracle: str, ours: Tensor, theirs: Tensor, *, of: Tensor) -> None:
        """The value, and the gradient with respect to `of`."""
        self.same(covey, oracle, ours, theirs)
        own, other = (torch.autograd.grad(loss, of, retain_graph=True)[0] for loss in (ours, theirs))
        found = deviation(own, other)
        row = self.same_rows[covey, oracle]
        row.slope = max(row.slope or 0.0, found)
        assert found <= TOLERANCE, f"{covey}'s gradient deviates from {oracle}'s by {found:.3g}\n{own}\n{other}"

    def differs(
        self, covey: str, oracle: str, ours: Tensor | float, theirs: Tensor | float | None, *, because: str
    ) -> None:
        """`theirs` is None where they stop with an error."""
        found = math.inf if theirs is None else deviation(ours, theirs)
        _add(self.other_rows, covey, oracle, found, because)
        assert found != 0, f"{covey} and {oracle} were said to differ, and are equal: {because}"


def deviation(ours: Tensor | float, theirs: Tensor | float) -> float:
    """Largest |ours − theirs| / max(1, |theirs|): absolute for small numbers, relative for large ones."""
    a, b = torch.as_tensor(ours).detach().double(), torch.as_tensor(theirs).detach().double()
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    assert a.isfinite().all(), f"ours is not finite: {a}"
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


def _add(rows: Rows, covey: str, oracle: str, found: float, reason: str = "") -> None:
    row = rows.setdefault((covey, oracle), Row(reason=reason))
    row.cases += 1
    row.largest = found if math.isnan(found) else max(row.largest, found)


LEDGER = Ledger()


@pytest.fixture
def ledger() -> Ledger:
    return LEDGER


def page(faults: list[str]) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("verl", "trl", "torch"))
    plugged = {key: row for key, row in LEDGER.same_rows.items() if "plug-in" in key[1]}
    shared = {key: row for key, row in LEDGER.same_rows.items() if key not in plugged}
    lines = [
        "# Covey beside other implementations",
        "",
        "Written by `make oracles`, which installs the other implementations into an environment of their own, runs",
        "their code and Covey's on the same random inputs in float64 (`tests/oracles/`), and measures.",
        "",
        f"Versions: {versions}.",
        "",
        "## The same",
        "",
        f"Deviation is |ours − theirs| / max(1, |theirs|), the largest over all cases; the limit is {TOLERANCE:g}.",
        "",
        *_table(shared),
        "",
        "## Covey's plug-in inside verl",
        "",
        "The same numbers by Covey itself and through verl's trainer and actor code (docs/verl.md).",
        "",
        *_table(plugged),
        "",
        "## Different on purpose",
        "",
        "| Covey | other | cases | deviation | why |",
        "|---|---|---|---|---|",
        *(
            f"| {ours} | {theirs} | {row.cases} | {_number(row.largest)} | {row.reason} |"
            for (ours, theirs), row in _sorted(LEDGER.other_rows)
        ),
    ]
    if faults:
        lines += ["", "## Known faults of Covey's", "", *(f"- {fault}" for fault in faults)]
    return "\n".join(lines) + "\n"


def _table(rows: Rows) -> list[str]:
    return [
        "| Covey | other | cases | largest deviation | of the gradient |",
        "|---|---|---|---|---|",
        *(
            f"| {ours} | {theirs} | {row.cases} | {_number(row.largest)} | {_number(row.slope)} |"
            for (ours, theirs), row in _sorted(rows)
        ),
    ]


def _sorted(rows: Rows) -> list[tuple[tuple[str, str], Row]]:
    """By project, then by name."""
    return sorted(rows.items(), key=lambda item: (item[0][1].split()[0].strip(","), item[0]))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "theirs stops"
    return "theirs is NaN" if math.isnan(value) else "0" if value == 0 else f"{value:.1g}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--oracle-table", metavar="FILE", help="write the comparisons as a page")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if not LEDGER.same_rows:
        return
    text = page([report.wasxfail for report in terminalreporter.stats.get("xfailed", [])])
    terminalreporter.write_line("\n" + text)
    place = config.getoption("--oracle-table", default=None)
    if place and exitstatus == 0 and not _skipped(config):
        Path(place).write_text(text, encoding="utf-8")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A page that is asked for is whole: what was skipped was not compared."""
    if session.config.getoption("--oracle-table", default=None) and _skipped(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped(config: pytest.Config) -> bool:
    return bool(config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped"))
