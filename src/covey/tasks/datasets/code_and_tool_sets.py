"""Code with tests for the sandbox (MBPP, HumanEval), and function calling (BFCL, ToolRL's rlla)."""

from __future__ import annotations

import json
from typing import Any

from covey.tasks.datasets.dataset import (
    ANSWERS,
    TEST,
    TRAIN,
    VALIDATION,
    Choice,
    Dataset,
    SkippedRow,
    Source,
    Url,
    Values,
)

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
        raise SkippedRow("task ids 1 to 10 are worked examples")
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
    about="Python functions to complete",
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


# -- Function calling --------------------------------------------------------------------------------------------------

BERKELEY = (
    "https://raw.githubusercontent.com/ShishirPatil/gorilla/main/berkeley-function-call-leaderboard/bfcl_eval/data"
)
TOOLRL = "https://raw.githubusercontent.com/qiancheng0/ToolRL/main/dataset/rlla_4k"
AST = {  # category: rows; calls are compared with the acceptable ones
    "simple_python": 400,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 200,
    "live_simple": 258,
    "live_multiple": 1053,
    "live_parallel": 16,
    "live_parallel_multiple": 24,
}
NOTHING_TO_CALL = {"irrelevance": 240, "live_irrelevance": 884}  # correct if nothing is called
BFCL_PROMPT = """\
You can call functions. Call those that the request needs, with arguments taken from the conversation, and write each \
call on a line of its own, like this:
<tool_call>{"name": "function_name", "arguments": {"parameter": "value"}}</tool_call>
If no function fits, or a required argument is missing, say so and call nothing. These are the functions:
{function}"""


def _bfcl(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    category = str(values["id"]).rpartition("_")[0]
    if category in AST and "ground_truth" not in values:
        raise ValueError(f"no ground truth for id {values['id']}: give the file of possible_answer too")
    messages = list(values["question"][0])
    return split, {
        "data_id": values["id"],
        "question": messages[-1]["content"],
        "messages": messages,
        "category": category,
        "function": values["function"],
        "ground_truth": values.get("ground_truth", []),
    }


def _bfcl_messages(row: Values, prompt: str) -> list[dict[str, Any]]:
    """The prompt with one function per line, joined with the conversation's own system message, if it has one."""
    listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in row["function"])
    system, messages = prompt.replace("{function}", listed), list(row["messages"])
    if messages[0]["role"] == "system":
        system += f"\n\n{messages.pop(0)['content']}"
    return [{"role": "system", "content": system}, *messages]


def _files(category: str) -> tuple[Source, ...]:
    file = f"BFCL_v4_{category}.json"
    questions = Source(TEST, Url(f"{BERKELEY}/{file}"), (file,), format=".jsonl")
    if category not in AST:
        return (questions,)
    answers = f"possible_answer/{file}"
    return (Source(ANSWERS, Url(f"{BERKELEY}/{answers}"), (answers,), format=".jsonl"), questions)


BFCL = Dataset(
    name="bfcl",
    about="function calling, single turn: Berkeley Function Calling Leaderboard, version 4",
    home="github.com/ShishirPatil/gorilla, berkeley-function-call-leaderboard",
    licence="Apache-2.0",
    reward="bfcl",
    sources=tuple(source for category in (*AST, *NOTHING_TO_CALL) for source in _files(category)),
    columns=("id", "question", "function"),
    row=_bfcl,
    rows={TEST: sum(AST.values()) + sum(NOTHING_TO_CALL.values())},
    prompt=BFCL_PROMPT,
    messages=_bfcl_messages,
    json_columns=("messages", "function", "ground_truth"),
    choices={
        "categories": Choice("category", f"of {', '.join((*AST, *NOTHING_TO_CALL))}", default=tuple(AST)),
    },
)


def _rlla(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    """A row for verl, or one of the raw conversations: instruction, input, output."""
    if "prompt" in values:
        messages = [{"role": m["role"], "content": m["content"]} for m in values["prompt"]]
        answer = values["reward_model"]["ground_truth"]
    else:
        messages = [
            {"role": "system", "content": values["instruction"]},
            {"role": "user", "content": values["input"]},
        ]
        answer = values["output"]
    return split, {"question": messages[-1]["content"], "messages": messages, "answer": answer}


RLLA = Dataset(
    name="rlla",
    about="tool calls in conversations, with thoughts (ToolRL)",
    home="github.com/qiancheng0/ToolRL",
    licence="Apache-2.0",
    reward="rlla",
    sources=(
        Source(TRAIN, Url(f"{TOOLRL}/train.parquet"), ("rlla*train*", "train.parquet", "rlla_sft*")),
        Source(TEST, Url(f"{TOOLRL}/test.parquet"), ("rlla*test*", "test.parquet")),
    ),
    columns=("prompt|instruction", "reward_model|output"),
    row=_rlla,
    rows={TRAIN: 3920, TEST: 80},
    messages=lambda row, prompt: list(row["messages"]),
    json_columns=("messages",),
)
