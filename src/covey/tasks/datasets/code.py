"""Programs: a description, and tests that the reward runs in the sandbox."""

from __future__ import annotations

from typing import Any

from covey.tasks.datasets.dataset import TEST, TRAIN, VALIDATION, Dataset, LeftOut, Source, Url, Values

GOOGLE = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp"
MBPP_PROMPT = """\
Write a Python program for this task, and reply with all of its code in one Python code block.

{question}

The code should pass these tests:

{test_list}"""
HUMANEVAL_PROMPT = """\
Complete this Python function. Reply with the whole function, and the imports it needs, in one Python code block.

```python
{question}
```"""


def _mbpp(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    number = int(values["task_id"])
    if number <= 10:
        raise LeftOut("task ids 1 to 10 are worked examples")
    split = TEST if number <= 510 else VALIDATION if number <= 600 else TRAIN
    return split, {
        "data_id": f"mbpp/{number}",
        "question": str(values.get("text") or values.get("prompt") or "").strip(),
        "answer": values["code"],
        "test_list": list(values["test_list"]),
        "test_imports": list(values.get("test_imports") or []),
        "test_setup_code": str(values.get("test_setup_code") or ""),
    }


def _humaneval(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    return split, {
        "data_id": values["task_id"],
        "question": values["prompt"],
        "answer": values["canonical_solution"],
        "prompt": values["prompt"],
        "entry_point": values["entry_point"],
        "test": values["test"],
    }


def _mbpp_set(name: str, about: str, file: str, rows: dict[str, int]) -> Dataset:
    return Dataset(
        name=name,
        about=about,
        home="github.com/google-research/google-research, mbpp",
        licence="CC-BY-4.0",
        reward="code_reward",
        sources=(Source(TRAIN, Url(f"{GOOGLE}/{file}"), (file, f"{name}*")),),
        columns=("task_id", "text|prompt", "code", "test_list"),
        row=_mbpp,
        rows=rows,
        prompt=MBPP_PROMPT,
    )


MBPP = _mbpp_set(
    "mbpp", "short Python programs from descriptions", "mbpp.jsonl", {TRAIN: 374, VALIDATION: 90, TEST: 500}
)
MBPP_SANITIZED = _mbpp_set(
    "mbpp_sanitized",
    "the part of MBPP that was verified by hand",
    "sanitized-mbpp.json",
    {TRAIN: 120, VALIDATION: 43, TEST: 257},
)
HUMANEVAL = Dataset(
    name="humaneval",
    about="Python functions from their heads",
    home="github.com/openai/human-eval",
    licence="MIT",
    reward="code_reward",
    sources=(
        Source(
            TEST,
            Url("https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz"),
            ("HumanEval*", "humaneval*"),
        ),
    ),
    columns=("task_id", "prompt", "entry_point", "canonical_solution", "test"),
    row=_humaneval,
    rows={TEST: 164},
    prompt=HUMANEVAL_PROMPT,
)
