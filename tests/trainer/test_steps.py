"""covey.Trainer step by step: break, inspect, change, go on."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey.errors import InputError
from covey.learner.learner import Learner
from covey.learner.optimizer import learning_rate
from tests.trainer.conftest import ROWS, SMALL, vowels

Weights = dict[str, torch.Tensor]


def trainer_of(model: Path, **more: Any) -> covey.Trainer:
    return covey.Trainer(str(model), ROWS, vowels, "gvpo", **(SMALL | {"validation": ROWS[:2]} | more))


def weights_of(model: Any) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What the one-call form ends with."""
    place = {"logging.output_dir": str(tmp_path_factory.mktemp("whole"))}
    run = covey.train(str(tiny_model_folder), ROWS, vowels, "gvpo", validation=ROWS[:2], **SMALL, **place)
    return weights_of(run.learner.model)  # type: ignore[attr-defined]


def assert_same(found: Weights, expected: Weights) -> None:
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def status(trainer: covey.Trainer) -> str:
    return str(json.loads((trainer.path / "run.json").read_text())["status"])


def test_steps_with_breaks_and_questions_in_between_are_those_of_a_whole_run(
    tiny_model_folder: Path, uninterrupted: Weights
) -> None:
    trainer = trainer_of(tiny_model_folder)
    assert trainer.metrics == [] and "not started" in repr(trainer)
    step = next(iter(trainer))
    assert step.index == 0 and trainer.steps_done == 1
    assert len(step.groups) == 2 and len(step.episodes) == 8
    assert all(isinstance(episode.final_answer, str) for episode in step.episodes)
    rewards = [vowels(episode.final_answer) for episode in step.episodes]
    assert step.metrics["reward/mean"] == pytest.approx(sum(rewards) / 8)
    found = trainer.evaluate()
    assert trainer.evaluations[-1] == (1, found)
    assert isinstance(trainer.generate("say it", max_tokens=3), str)
    assert status(trainer) == "running"
    middle = trainer.step()
    assert middle is not None and middle.index == 1
    assert [step.index for step in trainer] == [2]
    assert trainer.step() is None and list(trainer) == []
    assert status(trainer) == "finished"
    assert [row["step"] for row in trainer.metrics] == [0, 1, 2]
    assert trainer.metrics[0]["reward/mean"] == pytest.approx(step.metrics["reward/mean"])
    assert_same(weights_of(trainer.model), uninterrupted)
    assert trainer.evaluate() == trainer.evaluations[-1][1]  # the engine is still there
    trainer.close()
    with pytest.raises(InputError, match="the run has ended"):
        trainer.evaluate()
    trainer.save_pretrained("out")
    again = covey.Trainer("out", ROWS, vowels, "grpo", **SMALL)
    assert_same(weights_of(again.model), uninterrupted)
    again.close()


def test_short_texts(tiny_model_folder: Path) -> None:
    with trainer_of(tiny_model_folder) as trainer:
        step = trainer.step()
        assert repr(step).startswith("Step(index=0, reward/mean=") and len(repr(step)) < 80
        shown = repr(trainer.run)
        assert shown.startswith(f"Run({trainer.path}, 1 of 3 steps, reward/mean ") and len(shown) < 200
        assert repr(trainer) == shown.replace("Run(", "Trainer(", 1)
        assert "<table>" in trainer.run._repr_html_()
        figure = trainer.plot()
        assert figure._repr_png_().startswith(b"\x89PNG")
        labels = [line.get_label() for line in figure.axes[0].lines]
        assert "training reward" in labels
    assert status(trainer) == "interrupted"


def test_inside_a_running_event_loop(tiny_model_folder: Path, uninterrupted: Weights) -> None:
    async def cell() -> list[int]:
        with trainer_of(tiny_model_folder) as trainer:
            found = [step.index for step in trainer]
            assert_same(weights_of(trainer.model), uninterrupted)
            return found

    assert asyncio.run(cell()) == [0, 1, 2]


def test_episodes_of_async_mode_go_on_between_steps(tiny_model_folder: Path) -> None:
    with trainer_of(tiny_model_folder, mode="async") as trainer:
        first = trainer.step()
        assert first is not None
        found = trainer.evaluate()
        assert [step.index for step in trainer] == [1, 2]
        assert "eval/accuracy" in found
    assert status(trainer) == "finished"


