"""Prepares the data of a study as JSON lines, from public files as they were published (`--data`).

    gsm8k/train.jsonl, gsm8k/test.jsonl        question and answer with annotations <<48/2=24>>
    math_eval/math500.jsonl                    problem, answer
    qa/questions.jsonl, qa/corpus.jsonl        questions of HotpotQA, MuSiQue and 2WikiMultihopQA, and their passages
    code/mbpp.jsonl                            MBPP
    ifeval/input_data.jsonl                    IFEval

Sums of two numbers (`sums`) need no file. Nothing is random: the same files give the same data. Training tasks are
never test tasks; demonstrations are made from training tasks that are then not trained on. SVAMP is not among these
files; generated stories stand in for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from studies.plan import GENERATED

Row = dict[str, Any]
ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
GSM8K_DEMONSTRATIONS, QA_DEMONSTRATIONS = 200, 100
STORIES, QA_TEST = 300, 100  # of each QA set
UNSEEN = ("keywords", "startend")  # groups of IFEval's kinds that are not trained on
SEEN_TEST = 60
NEEDS_LANGUAGE = ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")


def prepare(kind: str, source: Path, folder: Path, limit: int | None = None) -> Path:
    """Write the files of this kind of study, and return their folder. `limit`: rows of each file, for a small try."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in KINDS[kind](source).items():
        kept = rows if limit is None or name == "corpus.jsonl" else rows[:limit]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return folder


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# -- Mathematics -------------------------------------------------------------------------------------------------------


def gsm8k(source: Path) -> dict[str, list[Row]]:
    math500 = [
        {"data_id": f"math500/{n}", "question": row["problem"], "answer": row["answer"]}
        for n, row in enumerate(read(source / "math_eval/math500.jsonl"))
    ]
    return _gsm8k(source) | {"math500.jsonl": math500, "stories.jsonl": stories()}


def _gsm8k(source: Path) -> dict[str, list[Row]]:
    return {
        f"gsm8k-{split}.jsonl": [
            {"data_id": f"{split}/{n}", "question": row["question"], "answer": _final(row["answer"])}
            for n, row in enumerate(read(source / f"gsm8k/{split}.jsonl"))
        ]
        for split in ("train", "test")
    }


def _final(solution: str) -> str:
    return solution.rpartition("####")[2].strip().replace(",", "")


def stories() -> list[Row]:
    """Short stories with one or two operations on small numbers."""
    from covey.tasks.problems import Calculator

    generator, rng, found = Calculator(digits=1), Random(0), {}
    while len(found) < STORIES:
        problem = generator.draw(rng)
        if "How many" in problem.question:
            found.setdefault(problem.question, problem.answer)
    return [{"data_id": f"stories/{n}", "question": q, "answer": a} for n, (q, a) in enumerate(found.items())]


# -- Sums --------------------------------------------------------------------------------------------------------------

SUMS = {"demos": 400, "train": 1000, "test": 200}


