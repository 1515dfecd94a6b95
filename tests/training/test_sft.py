"""Supervised fine-tuning: loss and gradient against plain transformers, killed runs against uninterrupted ones."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms.likelihood import Likelihood
from covey.cli.main import main
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.sandbox.tiers import TIERS
from covey.telemetry.key_metrics import is_machine_dependent
from covey.training.samples import minibatches
from covey.training.sft import SftRun, as_samples, likelihood
from covey.types import Episode, StopReason, Task, Turn
from tests.conftest import tiny_llama


def episodes(count: int = 7, seed: int = 0) -> list[Episode]:
    """Conversations of one or two replies; some fork, some share a prompt."""
    rng = random.Random(seed)

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 64) for _ in range(rng.randint(least, most)))

    found = []
    for number in range(count):
        prompt = (3, 4, 5) if number % 3 == 0 else ids(2, 9)
        turns = [_turn(prompt, ids(1, 6))]
        if number % 2:
            turns.append(_turn(turns[0].prompt_ids + turns[0].completion_ids + ids(1, 4), ids(1, 5)))
        if number % 4 == 3:  # a rewritten history
            turns.append(_turn(ids(3, 8), ids(1, 5)))
        found.append(Episode(Task(str(number), ()), tuple(turns), ()))
    return found


def _turn(prompt: tuple[int, ...], reply: tuple[int, ...]) -> Turn:
    return Turn(prompt, reply, (0.0,) * len(reply), (0,) * len(reply), StopReason.EOS)


def plain_loss(model: Any, found: list[Episode]) -> tuple[torch.Tensor, float, int]:
    """Plain transformers, one turn at a time, with labels −100 outside the reply. Mean loss, correct tokens, tokens."""
    total, right, count = torch.zeros(()), 0.0, 0
    for turn in (turn for episode in found for turn in episode.turns):
        ids = torch.tensor([turn.prompt_ids + turn.completion_ids])
        labels = torch.tensor([(-100,) * len(turn.prompt_ids) + turn.completion_ids])
        size = len(turn.completion_ids)
        out = model(ids, labels=labels)
        total = total + out.loss * size
        right += float((out.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum())
        count += size
    return total / count, right / count, count


def gradients_of_an_update(found: list[Episode], **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The gradients that the learner passes to its optimiser."""
    learner = Learner(tiny_llama(seed=3), LearnerConfig(grad_clip=0, **settings), total_updates=1)
    seen: dict[str, torch.Tensor] = {}
    step = learner.optimizer.step

    def caught() -> Any:
        seen.update({name: p.grad.clone() for name, p in learner.model.named_parameters()})
        return step()

    learner.optimizer.step = caught  # type: ignore[method-assign]
    algorithm, samples = Likelihood(), as_samples(found)
    (batch,) = minibatches(samples, algorithm.advantages(samples), groups_per_batch=None, epochs=1)
    metrics, _ = learner.update(batch, algorithm)
    return metrics["sft/loss"], seen


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor, by norm."""
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def test_loss_and_gradient_are_those_of_transformers_with_labels() -> None:
    found = episodes()
    loss, gradients = gradients_of_an_update(found)
    model = tiny_llama(seed=3)
    expected, _, _ = plain_loss(model, found)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert apart(gradients, {name: p.grad for name, p in model.named_parameters()}) < 1e-5


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 40}, {"micro_batch_size": 3}])
def test_micro_batches_do_not_change_the_gradient(settings: dict[str, int]) -> None:
    loss, whole = gradients_of_an_update(episodes())
    split_loss, split = gradients_of_an_update(episodes(), **settings)
    assert split_loss == pytest.approx(loss, rel=1e-5)
    assert apart(split, whole) < 1e-5


def test_validation_loss_and_token_accuracy() -> None:
    found = episodes(9, seed=1)
    model = tiny_llama(seed=3)
    with torch.no_grad():
        loss, right, count = plain_loss(model, found)
    for at_once in (2, 100):
        learner = Learner(tiny_llama(seed=3), LearnerConfig(), total_updates=1)
        metrics = likelihood(learner, found, at_once)
        assert metrics["eval/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert metrics["eval/token_accuracy"] == right and metrics["eval/tokens"] == count


# -- runs ------------------------------------------------------------------------------------------------------------

SETTINGS = [
    "data.train_files=demos.jsonl",
    "data.val_files=held.jsonl",
    "data.train_batch_size=3",
    "loop.total_epochs=2",
    "loop.save_every=2",
    "eval.every=2",
    "learner.lr=1e-2",
    "loop.threads=1",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_demonstrations(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_demonstrations(folder: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"it is {i}"},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": str(i) * 3},
            ]
        }
        for i in range(13)
    ]
    (folder / "demos.jsonl").write_text("\n".join(map(json.dumps, rows[:10])))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows[10:])))


def the_run(folder: Path) -> Path:
    (found,) = (path.parent for path in folder.glob("outputs/*/*/run.json"))
    return found


def records(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in found:
        for name in [n for n in record["metrics"] if is_machine_dependent(n)]:
            del record["metrics"][name]
    return found


def test_a_run_learns_and_writes_what_training_and_evaluation_read(
    folder: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS]) == 0
    run = the_run(folder)
    found = records(run)
    assert [(r["kind"], r["step"]) for r in found if r["kind"] == "eval"] == [("eval", n) for n in (0, 2, 4, 6)]
    steps = [r["metrics"] for r in found if r["kind"] == "step"]
    assert [m["sft/epoch"] for m in steps] == [0, 0, 0, 1, 1, 1]  # ten demonstrations make three full batches
    assert all(m["sft/demonstrations"] == 3 for m in steps)
    assert steps[-1]["sft/loss"] < 0.6 * steps[0]["sft/loss"]
    assert "policy/ratio_mean" not in steps[0] and math.isfinite(steps[0]["grad/norm"])
    best = min((r["metrics"]["eval/loss"], r["step"]) for r in found if r["kind"] == "eval" and r["step"])
    state = json.loads((run / "checkpoints/step-000006/state.json").read_text())
    assert (state["best"]["value"], state["best"]["step"]) == best
    info = json.loads((run / "run.json").read_text())
    assert (info["kind"], info["status"], info["algorithm"]) == ("sft", "finished", "sft")
    assert info["command"].startswith("covey sft --config ")
    assert "Training loss: " in (run / "summary.md").read_text() and (run / "curve.png").is_file()
    assert "loss" in capsys.readouterr().out

    small = ["data.val_size=2", "rollout.max_tokens=4", "rollout.group_size=2", "data.train_batch_size=2"]
    model = run / "checkpoints/step-000006/model"
    assert main(["train", f"model={model}", "loop.total_steps=1", "logging.output_dir=rl", *small]) == 0
    assert main(["eval", str(run), "data=sort", *small]) == 0
    assert main(["sample", str(run), "--question", "say 3", "-n", "1", *small]) == 0
    capsys.readouterr()
    assert main(["eval", str(run)]) == 2
    assert "was trained on demonstrations: name the tasks to ask" in capsys.readouterr().err


class Killed(BaseException):
    """Not caught by any handler of Covey."""


def train_until(folder: Path, step: int | None, settings: Sequence[str]) -> None:
    """In a separate folder; dies when the step of that number would begin."""

    def dying(self: SftRun, index: int) -> None:
        if index == step:
            raise Killed
        step_of(self, index)

    step_of = SftRun._step
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(SftRun, "_step", dying)
        assert main(["sft", *SETTINGS, *settings]) == 0


def outcome(folder: Path) -> Any:
    """Hashes of the last weights and optimiser state, and every record without timings."""
    run = the_run(folder)
    last = run / "checkpoints" / "step-000006"
    files = [last / "optimizer.safetensors", *(last / "model").glob("*.safetensors")]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}, records(run)


@pytest.mark.parametrize("settings", [(), ("model.lora.rank=2", "learner.schedule=cosine")], ids=["whole", "lora"])
def test_a_killed_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, tiny_model_folder: Path, settings: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        write_demonstrations(folder)
    settings = (f"model={tiny_model_folder}", *settings)
    train_until(whole, None, settings)
    with pytest.raises(Killed):
        train_until(broken, 3, settings)
    assert not (the_run(broken) / "checkpoints" / "step-000006").exists()
    train_until(broken, None, settings)
    assert len(outcome(whole)[1]) == 6 + 4
    assert outcome(broken) == outcome(whole)


DRIVER = """
import os, signal, sys
from covey.cli.main import main
from covey.training.sft import SftRun
step = SftRun._step
def killed(self, index):
    if index == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, index)
