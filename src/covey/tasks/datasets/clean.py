"""What is taken out of a set before it is written, and why.

Training rows go when they have no question or no answer, when they repeat an earlier one, and when their question is
asked in evaluation. Evaluation rows stay, so that results can be compared with others'; what repeats among them is
counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.tasks.datasets.dataset import TRAIN
from covey.tasks.datasets.text import normal

Row = dict[str, Any]
SHOWN = 3  # places that are named for each reason


@dataclass
class Tally:
    """How many rows went or were remarked upon, by split and reason, with the first few by name."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, split: str, reason: str, example: str) -> None:
        self.counts.setdefault(split, Counter())[reason] += 1
        shown = self.examples.setdefault(split, {}).setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(example)

    def as_json(self) -> dict[str, Any]:
        return {
            split: {
                reason: {"rows": count, "first": self.examples[split][reason]}
                for reason, count in sorted(found.items())
            }
            for split, found in self.counts.items()
        }


def without_empty(rows: Mapping[str, list[Row]], dropped: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {}
    for split, found in rows.items():
        kept[split] = []
        for row in found:
            missing = next((column for column in ("question", "answer") if column in row and _empty(row[column])), None)
            if missing is None:
                kept[split].append(row)
            else:
                dropped.add(split, f"no {missing}", row["data_id"])
    return kept


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def without_repeats(rows: Mapping[str, list[Row]], dropped: Tally, remarked: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {}
    for split, found in rows.items():
        seen: dict[str, Row] = {}
        kept[split] = []
        for row in found:
            first = seen.setdefault(normal(row["question"]), row)
            if first is row:
                kept[split].append(row)
                continue
            reason = "repeats a row" if _content(first) == _content(row) else "repeats a question"
            (dropped if split == TRAIN else remarked).add(split, reason, f"{row['data_id']} = {first['data_id']}")
            if split != TRAIN:
                kept[split].append(row)
    return kept


def _content(row: Row) -> str:
    return json.dumps({k: v for k, v in row.items() if k != "data_id"}, sort_keys=True)


def without_overlap(rows: dict[str, list[Row]], evaluation: Mapping[str, list[Row]], dropped: Tally) -> None:
    """Take out of training what any of the evaluation sets, by their names, asks."""
    asked = {normal(row["question"]): (name, row) for name, found in evaluation.items() for row in found}
    kept = []
    for row in rows.get(TRAIN, []):
        if (met := asked.get(normal(row["question"]))) is None:
            kept.append(row)
        else:
            dropped.add(TRAIN, f"asked in {met[0]}", f"{row['data_id']} = {met[1]['data_id']}")
    if TRAIN in rows:
        rows[TRAIN] = kept