def sums(_: Path) -> dict[str, list[Row]]:
    """Sums of two numbers of two digits; no pair of numbers is in two files, in either order. Demonstrations are worked
    in full, briefly, or not at all."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a <= b]
    rng = Random(0)
    rng.shuffle(pairs)
    files: dict[str, list[Row]] = {}
    for name, count in SUMS.items():
        drawn = [tuple(rng.sample(pairs.pop(), 2)) for _ in range(count)]
        files[f"sums-{name}.jsonl"] = [
            {"data_id": f"{name}/{n}", "question": f"What is {a} + {b}?", "answer": str(a + b)}
            if name != "demos"
            else {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, _worked(a, b, WAYS[n % len(WAYS)])]}
            for n, (a, b) in enumerate(drawn)
        ]
    return files


WAYS = ("full", "full", "full", "brief", "none")


def _worked(a: int, b: int, way: str) -> Row:
    carry, ones = divmod(a % 10 + b % 10, 10)
    low = f"{a % 10} + {b % 10} = {10 * carry + ones}"
    high = f"{a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}"
    steps = {
        "full": f"The ones are {low}, so I write {ones} and carry {carry}. The tens with the carry are {high}. "
        "So the sum is ",
        "brief": f"{low}, {high}. ",
        "none": "",
    }
    return {"role": "assistant", "content": f"{steps[way]}\\boxed{{{a + b}}}"}


# -- Tools on GSM8K ----------------------------------------------------------------------------------------------------


def tools(source: Path) -> dict[str, list[Row]]:
    """Demonstrations follow the annotations in GSM8K's own solutions: one call for each."""
    files = _gsm8k(source)
    raw = read(source / "gsm8k/train.jsonl")
    usable = [n for n, row in enumerate(raw) if 1 <= len(ANNOTATION.findall(row["answer"])) <= 5]
    shown = usable[: min(GSM8K_DEMONSTRATIONS, len(usable) // 2)]
    train = files.pop("gsm8k-train.jsonl")
    return files | {
        "gsm8k-rest.jsonl": [row for n, row in enumerate(train) if n not in set(shown)],
        "gsm8k-demos-calculator.jsonl": [_calls(raw[n], _calculator) for n in shown],
        "gsm8k-demos-python.jsonl": [_calls(raw[n], _python) for n in shown],
    }


def _calculator(expression: str) -> tuple[str, dict[str, str]]:
    return "calculator", {"expression": expression}


def _python(expression: str) -> tuple[str, dict[str, str]]:
    return "python_executor", {"code": f"print({expression})"}


def _calls(row: Mapping[str, str], call: Callable[[str], tuple[str, dict[str, str]]]) -> Row:
    messages: list[Row] = [{"role": "user", "content": row["question"]}]
    solution = row["answer"].rpartition("####")[0]
    before = 0
    for found in ANNOTATION.finditer(solution):
        name, arguments = call(found[1].strip())
        text = ANNOTATION.sub("", solution[before : found.start()]).strip().removesuffix("=").strip(" $")
        before = found.end()
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        messages.append({"role": "assistant", "content": text, "tool_calls": calls})
        messages.append({"role": "tool", "content": found[2].strip()})
    messages.append({"role": "assistant", "content": f"The answer is \\boxed{{{_final(row['answer'])}}}."})
    return {"messages": messages}


# -- Search ------------------------------------------------------------------------------------------------------------


def search(source: Path) -> dict[str, list[Row]]:
    rows = [row for row in read(source / "qa/questions.jsonl") if row["gold_complete"]]
    corpus = read(source / "qa/corpus.jsonl")
    train = [row for row in rows if row["split"] == "train"]
    count = min(QA_DEMONSTRATIONS, len(train) // 2)
    shown = train[:: len(train) // count][:count]
    ids = {row["id"] for row in shown}
    test: list[Row] = []
    for name in ("hotpotqa", "musique", "2wikimultihopqa"):
        test += [row for row in rows if row["split"] == "dev" and row["dataset"] == name][:QA_TEST]
    passages = {passage["id"]: passage for passage in corpus}
    return {
        "corpus.jsonl": [{key: passage[key] for key in ("id", "title", "text")} for passage in corpus],
        "qa-train.jsonl": [_question(row) for row in train if row["id"] not in ids],
        "qa-test.jsonl": [_question(row) for row in test],
        "qa-demos.jsonl": [_searches(row, passages) for row in shown],
    }


def _question(row: Row) -> Row:
    return {"data_id": row["id"], "question": row["question"], "answer": row["answers"]}


def _searches(row: Row, passages: Mapping[str, Row]) -> Row:
    """A search for the title of each passage that the answer needs. The result shown is that passage, in the form of
    the tool's output, so that no index is needed to make demonstrations."""
    messages: list[Row] = [{"role": "user", "content": row["question"]}]
    for passage in row["gold_passage_ids"][:3]:
        title = passages[passage]["title"]
        query = json.dumps({"query": title}, ensure_ascii=False)
        text = f"Thought: I look up {title}.\nAction: search\nAction Input: {query}"
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "content": f"[1] {title}\n{passages[passage]['text'][:1200]}"})
    final = f"Thought: I know the answer.\nFinal Answer: {row['answers'][0]}"
    return {"messages": [*messages, {"role": "assistant", "content": final}]}


# -- Code --------------------------------------------------------------------------------------------------------------


def code(source: Path) -> dict[str, list[Row]]:
    """As `covey data prepare mbpp`, with its prompt: training tasks that are asked in the test split are dropped."""
    from covey.tasks.datasets.code_and_tool_sets import MBPP, MBPP_PROMPT
    from covey.tasks.datasets.dataset import SkippedRow, normalize_question, user_message

    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for raw in read(source / "code/mbpp.jsonl"):
        try:
            split, row = MBPP.row(raw, "train")
        except SkippedRow:
            continue
        splits[split].append(row)
    asked = {normalize_question(row["question"]) for row in splits["validation"] + splits["test"]}
    splits["train"] = [row for row in splits["train"] if normalize_question(row["question"]) not in asked]
    return {
        f"mbpp-{split}.jsonl": [row | {"question": user_message(row, MBPP_PROMPT)[0]["content"]} for row in rows]
        for split, rows in splits.items()
        if split != "validation"
    }


# -- Instructions ------------------------------------------------------------------------------------------------------


def ifeval(source: Path) -> dict[str, list[Row]]:
    """Ids of test tasks begin with seen/ or unseen/. Prompts with kinds of both sides are dropped."""
    from covey.tasks.datasets.load import hold_out
    from covey.tasks.datasets.question_sets import IFEVAL
    from covey.types import Task

    tasks = []
    for raw in read(source / "ifeval/input_data.jsonl"):
        _, row = IFEVAL.row(raw, "test")
        if not set(row["instruction_id_list"]) & set(NEEDS_LANGUAGE):
            columns = {key: row[key] for key in ("instruction_id_list", "kwargs")}
            tasks.append(Task(row["data_id"], ({"role": "user", "content": row["question"]},), None, columns))
    rest, unseen = hold_out(IFEVAL, tasks, UNSEEN)
    train, seen = hold_out(IFEVAL, rest, min(SEEN_TEST, len(rest) // 2))
    return {
        "ifeval-train.jsonl": list(_instructions(train, "train")),
        "ifeval-test.jsonl": [*_instructions(seen, "seen"), *_instructions(unseen, "unseen")],
    }


def _instructions(tasks: Sequence[Any], group: str) -> Iterator[Row]:
    for task in tasks:
        yield {"data_id": f"{group}/{task.id}", "question": task.messages[0]["content"], **task.columns}


KINDS: Mapping[str, Callable[[Path], dict[str, list[Row]]]] = {
    GENERATED: lambda source: {},
    "sums": sums,
    "gsm8k": gsm8k,
    "tools": tools,
    "search": search,
    "code": code,
    "ifeval": ifeval,
}
