"""Callbacks: what they are given, what they may add, how they stop a run and how their errors end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.errors import InputError, RunFailed
from covey.training.checkpoint import open_checkpoint
from tests.trainer.conftest import ROWS, SMALL, vowels


def trained(model: Path, *callbacks: Any, **more: Any) -> covey.Run:
    settings = SMALL | {"validation": ROWS[:2]} | more
    return covey.train(str(model), ROWS, vowels, callbacks=callbacks, **settings)


def recorded(run: covey.Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, trainer: covey.Trainer, step: covey.Step) -> dict[str, float]:
        self.seen.append(("step", step.index, trainer.steps_done))
        return {"mine/double": 2.0 * step.index}

    def on_evaluation(self, trainer: covey.Trainer, metrics: dict[str, float]) -> dict[str, float]:
        self.seen.append(("evaluation", trainer.steps_done))
        return {"mine/error": 1 - metrics["eval/accuracy"]}

    def on_checkpoint(self, trainer: covey.Trainer, path: Path) -> None:
        assert (path / "model").is_dir()
        self.seen.append(("checkpoint", path.name))


def test_events_in_order_and_metrics_of_their_own(tiny_model_folder: Path) -> None:
    watcher = Watcher()
    run = trained(tiny_model_folder, watcher, **{"loop.save_every": 2})
    steps = [("step", index, index + 1) for index in range(3)]
    expected = [("evaluation", 0), *steps[:2], ("checkpoint", "step-000002"), steps[2], ("evaluation", 3)]
    assert watcher.seen == expected
    lines = recorded(run)
    assert [line["metrics"]["mine/double"] for line in lines if line["kind"] == "step"] == [0.0, 2.0, 4.0]
    for line in (line["metrics"] for line in lines if line["kind"] == "eval"):
        assert line["mine/error"] == pytest.approx(1 - line["eval/accuracy"])
    assert run.metrics[2]["mine/double"] == 4.0


def test_a_function_may_evaluate_and_stop(tiny_model_folder: Path) -> None:
    """The evaluation is the one that would have followed: it is not made twice."""
    found: list[dict[str, float]] = []

    def early(trainer: covey.Trainer, step: covey.Step) -> None:
        if step.index == 1:
            found.append(trainer.evaluate())
            trainer.stop()

    run = trained(tiny_model_folder, early, **{"loop.save_final": True})
    assert run.evaluations == [run.evaluations[0], (2, found[0])]
    assert json.loads((run.path / "run.json").read_text())["status"] == "finished"
    assert (run.path / "checkpoints" / "step-000002").is_dir()
    assert len(run.metrics) == 2


def test_stop_between_steps(tiny_model_folder: Path) -> None:
    with covey.Trainer(str(tiny_model_folder), ROWS, vowels, validation=ROWS[:2], **SMALL) as trainer:
        for _ in trainer:
            trainer.stop()
        assert [at for at, _ in trainer.evaluations] == [0, 1]
        assert json.loads((trainer.path / "run.json").read_text())["status"] == "finished"


def test_an_error_ends_the_run_and_says_where(tiny_model_folder: Path) -> None:
    def broken(trainer: covey.Trainer, step: covey.Step) -> None:
        raise KeyError("nothing")

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RunFailed, match=rf"broken raised KeyError: 'nothing'\n  {__file__}, line {line}"):
        trained(tiny_model_folder, broken)
    (info,) = Path("outputs").glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "failed"


@pytest.mark.parametrize("returned", [["a"], {"a": "b"}, {1: 2.0}, {"a": float("inf")}, 3.0])
def test_what_a_callback_must_not_return(tiny_model_folder: Path, returned: Any) -> None:
    with pytest.raises(RunFailed, match="must return None or a dict of names and numbers"):
        trained(tiny_model_folder, lambda trainer, step: returned, validation=None)


def test_what_is_not_a_callback(tiny_model_folder: Path) -> None:
    with pytest.raises(InputError, match="object has none of on_step"):
        trained(tiny_model_folder, object())
    with pytest.raises(InputError, match=r"give an instance: Watcher\(\)"):
        trained(tiny_model_folder, Watcher)


def test_a_step_inside_a_step_is_refused(tiny_model_folder: Path) -> None:
    def nested(trainer: covey.Trainer, step: covey.Step) -> None:
        trainer.step()

    with pytest.raises(RunFailed, match="cannot be called in a callback"):
        trained(tiny_model_folder, nested, validation=None)


def test_a_checkpoint_in_on_evaluation_has_the_evaluation(tiny_model_folder: Path) -> None:
    """It counts for the best checkpoint, and a resumed run keeps its record."""

    class Saves:
        def on_evaluation(self, trainer: covey.Trainer, metrics: dict[str, float]) -> dict[str, float]:
            trainer.save()
            return {"mine/saved": 1.0}

    settings = {"eval.every": 1, "eval.before": False, "loop.total_steps": 2, "loop.save_every": 1}
    run = trained(tiny_model_folder, Saves(), **settings)
    saved = open_checkpoint(run.path / "checkpoints" / "step-000002").state
    best = max(run.evaluations, key=lambda evaluation: evaluation[1]["eval/accuracy"])
    assert saved["best"] == {"step": best[0], "value": best[1]["eval/accuracy"]}
    kept = (run.path / "metrics.jsonl").read_bytes()[: saved["metrics_offset"]].splitlines()
    evaluations = [line for line in map(json.loads, kept) if line["kind"] == "eval"]
    assert [(line["step"], line["metrics"]["mine/saved"]) for line in evaluations] == [(1, 1.0), (2, 1.0)]


def test_a_mistake_in_a_question_does_not_end_the_run(tiny_model_folder: Path) -> None:
    question = [{"role": "user", "content": [{"type": "image", "image": "missing.png"}]}]
    caught = []

    def asks(trainer: covey.Trainer, step: covey.Step) -> None:
        with pytest.raises(InputError, match="this model reads text only") as error:
            trainer.generate(question)
        caught.append(error)

    with covey.Trainer(str(tiny_model_folder), ROWS, vowels, callbacks=[asks], **SMALL) as trainer:
        trainer.step()
        with pytest.raises(InputError, match="this model reads text only"):
            trainer.generate(question)
        with pytest.raises(InputError, match=r"got one message\n.*\[message\]"):
            trainer.generate({"role": "user", "content": "say 1"})  # type: ignore[arg-type]
        assert isinstance(trainer.generate("say 1"), str)
        trainer.train()
    assert len(caught) == trainer.steps_done == 3


def test_an_error_of_the_trainer_is_shown_with_the_line_of_the_callback(tiny_model_folder: Path) -> None:
    def asks(trainer: covey.Trainer, step: covey.Step) -> None:
        trainer.generate([])

    line = asks.__code__.co_firstlineno + 1
    with pytest.raises(RunFailed, match=rf"asks raised InputError: no answer(.|\n)*{__file__}, line {line}\n"):
        trained(tiny_model_folder, asks, validation=None)


def test_a_checkpoint_in_on_step_is_refused(tiny_model_folder: Path) -> None:
    def saves(trainer: covey.Trainer, step: covey.Step) -> None:
        trainer.save()

    with pytest.raises(RunFailed, match="a checkpoint cannot be written in on_step"):
        trained(tiny_model_folder, saves, validation=None)
