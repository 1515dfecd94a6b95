"""Non-finite rewards, losses and gradients are skipped and counted. Too many in a row end the run."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms.algorithm import Algorithm
from covey.cli.main import main
from covey.learner.learner import Learner
from covey.protocols import LossTerm
from covey.rollout.embedded import EmbeddedEngine
from covey.training.checkpoint import best_of
from covey.types import Completion, StopReason
from tests.faults.storage import outcome, prepare, the_run, train


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["metrics"] for line in (the_run(folder) / "metrics.jsonl").read_text().splitlines()]


def break_losses(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Make the loss of these updates NaN, counted from 1; without any, of all."""
    sound, made = Algorithm.loss, 0

    def loss(self: Algorithm, out: Any, batch: Any) -> dict[str, LossTerm]:
        nonlocal made
        made += 1
        terms = sound(self, out, batch)
        if calls and made not in calls:
            return terms
        return {name: LossTerm(term.sum * math.nan, term.unit) for name, term in terms.items()}

    monkeypatch.setattr(Algorithm, "loss", loss)


def test_skipped_updates_are_counted_and_reported_once(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_losses(monkeypatch, 2, 3)
    folder = prepare(tmp_path)
    assert train(folder, tiny_model_folder, "logging.to=[console]") == 0
    assert [m["optim/skipped"] for m in metrics_of(folder)] == [0, 1, 2, 2]
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("1 update skipped: the loss or gradient is not finite") == 1
    assert "step 2:" in output and "optim/skipped" in output and "learner.max_skipped=5" in output


@pytest.mark.parametrize("broken", [1, 2])
def test_a_step_of_two_updates_one_of_which_is_skipped(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """Only the update that was made reports the critic's learning rate, and the step reports that one."""
    break_losses(monkeypatch, broken)
    folder = prepare(tmp_path)
    words = ("algorithm=ppo", "learner.epochs=2", "critic.lr=1e-4", "loop.total_steps=2")
    assert train(folder, tiny_model_folder, *words) == 0
    first, second = metrics_of(folder)
    assert first["optim/skipped"] == second["optim/skipped"] == 1
    assert first["value/lr"] == second["value/lr"] == 1e-4
    assert first["grad/norm"] > 0 and math.isfinite(first["value/grad_norm"])
    assert second.keys() - first.keys() <= {"timing/checkpoint"} and not first.keys() - second.keys()


def test_too_many_in_a_row_save_their_tasks_and_name_the_command_to_read_them(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 2 to 4 are non-finite: the fourth is the third in a row."""
    break_losses(monkeypatch, 2, 3, 4)
    folder = prepare(tmp_path)
    assert train(folder, tiny_model_folder, "learner.max_skipped=3") == 1
    output = capsys.readouterr().err
    assert "3 updates in a row had a loss or gradient that is not finite" in output and "Traceback" not in output
    assert "after step 3" in output  # where the same command would resume
    (command,) = (line.partition("steps:")[2] for line in output.splitlines() if "covey data show" in line)
    saved = json.loads((the_run(folder) / "nonfinite-step-000003.json").read_text())
    assert sorted(step for task in saved for step in task["steps"]) == [1, 2, 3]
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)[1:]) == 0  # the command in the message works
    shown = capsys.readouterr().out
    assert "3 tasks" in shown and "[user] say" in shown
    assert json.loads((the_run(folder) / "run.json").read_text())["status"] == "failed"


def test_a_full_disk_does_not_hide_the_error(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.storage import StorageFailed

    def full(path: Path, data: str) -> None:
        raise StorageFailed(f"cannot write {path}: No space left on device")

    break_losses(monkeypatch)
    monkeypatch.setattr("covey.training.warnings.write_atomically", full)
    assert train(prepare(tmp_path), tiny_model_folder, "learner.max_skipped=1") == 1
    output = capsys.readouterr().err
    assert "1 updates in a row" in output and "could not be saved" in output and "No space left" in output


def test_non_finite_weights_are_not_saved(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third update makes one weight NaN: the checkpoint of the second step stays the last, and is resumed from."""
    whole, folder = prepare(tmp_path / "whole"), prepare(tmp_path / "spoiled")
    assert train(whole, tiny_model_folder) == 0
    update, made = Learner.update, 0

    def spoiling(self: Learner, *given: Any) -> Any:
        nonlocal made
        made += 1
        found = update(self, *given)
        if made == 3:
            with torch.no_grad():
                self.model.model.layers[1].mlp.up_proj.weight[3, 2] = math.inf
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", spoiling)
        assert train(folder, tiny_model_folder) == 1
    output = capsys.readouterr().err
    assert "no checkpoint was written: model.layers.1.mlp.up_proj.weight is not finite" in output
    assert "after step 2" in output and "Traceback" not in output
    assert [path.name for path in (the_run(folder) / "checkpoints").iterdir()] == ["step-000002"]
    assert train(folder, tiny_model_folder) == 0
    assert outcome(the_run(folder)) == outcome(the_run(whole))


@pytest.mark.parametrize("value", ["float('nan')", "-1e999", "'text'", "10**400"])
def test_a_reward_that_is_always_non_finite_ends_the_run_with_a_message(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """In a worker process, like any user reward."""
    folder = prepare(tmp_path)
    (folder / "odd.py").write_text(f"def odd(final_answer):\n    return {value}\n")
    assert train(folder, tiny_model_folder, "reward=odd.py:odd") == 1
    output = capsys.readouterr().err
    assert "No training tasks completed" in output and "2 × reward: reward odd on task" in output
    assert ("must be a number" if "text" in value else "must be finite") in output
    assert "there is no checkpoint to continue from" in output and "Traceback" not in output


def test_a_reward_that_is_sometimes_non_finite_fails_those_episodes(tmp_path: Path, tiny_model_folder: Path) -> None:
    """A file counts the calls of all workers: every third returns NaN."""
    folder = prepare(tmp_path)
    (folder / "odd.py").write_text(
        "def odd(final_answer):\n"
        "    with open('calls', 'ab', buffering=0) as counter:\n"
        "        counter.write(b'.')\n"
        "        return float('nan') if counter.tell() % 3 == 0 else len(set(final_answer)) / 10\n"
    )
    assert train(folder, tiny_model_folder, "reward=odd.py:odd", "rollout.group_size=6") == 0
    found = metrics_of(folder)
    assert [m["episodes/failed/reward"] for m in found] == [2.0] * 4
    assert [m["episodes/total"] for m in found] == [4.0] * 4
    assert all(math.isfinite(m["reward/mean"]) and math.isfinite(m["loss/total"]) for m in found)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_with_nan_weights_ends_with_a_message(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], broken: float
) -> None:
    """Greedy evaluation and sampling both notice it; no reply is scored."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], broken)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert train(prepare(tmp_path / "work"), model, "data.val_files=tasks.jsonl", "eval.before=true") == 1
    output = capsys.readouterr().err
    assert "log-probs are not finite" in output and "Traceback" not in output


@pytest.mark.parametrize("every", [1, 3])
def test_empty_replies(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """All replies, or some, are empty: the run continues and trains on the others."""
    generate, asked = EmbeddedEngine.generate, 0

    async def silent(self: EmbeddedEngine, *given: Any, **how: Any) -> Completion:
        nonlocal asked
        asked += 1
        number = asked
        found = await generate(self, *given, **how)
        return Completion((), (), (), StopReason.EOS) if number % every == 0 else found

    monkeypatch.setattr(EmbeddedEngine, "generate", silent)
    folder = prepare(tmp_path)
    assert train(folder, tiny_model_folder, "rollout.group_size=4") == 0
    found = metrics_of(folder)
    assert [m["optim/skipped"] for m in found] == [0] * 4
    assert all(math.isfinite(m["loss/total"]) for m in found)
    expected = [0.0] * 4 if every == 1 else [2.25, 2.25, 1.5, 2.25]  # three tokens each in 3, 3, 2, 3 replies
    assert [m["response/length_mean"] for m in found] == expected


def test_demonstrations_with_a_non_finite_loss(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for covey sft, and NaN is never the best evaluation."""
    from covey.algorithms.likelihood import Likelihood

    sound = Likelihood.loss

    def broken(self: Any, out: Any, batch: Any) -> dict[str, LossTerm]:
        return {name: LossTerm(term.sum * math.nan, term.unit) for name, term in sound(self, out, batch).items()}

    monkeypatch.setattr(Likelihood, "loss", broken)
    folder = prepare(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = [
            f"model={tiny_model_folder}",
            "data.train_files=tasks.jsonl",
            "data.train_batch_size=2",
            "logging.to=[]",
        ]
        code = main(
            ["sft", *words, "loop.total_steps=4", "loop.save_every=1", "learner.max_skipped=2", "loop.threads=1"]
        )
    assert code == 1
    output = capsys.readouterr().err
    assert "2 updates in a row" in output and "covey data show" in output and "after step 1" in output
    assert len(json.loads((the_run(folder) / "nonfinite-step-000001.json").read_text())) == 4


@pytest.mark.parametrize("lower", [False, True])
def test_a_non_finite_evaluation_is_never_the_best(lower: bool) -> None:
    best = best_of(None, 1, math.nan, lower_is_better=lower)
    assert best is None
    best = best_of(best, 2, 0.5, lower_is_better=lower)
    assert (
        best_of(best, 3, math.nan, lower_is_better=lower) == best_of(best, 3, -math.inf, lower_is_better=lower) == best
    )
    assert best_of(best, 4, 0.1, lower_is_better=lower) == ({"step": 4, "value": 0.1} if lower else best)
    assert best_of(best, 4, 0.9, lower_is_better=lower) == (best if lower else {"step": 4, "value": 0.9})
