"""Runs in which numbers break: left out, counted, told in words; too many in a row end the run with its tasks saved."""

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
    """The loss of these updates, counted from 1, is NaN; without any, of all."""
    sound, made = Algorithm.loss, 0

    def loss(self: Algorithm, out: Any, batch: Any) -> dict[str, LossTerm]:
        nonlocal made
        made += 1
        terms = sound(self, out, batch)
        if calls and made not in calls:
            return terms
        return {name: LossTerm(term.sum * math.nan, term.unit) for name, term in terms.items()}

    monkeypatch.setattr(Algorithm, "loss", loss)


def test_updates_that_are_left_out_are_counted_and_told_once(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_losses(monkeypatch, 2, 3)
    folder = prepare(tmp_path)
    assert train(folder, tiny_model_folder, "logging.to=[console]") == 0
    assert [m["optim/skipped"] for m in metrics_of(folder)] == [0, 1, 2, 2]
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("1 update left out, whose loss or gradient is not finite") == 1
    assert "step 2:" in told and "optim/skipped" in told and "learner.max_skipped=5" in told


@pytest.mark.parametrize("broken", [1, 2])
def test_a_step_of_two_updates_one_of_which_is_skipped(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """The critic reports its learning rate only for the update that was made; the step reports that one."""
    break_losses(monkeypatch, broken)
    folder = prepare(tmp_path)
    words = ("algorithm=ppo", "learner.epochs=2", "critic.lr=1e-4", "loop.total_steps=2")
    assert train(folder, tiny_model_folder, *words) == 0
    first, second = metrics_of(folder)
    assert first["optim/skipped"] == second["optim/skipped"] == 1
    assert first["value/lr"] == second["value/lr"] == 1e-4
    assert first["grad/norm"] > 0 and math.isfinite(first["value/grad_norm"])
    assert second.keys() - first.keys() <= {"timing/checkpoint"} and not first.keys() - second.keys()


def test_too_many_in_a_row_save_their_tasks_and_say_how_to_read_them(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second step is the first to break, the fourth the third in a row."""
    break_losses(monkeypatch, 2, 3, 4)
    folder = prepare(tmp_path)
    assert train(folder, tiny_model_folder, "learner.max_skipped=3") == 1
    told = capsys.readouterr().err
    assert "3 updates in a row had a loss or gradient that is not finite" in told and "Traceback" not in told
    assert "after step 3" in told  # where the same command would go on
    (command,) = (line.partition("steps:")[2] for line in told.splitlines() if "covey data show" in line)
    saved = json.loads((the_run(folder) / "nonfinite-step-000003.json").read_text())
    assert sorted(step for task in saved for step in task["steps"]) == [1, 2, 3]
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)[1:]) == 0  # what was told to read them with does
    shown = capsys.readouterr().out
    assert "3 tasks" in shown and "[user] say" in shown
    assert json.loads((the_run(folder) / "run.json").read_text())["status"] == "failed"


def test_a_disk_that_cannot_take_the_tasks_does_not_hide_the_error(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.storage import StorageFailed

    def full(path: Path, data: str) -> None:
        raise StorageFailed(f"cannot write {path}: No space left on device")

    break_losses(monkeypatch)
    monkeypatch.setattr("covey.training.warnings.write_whole", full)
    assert train(prepare(tmp_path), tiny_model_folder, "learner.max_skipped=1") == 1
    told = capsys.readouterr().err
    assert "1 updates in a row" in told and "could not be saved" in told and "No space left" in told


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third update spoils one weight: the checkpoint of the second step stays the last, and is gone on from."""
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
    told = capsys.readouterr().err
    assert "no checkpoint was written: model.layers.1.mlp.up_proj.weight is not finite" in told
    assert "after step 2" in told and "Traceback" not in told
    assert [path.name for path in (the_run(folder) / "checkpoints").iterdir()] == ["step-000002"]
    assert train(folder, tiny_model_folder) == 0
    assert outcome(the_run(folder)) == outcome(the_run(whole))


@pytest.mark.parametrize("value", ["float('nan')", "-1e999", "'text'", "10**400"])
def test_a_reward_that_is_never_a_number_ends_the_run_in_words(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    """In a worker of its own, as a user's rewards are."""
    folder = prepare(tmp_path)
    (folder / "odd.py").write_text(f"def odd(final_answer):\n    return {value}\n")
    assert train(folder, tiny_model_folder, "reward=odd.py:odd") == 1
    told = capsys.readouterr().err
    assert "No training tasks completed" in told and "2 × reward: reward odd on task" in told
    assert ("must be a number" if "text" in value else "must be finite") in told
    assert "there is no checkpoint to continue from" in told and "Traceback" not in told


def test_a_reward_that_is_sometimes_a_number_costs_those_episodes(tmp_path: Path, tiny_model_folder: Path) -> None:
    """A file counts the calls of all workers: every third is no number."""
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
def test_a_model_of_nans_ends_in_words(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], broken: float
) -> None:
    """Greedy evaluation and sampling both notice; no reply of such a model is scored."""
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], broken)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert train(prepare(tmp_path / "work"), model, "data.val_files=tasks.jsonl", "eval.before=true") == 1
    told = capsys.readouterr().err
    assert "log-probs are not finite" in told and "Traceback" not in told


@pytest.mark.parametrize("every", [1, 3])
def test_replies_of_no_token(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """All of them, or some: the run goes on, and what there is to learn from is learned from."""
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
    expected = [0.0] * 4 if every == 1 else [2.25, 2.25, 1.5, 2.25]  # three tokens each, of which 3, 3, 2, 3 have some
    assert [m["response/length_mean"] for m in found] == expected


def test_demonstrations_whose_loss_is_no_number(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """covey sft: the same promise, and NaN is never the best evaluation."""
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
    told = capsys.readouterr().err
    assert "2 updates in a row" in told and "covey data show" in told and "after step 1" in told
    assert len(json.loads((the_run(folder) / "nonfinite-step-000001.json").read_text())) == 4


@pytest.mark.parametrize("falls", [False, True])
def test_an_evaluation_that_is_no_number_is_never_the_best(falls: bool) -> None:
    best = best_of(None, 1, math.nan, falls=falls)
    assert best is None
    best = best_of(best, 2, 0.5, falls=falls)
    assert best_of(best, 3, math.nan, falls=falls) == best_of(best, 3, -math.inf, falls=falls) == best
    assert best_of(best, 4, 0.1, falls=falls) == ({"step": 4, "value": 0.1} if falls else best)
    assert best_of(best, 4, 0.9, falls=falls) == (best if falls else {"step": 4, "value": 0.9})