SftRun._step = killed
sys.exit(main(["sft", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_also_where_its_process_is_killed(tmp_path: Path, tiny_model_folder: Path) -> None:
    for name, kills in (("whole", [-1]), ("broken", [3, -1])):
        (tmp_path / name).mkdir()
        write_demonstrations(tmp_path / name)
        for kill_at in kills:
            command = [sys.executable, "-c", DRIVER, str(kill_at), f"model={tiny_model_folder}", *SETTINGS]
            done = subprocess.run(command, cwd=tmp_path / name, capture_output=True, text=True, timeout=600)
            assert done.returncode == (0 if kill_at < 0 else -signal.SIGKILL), done.stdout + done.stderr
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")


def test_validate_only_starts_nothing(
    folder: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS, "--validate-only", "rollout.group_size=4"]) == 0
    out = capsys.readouterr().out
    assert "demos.jsonl: 10 demonstrations, 3 for validation" in out and "6 steps of 3 demonstrations" in out
    assert "warning: not used by covey sft, where nothing is sampled: rollout.group_size" in out
    assert not Path("outputs").exists()
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS, "--dry-run"]) == 0
    assert "<|im_start|>assistant\n«it is 0<|im_end|>»\n<|im_start|>user\nagain" in capsys.readouterr().out


def test_validate_only_says_what_a_run_would_lack(
    folder: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it at once, and `valid` only of a command that would start here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ["sft", "model=here/nothing", "data.train_files=a.jsonl", "data.val_files=b.jsonl", "loop.total_epochs=2"]
    assert main([*words, "--validate-only"]) == 0
    out = capsys.readouterr().out
    assert "training   2 epochs (an unknown number of steps: the demonstrations are not here) of 8 demonst" in out
    verdict = "the settings are valid, but 2 things are not on this machine, see above; nothing was started\n"
    assert out.endswith(verdict)
    for command in (words, [*words, "--validate-only", "--strict"]):
        assert main(command) == 2
        output = capsys.readouterr().err
        for text in ("data.train_files: no such file a.jsonl", "data.val_files: no such file b.jsonl", "here/nothing"):
            assert text in out and text in output
    assert main(["sft", "model=here/nothing", *SETTINGS, "--validate-only"]) == 0  # the steps are known without a model
    out = capsys.readouterr().out
    assert "6 steps of 3 demonstrations" in out and "but 1 thing is not on this machine" in out
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS, "rollout=sglang", "--validate-only"]) == 2
    assert capsys.readouterr().out.endswith("not valid: a run would be refused, see above; nothing was started\n")