def test_the_learning_rate_may_change_between_steps(tiny_model_folder: Path) -> None:
    with trainer_of(tiny_model_folder, **{"learner.schedule": "linear"}) as trainer:
        trainer.step()
        trainer.lr = 5e-4
        step = trainer.step()
        assert step is not None
        config = trainer.run.learner.optimizer.config  # type: ignore[attr-defined]
        assert step.metrics["optim/lr"] == learning_rate(1, 3, config) == pytest.approx(5e-4 * 2 / 3)
        with pytest.raises(InputError, match=r"learner\.lr must be"):
            trainer.lr = -1.0
        assert trainer.lr == 5e-4


def test_a_checkpoint_between_steps_is_resumed_from(tiny_model_folder: Path, uninterrupted: Weights) -> None:
    with trainer_of(tiny_model_folder, resume="auto") as trainer:
        trainer.step()
        saved = trainer.save()
        trainer.step()
    assert saved.name == "step-000001" and (saved / "model").is_dir() and status(trainer) == "interrupted"
    with trainer_of(tiny_model_folder, resume="auto") as again:
        assert again.path == trainer.path
        assert [step.index for step in again] == [1, 2]
        assert [row["step"] for row in again.metrics] == [0, 1, 2]
        assert_same(weights_of(again.model), uninterrupted)
        with pytest.raises(InputError, match="the run has ended"):
            again.save()


def test_nothing_to_evaluate_on(tiny_model_folder: Path) -> None:
    with (
        trainer_of(tiny_model_folder, validation=None) as trainer,
        pytest.raises(InputError, match="nothing to evaluate"),
    ):
        trainer.evaluate()


class Interrupter:
    """Presses Ctrl-C once, in the thread that waits."""

    def __init__(self) -> None:
        self.armed = False

    def maybe(self) -> None:
        if self.armed:
            self.armed = False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]


def interruptible(trainer: covey.Trainer, interrupter: Interrupter, where: str) -> None:
    """Press it while answers are sampled, or in the middle of an update."""
    if where == "update":
        learner = trainer.run.learner
        update: Callable[..., Any] = Learner.update

        def pressed(*given: Any) -> Any:
            interrupter.maybe()
            return update(learner, *given)

        learner.update = pressed  # type: ignore[method-assign]
        return
    collector = trainer.run.source.collector
    run = collector.agent.run

    async def asked(policy: Any, task: Any) -> Any:
        interrupter.maybe()
        return await run(policy, task)

    collector.agent.run = asked  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["sampling", "update", "evaluation"])
def test_ctrl_c_raises_and_the_next_call_takes_up_the_step(
    tiny_model_folder: Path, uninterrupted: Weights, where: str
) -> None:
    with trainer_of(tiny_model_folder, **{"eval.every": 1}) as trainer:
        interrupter = Interrupter()
        trainer.step()
        interruptible(trainer, interrupter, where)
        if where == "evaluation":
            answers = trainer.run.evaluator
            assert answers is not None
            ask = type(answers).answers

            async def armed(self: Any, mode: str) -> Any:
                interrupter.armed = trainer.steps_done == 2 and not done
                return await ask(self, mode)

            done: list[bool] = []
            object.__setattr__(answers, "answers", armed.__get__(answers))
        else:
            interrupter.armed = True
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
        if where == "evaluation":
            done.append(True)
        # An update that had begun is made, one that had not is not; neither is made twice.
        assert trainer.steps_done == (1 if where == "sampling" else 2)
        assert [step.index for step in trainer] == [1, 2]
        assert [row["step"] for row in trainer.metrics] == [0, 1, 2]
        assert [at for at, _ in trainer.evaluations] == [0, 1, 2, 3]
        assert_same(weights_of(trainer.model), uninterrupted)
    assert status(trainer) == "finished"


def test_ctrl_c_in_the_one_call_form_ends_the_run(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pressed(trainer: covey.Trainer, step: covey.Step) -> None:
        if step.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        covey.train(str(tiny_model_folder), ROWS, vowels, callbacks=[pressed], **(SMALL | {"loop.save_every": 1}))
    assert "continues from the last checkpoint, after step 1" in capsys.readouterr().err
    (info,) = Path("outputs").glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "interrupted"


def test_sigterm_ends_the_run_after_the_step_with_a_checkpoint(tiny_model_folder: Path) -> None:
    def told(trainer: covey.Trainer, step: covey.Step) -> None:
        if step.index == 1:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run = covey.train(str(tiny_model_folder), ROWS, vowels, callbacks=[told], **SMALL)
    assert run.terminated and len(run.metrics) == 2
    assert (run.path / "checkpoints" / "step-000002").is_dir()
    assert json.loads((run.path / "run.json").read_text())["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before
