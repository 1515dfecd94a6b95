"""Data sets prepared from the public files: rows, dropped rows, prompts, and data.options."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.errors import Absent, InputError
from covey.tasks import DATASETS, TaskSet, load_tasks
from covey.tasks.datasets.prepare import prepare

# -- Loading -----------------------------------------------------------------------------------------------------------


FILES = {
    "gsm8k": ["gsm8k"],
    "math": ["math_train/math_train.jsonl", "math_eval/math500.jsonl"],
    "math500": ["math_eval/math500.jsonl"],
    "aime24": ["math_eval/aime24.jsonl"],
    "amc23": ["math_eval/amc23.jsonl"],
    "deepscaler": ["math_train/deepscaler_sub_1209.jsonl"],
    "dapo_math": ["math_train/dapo_math_17k.jsonl"],
    "ifeval": ["ifeval/input_data.jsonl"],
    "hotpotqa": ["qa"],
    "musique": ["qa"],
    "2wiki": ["qa"],
    "mbpp": ["code/mbpp.jsonl"],
    "mbpp_sanitized": ["code/sanitized-mbpp.json"],
    "humaneval": ["code/HumanEval.jsonl.gz"],
    "bfcl": ["tools/bfcl"],
    "rlla": ["tools/rlla_4k.test.parquet", "tools/rlla_sft.json"],
}
# Rows of the public files less what must go: empty answers, repeated questions, questions of evaluation.
ROWS = {
    "gsm8k": {"train": 7473, "test": 1319},
    "math": {"train": 7482 - 2, "test": 500},
    "math500": {"test": 500},
    "aime24": {"test": 30},
    "amc23": {"test": 40},
    "deepscaler": {"train": 1206 - 1},
    "dapo_math": {"train": 15977 - 80},
    "ifeval": {"test": 541},
    "hotpotqa": {"train": 200, "test": 1670},
    "musique": {"train": 100, "test": 199},
    "2wiki": {"train": 500, "test": 164},
    "mbpp": {"train": 374 - 3, "validation": 90, "test": 500},
    "mbpp_sanitized": {"train": 120, "validation": 43, "test": 257},
    "humaneval": {"test": 164},
    "bfcl": {"test": 2351 + 1124},
    "rlla": {"train": 400 - 1, "test": 80},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(autouse=True)
def data_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(folder))


def made(name: str, folder: Path, shared: Path) -> dict[str, Any]:
    """The manifest; every set is prepared once."""
    if not (folder / name).exists():
        prepare(DATASETS[name], [str(shared / "data" / file) for file in FILES[name]], folder / name)
    result: dict[str, Any] = json.loads((folder / name / "manifest.json").read_text())
    return result


def load(name: str, folder: Path, shared: Path, **settings: Any) -> TaskSet:
    made(name, folder, shared)
    return load_tasks(DataConfig(name=name, **settings), seed=0)


def test_every_set_of_the_list_is_tested() -> None:
    assert set(FILES) == set(ROWS) == set(DATASETS)


def test_the_page_lists_all_data_sets() -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    listed = {row[0].strip("`"): row for row in rows if len(row) == 6}
    assert set(listed) == set(DATASETS)
    for name, dataset in DATASETS.items():
        counts = ", ".join(f"{count:,} {split}" for split, count in dataset.rows.items())
        assert listed[name][2:] == [counts, dataset.home, dataset.licence, f"`{dataset.reward}`"]


@pytest.mark.parametrize("name", FILES)
def test_rows_and_loading(name: str, folder: Path, shared: Path) -> None:
    manifest = made(name, folder, shared)
    assert manifest["rows"] == ROWS[name]
    raw = {Path(file).name for file in FILES[name] if not (shared / "data" / file).is_dir()}
    assert raw <= {source["file"] for source in manifest["sources"]}
    assert all(len(one["sha256"]) == 64 for one in (*manifest["sources"], *manifest["outputs"].values()))
    tasks = load(name, folder, shared)
    assert tasks.reward == DATASETS[name].reward
    assert len(tasks.train) == ROWS[name].get("train", 0)
    both = (*tasks.train, *tasks.validation)
    assert both and len({task.id for task in both}) == len(both)
    assert all(task.messages[-1]["role"] == "user" and task.messages[-1]["content"].strip() for task in both)


def test_prompts(folder: Path, shared: Path) -> None:
    task = load("gsm8k", folder, shared).train[0]
    assert task.id == "gsm8k/train/0" and task.answer == "72"
    (message,) = task.messages
    assert message["content"].startswith("Natalia sold clips to 48")
    assert message["content"].endswith('\n\nLet\'s think step by step and output the final answer after "####".')
    other = load("gsm8k", folder, shared, options={"prompt": "Q: {question}\nA:"}, train_size=1, val_size=2)
    assert other.train[0].messages[0]["content"] == f"Q: {message['content'].partition(chr(10))[0]}\nA:"
    assert (len(other.train), len(other.validation)) == (1, 2)
    system = load("gsm8k", folder, shared, system_prompt="Be brief.", train_size=1).train[0].messages[0]
    assert system == {"role": "system", "content": "Be brief."}


def test_answers_of_mathematics(folder: Path, shared: Path) -> None:
    assert [task.answer for task in load("amc23", folder, shared).validation[:3]] == ["27", "36", "45"]  # 27.0 there
    math = load("math", folder, shared)
    assert math.validation[0].answer == r"\left( 3, \frac{\pi}{2} \right)"
    # Two rows have an empty answer, and a solution that says it.
    result = {task.answer for task in math.train}
    assert r"\mbox{four}" in result and "" not in result


def test_levels_and_subjects_of_math(folder: Path, shared: Path) -> None:
    counts = Counter(json.loads(line)["level"] for line in (shared / "data/math_eval/math500.jsonl").open())
    hard = load("math500", folder, shared, options={"levels": [4, 5]}).validation
    assert len(hard) == counts[4] + counts[5] == 262
    one = load("math", folder, shared, options={"levels": 5, "subjects": ["Geometry"]})
    assert {(t.columns["level"], t.columns["subject"]) for t in (*one.train, *one.validation)} == {(5, "Geometry")}
    with pytest.raises(InputError, match=r"unknown value of data\.options\.levels  7"):
        load("math500", folder, shared, options={"levels": [7]})


def test_deepscaler_is_tested_on_other_sets(folder: Path, shared: Path) -> None:
    for name in ("aime24", "amc23"):
        made(name, folder, shared)
    tasks = load("deepscaler", folder, shared)
    assert Counter(task.id.split("/")[0] for task in tasks.validation) == {"aime24": 30, "amc23": 40}


def test_a_set_to_be_tested_on_that_is_not_here(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    prepared = prepare(DATASETS["deepscaler"], [str(shared / "data" / FILES["deepscaler"][0])], tmp_path / "deepscaler")
    assert prepared.manifest["overlap_not_checked_with"] == ["aime24", "amc23"]
    tasks = load_tasks(DataConfig(name="deepscaler"), seed=0)
    assert not tasks.validation
    assert tasks.warnings[0] == "deepscaler is tested on aime24, which is not prepared: covey data prepare aime24"


def test_instructions_keep_their_settings(folder: Path, shared: Path) -> None:
    task = load("ifeval", folder, shared).validation[0]
    assert task.id == "ifeval/1000"
    assert task.columns["kwargs"] == [{}, {"num_highlights": 3}, {"relation": "at least", "num_words": 300}]


def test_questions_have_a_corpus(folder: Path, shared: Path) -> None:
    tasks = load("hotpotqa", folder, shared)
    assert len(tasks.validation) == 1391  # of 1670 the passages of 279 are not in the corpus
    passages = [json.loads(line) for line in (folder / "hotpotqa/corpus.jsonl").open()]
    titles = {passage["title"] for passage in passages}
    assert all(set(task.columns["gold_titles"]) <= titles for task in (*tasks.train, *tasks.validation))
    assert len(load("hotpotqa", folder, shared, options={"gold_complete": [True, False]}).validation) == 1670


def test_programs(folder: Path, shared: Path) -> None:
    tasks = load("mbpp", folder, shared)
    assert tasks.validation[0].id == "mbpp/11" and tasks.train[0].id == "mbpp/601"
    asked = tasks.validation[0].messages[0]["content"]
    assert all(test in asked for test in tasks.validation[0].columns["test_list"])
    held_out = load("mbpp", folder, shared, options={"split": "validation"}).validation
    assert [held_out[0].id, held_out[-1].id, len(held_out)] == ["mbpp/511", "mbpp/600", 90]
    human = load("humaneval", folder, shared).validation[0]
    assert human.columns["prompt"] in human.messages[0]["content"]


def test_functions_to_call(folder: Path, shared: Path) -> None:
    tasks = load("bfcl", folder, shared).validation
    assert len(tasks) == 2351 and "irrelevance" not in {task.columns["category"] for task in tasks}
    first = tasks[0]
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert '"name": "calculate_triangle_area"' in first.messages[0]["content"]
    assert first.columns["ground_truth"] == [
        {"calculate_triangle_area": {"base": [10], "height": [5], "unit": ["units", ""]}}
    ]
    none = load("bfcl", folder, shared, options={"categories": ["irrelevance"]}).validation
    assert len(none) == 240 and all(task.columns["ground_truth"] == [] for task in none)
    # Who brings a system message keeps it, behind the functions.
    assert all(sum(m["role"] == "system" for m in task.messages) == 1 for task in tasks)


def test_tool_calls_in_conversations(folder: Path, shared: Path) -> None:
    task = load("rlla", folder, shared).validation[0]
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert '{"name": "GetNews", "parameters": {"page": "1"}}' in task.answer


def test_a_set_that_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    with pytest.raises(Absent, match="fix: covey data prepare gsm8k"):
        load_tasks(DataConfig(name="gsm8k"), seed=0)


def test_unknown_options(folder: Path, shared: Path) -> None:
    with pytest.raises(InputError, match="unknown option of data=math500  level\n  did you mean   levels"):
        load("math500", folder, shared, options={"level": 5})
    with pytest.raises(InputError, match=r"data\.options\.prompt must be a text with \{question\} in it"):
        load("math500", folder, shared, options={"prompt": "Solve it."})
    with pytest.raises(InputError, match="math500 has test"):
        load("math500", folder, shared, options={"split": "validation"})


def test_a_file_that_has_changed_is_refused(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    prepare(DATASETS["aime24"], [str(shared / "data" / FILES["aime24"][0])], tmp_path / "aime24")
    file = tmp_path / "aime24/test.parquet"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(InputError, match=r"test\.parquet has changed since it was prepared"):
        load_tasks(DataConfig(name="aime24"), seed=0)


# -- data.options.held_out ---------------------------------------------------------------------------------------------


@pytest.fixture
def ten_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"key": i, "prompt": f"Say {i}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for i in range(10)
    ]
    (tmp_path / "input_data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    assert main(["data", "prepare", "ifeval", "--from", str(tmp_path / "input_data.jsonl")]) == 0


def ids(tasks: object) -> list[str]:
    return [task.id.removeprefix("ifeval/") for task in tasks]  # type: ignore[attr-defined]


def test_held_out_splits_evenly(ten_prompts: None) -> None:
    assert ids(load_tasks(DataConfig("ifeval"), seed=0).train) == []
    parted = load_tasks(DataConfig("ifeval", {"held_out": 3}), seed=0)
    assert ids(parted.validation) == ["0", "3", "6"]
    assert ids(parted.train) == ["1", "2", "4", "5", "7", "8", "9"]
    assert parted.reward == "ifeval"


def test_kinds_of_instructions_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [["punctuation:no_comma"], ["keywords:existence"], ["keywords:frequency"], ["startend:quotation"]]
    kinds += [["keywords:existence", "punctuation:no_comma"], ["keywords:existence", "startend:quotation"]]
    rows = [
        {"key": i, "prompt": f"Say {i}.", "instruction_id_list": one, "kwargs": [{}] * len(one)}
        for i, one in enumerate(kinds)
    ]
    (tmp_path / "input_data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    assert main(["data", "prepare", "ifeval", "--from", str(tmp_path / "input_data.jsonl")]) == 0
    parted = load_tasks(DataConfig("ifeval", {"held_out": ["keywords", "startend:quotation"]}), seed=0)
    assert (ids(parted.train), ids(parted.validation)) == (["0"], ["1", "2", "3", "5"])  # 4 has kinds of both sides
    parted = load_tasks(DataConfig("ifeval", {"held_out": ["keywords:frequency"]}), seed=0)
    assert (ids(parted.train), ids(parted.validation)) == (["0", "1", "3", "4", "5"], ["2"])
    with pytest.raises(InputError, match=r"unknown kind in data.options.held_out +keyword\b"):
        load_tasks(DataConfig("ifeval", {"held_out": ["keyword"]}), seed=0)
    with pytest.raises(InputError, match="leaves no tasks to train on"):
        load_tasks(DataConfig("ifeval", {"held_out": ["keywords", "startend", "punctuation"]}), seed=0)


@pytest.mark.parametrize("count", [0, 10, "three"])
def test_held_out_must_leave_both_splits_non_empty(ten_prompts: None, count: object) -> None:
    with pytest.raises(InputError, match=r"data.options.held_out must be a number from 1 to 9, got"):
        load_tasks(DataConfig("ifeval", {"held_out": count}), seed=0)