def test_what_is_too_long_is_left_out_and_counted(
    folder: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "x" * 300, "answer": "y" * 300}
    with Path("demos.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row))
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS, "--validate-only"]) == 0
    out = capsys.readouterr().out
    # user and assistant with their marks: 16 + 2 characters of scaffold beside the text and the ends of turn
    assert "warning: 1 of 11 training demonstrations are longer than the context of 512 tokens and skipped" in out
    assert "the first: demos.jsonl, line 11 (" in out
    assert main(["sft", f"model={tiny_model_folder}", "data.train_files=demos.jsonl", "model.context_length=9"]) == 2
    assert "11 of 11 training demonstrations are longer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ("{oops", "demos.jsonl, line 11: not JSON"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x"}]}),
            "demos.jsonl, line 11: no message of the assistant",
        ),
        (
            json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}),
            "demos.jsonl, line 11: calls the tool f, but no tools are known",
        ),
    ],
)
def test_a_mistake_names_its_line(
    folder: Path, tiny_model_folder: Path, row: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("demos.jsonl").open("a") as file:
        file.write("\n" + row)
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS]) == 2
    error = capsys.readouterr().err
    assert error.startswith(output) and error.endswith("nothing was started\n")
    assert not Path("outputs").exists()


def test_without_demonstrations_it_says_where_to_find_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft"]) == 2
    assert "give a file: data.train_files=demos.jsonl, or use data=calculator" in capsys.readouterr().err


def test_every_figure_is_explained(folder: Path, tiny_model_folder: Path) -> None:
    assert main(["sft", f"model={tiny_model_folder}", *SETTINGS, "loop.total_epochs=1"]) == 0
    lines = (the_run(folder) / "metrics.jsonl").read_text().splitlines()
    written = {name for line in lines for name in json.loads(line)["metrics"]}
    docs = Path(__file__).parent.parent.parent / "docs"
    page = (docs / "sft.md").read_text()
    listed = {
        name
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([^`]+)`", line.split("|")[1])
    }
    assert {name for name in listed if "/" in name} == {name for name in written if not name.startswith("perf/gpu_")}


def test_demonstrations_of_the_python_tool_need_no_sandbox(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run, so a machine where only the weakest tier works will do."""
    call = {"type": "function", "function": {"name": "python_executor", "arguments": {"code": "print(48/2)"}}}
    messages = [
        {"role": "user", "content": "48/2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": "24"},
    ]
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    weak = {name: tier for name, tier in TIERS.items() if tier.weak}
    monkeypatch.setattr("covey.sandbox.tiers.TIERS", weak)
    words = [f"data.train_files={path}", "data.train_batch_size=1", "agent=hf", "agent.tools=[python_executor]"]
    assert main(["sft", f"model={tiny_model_folder}", *words, "model.context_length=4096", "--dry-run"]) == 0
    assert "print(48/2)" in capsys.readouterr().out


def test_generated_demonstrations_of_a_tool(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose template knows no tools is shown calls as text; tools are explained in the system message."""
    words = ["data=calculator", "data.train_size=20", "data.val_size=4", "model.context_length=4096"]
    assert main(["sft", f"model={tiny_model_folder}", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "calculator: 20 training and 4 validation demonstrations, generated" in out
    assert out.count("«") == 2 and "«<tool_call>" in out and "Use the calculator." in out
