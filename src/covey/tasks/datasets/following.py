"""Following instructions that a program can verify."""

from __future__ import annotations

from typing import Any

from covey.tasks.datasets.dataset import TEST, Dataset, Source, Url, Values


def _row(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    kinds, settings = list(values["instruction_id_list"]), list(values["kwargs"])
    if len(kinds) != len(settings):
        raise ValueError(f"{len(kinds)} instructions in instruction_id_list, {len(settings)} in kwargs")
    # A table gives every row the settings of all kinds; those that are null belong to others.
    given = [{k: v for k, v in (one or {}).items() if v is not None} for one in settings]
    return split, {
        "data_id": str(values["key"]),
        "question": values["prompt"],
        "instruction_id_list": kinds,
        "kwargs": given,
    }


IFEVAL = Dataset(
    name="ifeval",
    about="prompts with instructions of 25 verifiable kinds",
    home="github.com/google-research/google-research, instruction_following_eval",
    licence="Apache-2.0",
    reward="ifeval",
    sources=(
        Source(
            TEST,
            Url(
                "https://raw.githubusercontent.com/google-research/google-research/master/"
                "instruction_following_eval/data/input_data.jsonl"
            ),
            ("*input_data*", "ifeval*"),
        ),
    ),
    columns=("key", "prompt", "instruction_id_list", "kwargs"),
    row=_row,
    rows={TEST: 541},
    packed=("kwargs",),
)
