"""Every training command of the five source documents really runs for two steps: `covey train` in place of its entry
point, smaller sizes and other paths behind it, as `"$@"` appends them. The documents lie beside the repository.

Commands that differ from an earlier one only in numbers run in `make test-slow`; that all of them are valid as printed
is tested in tests/config/test_source_commands.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from tests.config.test_source_commands import DOCUMENTS, Command, find_commands, find_files
from tests.conftest import shared_folder
from tests.docs.workplace import GRADE_SCHOOL, PROGRAMS, QUESTIONS

SIZES = [
    *("model.dtype=float32", "model.device=cpu", "model.context_length=4096", "model.gradient_checkpointing=false"),
    *("data.train_batch_size=2", "data.val_size=2"),
    *("rollout=embedded", "rollout.tensor_parallel=1", "rollout.max_tokens=6", "rollout.max_sequences=8"),
    *("learner.mini_batch_size=2", "learner.micro_batch_size=4"),
    *("loop.total_steps=2", "loop.save_every=0", "loop.save_final=false"),
    *("eval.every=0", "eval.before=false", "eval.after=false", "logging.to=[]"),
]
ONE_DEVICE = {
    "grpo-": ["train_model.num_devices=1", "ref_model.num_devices=1", "inference_model.num_devices=1"],
    "agentfly": ["trainer.n_gpus_per_node=1", "agent.template=null"],
}
FOLLOWED = [
    {"key": i, "prompt": f"say {i}", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    for i in range(120)
]
SOLVED = [{"question": f"{i} + 1 ?", "answer": rf"{i} + 1 = \boxed{{{i + 1}}}"} for i in range(16)]
FILES: dict[str, list[dict[str, Any]]] = {
    "data/rlhf/math/gsm8k_train.json": GRADE_SCHOOL[:16],
    "data/rlhf/math/gsm8k_test.json": GRADE_SCHOOL[16:18],
    "data/rlhf/qa/train_random_8000.json": QUESTIONS,
    "data/rlhf/qa/dev_random_500.json": QUESTIONS[:2],
    "data/rlhf/code/train.json": PROGRAMS,
    "data/rlhf/code/val.json": PROGRAMS[:2],
    "data/train/combined_train.json": SOLVED,
    "data/val/aime24.json": SOLVED[:2],
}


def kind(command: Command) -> str:
    """Commands of one kind differ in numbers and names of models only."""
    return re.sub(r"(=\S*\d\S*|1\.5b|7b|4b|b200|deepseek-r1-|qwen3-|_deepseek-r1)", "", command.text)


def listed() -> Iterator[Any]:
    if not (shared_folder() / "seeds").is_dir():
        yield pytest.param(None, marks=pytest.mark.skip(reason="the source documents are not here"))
        return
    known: set[str] = set()
    for document in DOCUMENTS:
        for number, command in enumerate(find_commands(document)):
            if "sbatch" in command.text:
                continue  # a job's script comes from `covey slurm`: tests/app/test_slurm.py
            marks = [pytest.mark.slow] if kind(command) in known else []
            known.add(kind(command))
            yield pytest.param(command, id=f"{document}-{number}", marks=marks)


def write_files(place: Path, command: Command) -> None:
    """What the documents ask people to have: data sets, data files in data/, a configuration file."""
    for name, rows in FILES.items():
        if name.startswith(("data/train", "data/val")) and "ft/train_gvpo" not in command.text:
            continue
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))
    if "ifeval" in command.text:
        raw = place / "raw/ifeval/input_data.jsonl"
        raw.parent.mkdir(parents=True)
        raw.write_text("\n".join(map(json.dumps, FOLLOWED)))
        assert main(["data", "prepare", "ifeval", "--from", str(raw.parent)]) == 0
    if "--config" in command.words:
        (text,) = (text for text in find_files("gvpo guide") if "python_args:" in text)
        (place / "my_config.yaml").write_text(text)


def sizes(command: Command, model: Path) -> list[str]:
    if "--validate-only" in command.words or "--dry-run" in command.words:
        return [f"model={model}", "model.context_length=4096"]
    more = next((words for name, words in ONE_DEVICE.items() if name in command.text), [])
    group = "1" if "agent.num_chains=1" in command.words else "4"
    if "deepscaler" in command.text:
        more = [*more, "data.train_files=data/rlhf/math/gsm8k_train.json", "reward.options.length.max_tokens=3"]
    return [f"model={model}", *SIZES, *more, f"rollout.group_size={group}"]


@pytest.mark.parametrize("command", listed())
def test_a_command_of_the_documents_runs(
    command: Command,
    place: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_files(place, command)
    for name, value in command.variables.items():
        if name not in ("DATA_DIR", "CKPT_DIR"):  # paths
            monkeypatch.setenv(name, value)
    known = set(Path().rglob("metrics.jsonl"))
    code = main(["train", *command.words, *sizes(command, tiny_model_folder)])
    told = capsys.readouterr()
    assert code == 0, told.err
    runs = sorted(set(Path().rglob("metrics.jsonl")) - known)
    sweep = [word.count(",") + 1 for word in command.words if "," in word and "[" not in word]
    expected = 0 if {"--validate-only", "--dry-run"} & {*command.words} else 1
    for count in sweep if "--multirun" in command.words else []:
        expected *= count
    assert len(runs) == expected
    for path in runs:
        assert [json.loads(line)["kind"] for line in path.read_text().splitlines()].count("step") == 2
        info = json.loads((path.parent / "run.json").read_text())
        assert info["algorithm"] == expected_algorithm(command)
        assert info["reward_names"] == expected_rewards(command)


def expected_algorithm(command: Command) -> str:
    """What the document's own entry point trains with."""
    if "grpo-" in command.text:
        return "grpo"
    if found := re.search(r"adv_estimator=(\w+)|train_deepscaler_(\w+?)_", command.text):
        return found[1] or found[2]
    return "gvpo"


def expected_rewards(command: Command) -> list[str]:
    if "ifeval" in command.text:
        return ["ifeval"]
    if found := re.search(r'reward_name="(\w+)"', command.text):
        return [found[1]]
    if "deepscaler" in command.text:
        return ["math_verify", "length"]
    if command.text == "python train_gvpo.py":  # of the minimal script, whose reward function is a placeholder
        return ["sorted"]
    return ["math_verify"]
