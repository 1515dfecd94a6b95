"""covey sample: a question of the user's own is asked as training asks its tasks; tasks come from any file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import covey.cli.sample as module
from covey.cli.main import main
from covey.config.schema import DataConfig
from covey.tasks import load_tasks
from covey.tasks.load import ask_like_tasks, shared_context
from covey.types import Group, Task
from tests.conftest import byte_tokenizer

SHORT = ["rollout.max_tokens=3", "-n", "1"]
TINY = ["data.train_batch_size=2", "rollout.group_size=2", "loop.total_steps=1", "rollout.max_tokens=3"]
TINY += ["eval.before=false", "eval.after=false", "logging.to=[]"]


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """What the command asked and was answered, in a folder of its own."""
    found: list[Group] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_print_group", lambda group, *_: found.append(group))
    return found


def trained(model: Path, *words: str) -> tuple[Path, list[dict[str, Any]]]:
    """A run, and the lines of its episodes file."""
    assert main(["train", f"model={model}", *TINY, *words]) == 0
    (run,) = Path("outputs").glob("*/*")
    return run, [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


def prompts(groups: Sequence[Group]) -> list[str]:
    """What the model was given, as text."""
    return [byte_tokenizer().decode(group.episodes[0].turns[0].prompt_ids) for group in groups]


def rendered(messages: Sequence[Any]) -> str:
    """By the chat template alone."""
    tokenizer = byte_tokenizer()
    text = tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True, tokenize=False)
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))


def test_a_question_is_asked_as_in_training(
    tiny_model_folder: Path, groups: list[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    run, episodes = trained(tiny_model_folder, "data=largest", "data.options.count=4")
    asked = [message for message in episodes[0]["messages"] if message["role"] != "assistant"][-1]["content"]
    assert main(["sample", str(run), "--question", asked, *SHORT]) == 0
    before = episodes[0]["messages"][:-1]  # the last is the answer that was sampled
    assert [m["role"] for m in before] == ["system", "user", "assistant", "user"]
    assert prompts(groups) == [rendered(before)]
    assert "asked after the 3 messages that every task begins with" in capsys.readouterr().err
    groups.clear()
    assert main(["sample", str(run), "--question", "Which is the largest: 1 or 2?", "--plain", *SHORT]) == 0
    assert prompts(groups) == [rendered([{"role": "user", "content": "Which is the largest: 1 or 2?"}])]


def test_a_model_alone_is_asked_nothing_else(tiny_model_folder: Path, groups: list[Group]) -> None:
    question = {"role": "user", "content": "hello?"}
    assert main(["sample", str(tiny_model_folder), "--question", "hello?", *SHORT]) == 0
    system = "data.system_prompt=be kind"
    assert main(["sample", str(tiny_model_folder), "--question", "hello?", system, *SHORT]) == 0
    assert main(["sample", str(tiny_model_folder), "--question", "hello?", "data=arithmetic", *SHORT]) == 0
    context = load_tasks(DataConfig(name="arithmetic"), 0).validation[0].messages[:-1]
    assert prompts(groups) == [
        rendered([question]),
        rendered([{"role": "system", "content": "be kind"}, question]),
        rendered([*context, question]),
    ]


def test_tasks_of_a_file_of_ones_own(tiny_model_folder: Path, groups: list[Group]) -> None:
    """Also on a run with files of its own: what the user names is asked."""
    for name in ("train", "test", "mine"):
        rows = [json.dumps({"question": f"{name} {i}?", "answer": str(i)}) for i in range(3)]
        Path(f"{name}.jsonl").write_text("\n".join(rows))
    mine = ["data.train_files=mine.jsonl", "--tasks", "2", *SHORT]
    assert main(["sample", str(tiny_model_folder), *mine]) == 0
    run, _ = trained(tiny_model_folder, "data.train_files=train.jsonl", "data.val_files=test.jsonl", "reward=exact")
    assert main(["sample", str(run), "--tasks", "1", *SHORT]) == 0
    assert main(["sample", str(run), *mine]) == 0
    assert main(["sample", str(run), "data.val_files=train.jsonl", *mine]) == 0
    asked = [group.task.messages[-1]["content"] for group in groups]
    assert asked == ["mine 0?", "mine 1?", "test 0?", "mine 0?", "mine 1?", "train 0?", "train 1?"]
    assert all(group.episodes[0].rewards["exact"] is not None for group in groups)


def test_without_its_files_a_run_is_asked_the_question_alone(
    tiny_model_folder: Path, groups: list[Group], capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1?"}], "answer": "1"}
    Path("train.jsonl").write_text(json.dumps(row))
    run, _ = trained(tiny_model_folder, "data.train_files=train.jsonl", "reward=exact", "data.train_batch_size=1")
    assert main(["sample", str(run), "--question", "2?", *SHORT]) == 0
    Path("train.jsonl").unlink()
    assert main(["sample", str(run), "--question", "2?", *SHORT]) == 0
    assert prompts(groups) == [
        rendered([{"role": "system", "content": "be brief"}, {"role": "user", "content": "2?"}]),
        rendered([{"role": "user", "content": "2?"}]),
    ]
    assert (
        "asking the question alone, since the tasks are not on this machine: data.train_files"
        in capsys.readouterr().err
    )


def test_the_prompt_of_a_data_set_stands_around_the_question() -> None:
    """gsm8k: its files are not needed. `data.options.prompt` replaces it; a system prompt stands before it."""
    options = {"prompt": "Solve {question} in \\boxed{}"}
    task = ask_like_tasks("1+1?", DataConfig(name="gsm8k", options=options, system_prompt="be brief"), 0)
    assert task.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "Solve 1+1? in \\boxed{}"},
    )


def test_only_what_all_tasks_begin_with_is_shared() -> None:
    def task(*texts: str) -> Task:
        roles = {"S": "system", "U": "user", "A": "assistant"}
        return Task(" ".join(texts), tuple({"role": roles[text[0]], "content": text} for text in texts))

    def shared(*tasks: Task) -> list[str]:
        return [message["content"] for message in shared_context(tasks)]

    assert shared() == []
    assert shared(task("S", "U1"), task("S", "U2")) == ["S"]
    assert shared(task("S1", "U1"), task("S2", "U1")) == []
    assert shared(task("S", "U", "A", "U1"), task("S", "U", "A", "U2")) == ["S", "U", "A"]
    assert shared(task("S", "U", "A1", "U1"), task("S", "U", "A2", "U2")) == ["S"]  # no question without its reply
    assert shared(task("S", "U", "A", "U1"), task("S", "U2")) == ["S"]
