"""Mathematics: GSM8K, MATH, AIME, AMC, DeepScaleR and DAPO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from covey.tasks.datasets.dataset import TEST, TRAIN, Choice, Dataset, Hub, SkippedRow, Source, Url, Values

BOXED = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
HASHES = '{question}\n\nLet\'s think step by step and output the final answer after "####".'
QWEN_MATH = "https://raw.githubusercontent.com/QwenLM/Qwen2.5-Math/main/evaluation/data"
GRADE_SCHOOL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
LEVELS = Choice("level", "levels of difficulty, 1 to 5")
SUBJECTS = Choice("subject", "subjects, for example [Algebra, Geometry]")
MATH500 = Source(TEST, Hub("HuggingFaceH4/MATH-500", "test.jsonl"), ("math500*", "test.jsonl", "test-*.parquet"))
# The prompt around the problem in DAPO's published rows, which is removed.
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)


def _gsm8k(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    solution = str(values["answer"])
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError("answer has no `#### number` at its end")
    return split, {"question": values["question"], "answer": answer.strip(), "solution": solution}


def _problem(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    """A row of any collection of problems; their columns have various names."""
    question = values.get("problem") or values.get("question") or values.get("prompt")
    if isinstance(question, list):
        question = question[-1]["content"]
    question = str(question or "")
    for words in DAPO_PROMPT:
        question = question.replace(words, "")
    row: dict[str, Any] = {"question": question.strip(), "answer": _answer(values)}
    if values.get("unique_id") or values.get("id") is not None:
        row["data_id"] = str(values.get("unique_id") or values["id"])
    if values.get("level") is not None:
        digits = "".join(c for c in str(values["level"]) if c.isdigit())
        row["level"] = int(digits) if digits else None
    if subject := values.get("subject") or values.get("type"):
        row["subject"] = subject
    return split, row


def _dapo(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    """A row of DAPO, whose `solution` is the answer itself."""
    answered = "answer" in values or "reward_model" in values
    return _problem(values if answered else {**values, "answer": values["solution"]}, split)


def _answer(values: Values) -> str:
    answer = values.get("answer")
    if answer is None and isinstance(values.get("reward_model"), dict):
        answer = values["reward_model"].get("ground_truth")
    if answer in (None, "") and values.get("solution") is not None:
        answer = last_boxed(str(values["solution"]))
        if answer is None:
            raise SkippedRow("no \\boxed answer in the solution")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # tables with nulls store 27 as 27.0
    return "" if answer is None else str(answer).strip()


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} with balanced braces, or the text after `\\boxed `."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("boxed" if text.startswith("\\boxed", start) else "fbox")[2]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:index]
    return None


def _qwen_set(name: str, about: str, file: str, rows: int, licence: str) -> Dataset:
    return Dataset(
        name=name,
        about=about,
        home="github.com/QwenLM/Qwen2.5-Math",
        licence=licence,
        reward="math_verify",
        sources=(Source(TEST, Url(f"{QWEN_MATH}/{file}/test.jsonl"), (f"{file}*", "test.jsonl")),),
        columns=("problem|question", "answer|solution"),
        row=_problem,
        rows={TEST: rows},
        prompt=BOXED,
    )


def _collection(name: str, about: str, source: Source, licence: str, rows: int, tested: tuple[str, ...]) -> Dataset:
    assert isinstance(source.home, Hub)
    return Dataset(
        name=name,
        about=about,
        home=f"huggingface.co/datasets/{source.home.repo}",
        licence=licence,
        reward="math_verify",
        sources=(source,),
        columns=("problem|question|prompt", "answer|reward_model|solution"),
        row=_problem,
        rows={TRAIN: rows},
        prompt=BOXED,
        evaluated_on=tested,
    )


GSM8K = Dataset(
    name="gsm8k",
    about="grade school mathematics in words",
    home="github.com/openai/grade-school-math",
    licence="MIT",
    reward="math_verify",
    sources=tuple(
        Source(s, Url(f"{GRADE_SCHOOL}/{s}.jsonl"), (f"{s}.jsonl", f"gsm8k*{s}*", f"{s}-*.parquet"))
        for s in (TRAIN, TEST)
    ),
    columns=("question", "answer"),
    row=_gsm8k,
    rows={TRAIN: 7473, TEST: 1319},
    prompt=HASHES,
)
MATH = Dataset(
    name="math",
    about="competition mathematics: MATH to train on, MATH-500 to be tested on",
    home="huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500",
    licence="MIT",
    reward="math_verify",
    sources=(
        Source(TRAIN, Hub("DigitalLearningGmbH/MATH-lighteval", "data/train-*.parquet"), ("math*train*", "train*")),
        MATH500,
    ),
    columns=("problem", "answer|solution"),
    row=_problem,
    rows={TRAIN: 7500, TEST: 500},
    prompt=BOXED,
    choices={"levels": LEVELS, "subjects": SUBJECTS},
)
MATH_500 = Dataset(
    name="math500",
    about="500 problems of MATH's test set",
    home="huggingface.co/datasets/HuggingFaceH4/MATH-500",
    licence="MIT",
    reward="math_verify",
    sources=(MATH500,),
    columns=("problem", "answer"),
    row=_problem,
    rows={TEST: 500},
    prompt=BOXED,
    choices={"levels": LEVELS, "subjects": SUBJECTS},
)
AIME24 = _qwen_set(
    "aime24", "American Invitational Mathematics Examination 2024", "aime24", 30, "MIT (collection); problems: MAA"
)
AMC23 = _qwen_set("amc23", "American Mathematics Competitions 2023", "amc23", 40, "MIT (collection); problems: MAA")
DEEPSCALER = _collection(
    "deepscaler",
    "problems of AIME, AMC, Omni-MATH and STILL, to train on",
    Source(TRAIN, Hub("agentica-org/DeepScaleR-Preview-Dataset", "deepscaler.json"), ("deepscaler*",)),
    "MIT",
    40315,
    ("aime24", "amc23"),
)
DAPO_MATH = replace(
    _collection(
        "dapo_math",
        "problems whose answers are whole numbers, to train on",
        Source(TRAIN, Hub("open-r1/DAPO-Math-17k-Processed", "all/*.parquet"), ("dapo*",)),
        "Apache-2.0",
        17398,
        ("aime24",),
    ),
    row=_dapo,
)
