"""Question answering with passages to search (HotpotQA, MuSiQue, 2WikiMultihopQA), and IFEval's instructions.

The QA sets are read as their authors publish them, each row with its passages, or as one file of questions for all sets
(`dataset`, `split`, `answers`, `gold_passage_ids`) with one of passages (`id`, `title`, `text`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from covey.tasks.datasets.dataset import CORPUS, TEST, TRAIN, Choice, Dataset, Hub, SkippedRow, Source, Url, Values

PROMPT = "{question}\n\nGive the answer in a few words inside <answer> and </answer>."
SPLITS = {"train": TRAIN, "dev": TEST, "validation": TEST, "test": TEST}
PASSAGE_IDS = ("gold_passage_ids", "context_passage_ids")
JOINED = {"2wiki": "2wikimultihopqa"}  # names of sets in the file of questions for all sets
GOLD_COMPLETE = Choice(
    "gold_complete", "true: only questions whose every passage is in the corpus; [true, false]: all", (True,)
)


def _row_of(name: str) -> Any:
    def row(values: Values, split: str) -> tuple[str, dict[str, Any]]:
        if "dataset" in values:
            if values["dataset"] != JOINED.get(name, name):
                raise SkippedRow(f"of another set, {values['dataset']}")
            split = SPLITS[values["split"]]
        answers = values.get("answers") or [values.get("answer"), *(values.get("answer_aliases") or [])]
        return split, {
            "data_id": str(values.get("id") or values["_id"]),
            "question": str(values["question"]).strip(),
            "answer": [str(one) for one in dict.fromkeys(answers) if one not in (None, "")],
            "type": str(values.get("type") or ""),
            "gold_titles": list(values.get("gold_titles") or _supporting(values)),
            "gold_complete": bool(values.get("gold_complete", True)),
        }

    return row


def _supporting(values: Values) -> list[str]:
    if "paragraphs" in values:
        titles = [one["title"] for one in values["paragraphs"] if one.get("is_supporting")]
    else:
        facts = _decoded(values.get("supporting_facts") or [])
        titles = facts["title"] if isinstance(facts, dict) else [title for title, _ in facts]
    return list(dict.fromkeys(map(str, titles)))


def _corpus_of(name: str) -> Any:
    def corpus(rows: Sequence[Values], passages: Sequence[Values]) -> list[dict[str, str]]:
        """The passages of this set or that its rows refer to, and those within the rows."""
        ids = {one for row in rows for key in PASSAGE_IDS for one in row.get(key) or ()}
        separate = [
            {"id": str(one["id"]), "title": str(one["title"]), "text": str(one["text"])}
            for one in passages
            if one["id"] in ids or str(one.get("src", "")).startswith(JOINED.get(name, name))
        ]
        own = dict.fromkeys((one["title"], one["text"]) for row in rows for one in passages_of(row))
        return separate + [{"id": f"{name}-{n}", "title": title, "text": text} for n, (title, text) in enumerate(own)]

    return corpus


def passages_of(values: Values) -> list[dict[str, str]]:
    """The passages within a row of HotpotQA, 2WikiMultihopQA or MuSiQue."""
    if "paragraphs" in values:
        return [{"title": one["title"], "text": one["paragraph_text"]} for one in values["paragraphs"]]
    context = _decoded(values.get("context") or [])
    if isinstance(context, dict):
        context = zip(context["title"], context.get("sentences") or context["content"], strict=True)
    return [{"title": title, "text": " ".join(map(str.strip, sentences))} for title, sentences in context]


def _decoded(value: Any) -> Any:
    """Some tables store lists as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def _set(name: str, about: str, licence: str, repo: str, patterns: tuple[str, str], rows: tuple[int, int]) -> Dataset:
    train, test = patterns
    return Dataset(
        name=name,
        about=about,
        home=f"huggingface.co/datasets/{repo}",
        licence=licence,
        reward="qa_f1_reward",
        sources=(
            Source(CORPUS, None, ("corpus*",), optional=True),
            Source(TRAIN, Hub(repo, train), ("*train*", "questions*")),
            Source(TEST, Hub(repo, test), ("*dev*", "*validation*", "*test*"), optional=True),
        ),
        columns=("question", "answer|answers", "id|_id"),
        row=_row_of(name),
        rows={TRAIN: rows[0], TEST: rows[1]},
        prompt=PROMPT,
        choices={"gold_complete": GOLD_COMPLETE},
        corpus=_corpus_of(name),
    )


HOTPOTQA = _set(
    "hotpotqa",
    "questions over two articles of Wikipedia",
    "CC-BY-SA-4.0",
    "hotpotqa/hotpot_qa",
    ("distractor/train-*.parquet", "distractor/validation-*.parquet"),
    (90447, 7405),
)
MUSIQUE = _set(
    "musique",
    "questions made of two to four simple ones",
    "CC-BY-4.0",
    "dgslibisey/MuSiQue",
    ("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl"),
    (19938, 2417),
)
WIKI2 = _set(
    "2wiki",
    "questions over several articles of Wikipedia, with their evidence",
    "Apache-2.0",
    "xanhho/2WikiMultihopQA",
    ("train*.parquet", "dev*.parquet"),
    (167454, 12576),
)


# -- IFEval ------------------------------------------------------------------------------------------------------------


def _ifeval(values: Values, split: str) -> tuple[str, dict[str, Any]]:
    kinds, settings = list(values["instruction_id_list"]), list(values["kwargs"])
    if len(kinds) != len(settings):
        raise ValueError(f"{len(kinds)} instructions in instruction_id_list, {len(settings)} in kwargs")
    # Tables give every row the settings of all kinds; those of other kinds are null.
    settings = [{k: v for k, v in (one or {}).items() if v is not None} for one in settings]
    return split, {
        "data_id": str(values["key"]),
        "question": values["prompt"],
        "instruction_id_list": kinds,
        "kwargs": settings,
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
    row=_ifeval,
    rows={TEST: 541},
    json_columns=("kwargs",),
    kinds=lambda columns: columns["instruction_id_list"],
)
