"""Algorithms outside of the package: on the command line, as a class, as an object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

import covey
from covey.algorithms import make, schema
from covey.cli.main import main
from covey.errors import InputError
from covey.protocols import Advantages, Needs
from covey.types import Samples
from tests.algorithms.helpers import samples_of
from tests.trainer.conftest import ROWS, SMALL, vowels

ALGORITHM = '''
"""Each answer against the best of its group."""
from dataclasses import dataclass
from typing import ClassVar

from covey.protocols import Advantages, Needs


@dataclass(frozen=True)
class Best:
    """Each answer against the best of its group."""

    needs: ClassVar[Needs] = Needs(min_group_size=2)
    usual_loss: ClassVar[str] = "policy_gradient"

    alpha: float = 0.5  # how much of the best is taken off

    def advantages(self, samples):
        rewards = samples.total_reward()
        best = rewards.new_zeros(samples.groups).scatter_reduce(0, samples.group_N, rewards, "amax", include_self=False)
        return Advantages(rewards - self.alpha * best[samples.group_N], metrics={"best/alpha": self.alpha})


@dataclass(frozen=True)
class Pull:
    """The log-prob itself, pushed by the advantage of GRPO."""

    term: ClassVar[str] = "pull"
    couples: ClassVar[str] = "nothing"
    on_policy_only: ClassVar[bool] = True

    strength: float = 1.0  # multiplies the loss

    def loss(self, out, batch):
        return -self.strength * batch.advantages_RT * out.logprobs

    def metrics(self, out, batch):
        return {"pull/strength": self.strength}
'''
COMMAND = [
    *("data=sort", "data.val_size=2", "data.train_batch_size=2", "rollout.group_size=4", "rollout.max_tokens=5"),
    *("loop.total_steps=3", "learner.lr=1e-3", "logging.verbosity=warning", "eval.before=false", "eval.after=false"),
]


@pytest.fixture(autouse=True)
def file() -> Path:
    path = Path("my_algo.py")
    path.write_text(ALGORITHM)
    return path


def metrics_of(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if line["kind"] == "step"]


def test_advantages_are_its_own() -> None:
    given = samples_of({"r": [1.0, 0.0, 0.5, 0.25]}, [0, 0, 1, 1])
    found = make("my_algo.py:Best", alpha=1.0).advantages(given)
    torch.testing.assert_close(found.values, torch.tensor([0.0, -1.0, 0.0, -0.25], dtype=found.values.dtype))


def test_the_command_line_trains_and_resumes_it(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", f"model={tiny_model_folder}", "algorithm=my_algo.py:Best", "algorithm.alpha=0.3", *COMMAND]
    assert main([*command, "loop.save_every=2", "loop.max_minutes=0"]) == 0
    (run,) = Path("outputs").glob("*/*")
    written = yaml.safe_load((run / "config.yaml").read_text())["algorithm"]
    assert (written["name"], written["alpha"], written["loss"]) == ("my_algo.py:Best", 0.3, "policy_gradient")
    assert json.loads((run / "run.json").read_text())["algorithm"] == "my_algo.py:Best"
    assert main([*command, "loop.save_every=2"]) == 0
    (again,) = Path("outputs").glob("*/*")  # it went on in its folder
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert [m["best/alpha"] for m in metrics_of(again)] == [0.3] * 3
    assert main(["train", "--config", str(run / "config.yaml"), "--validate-only"]) == 0
    capsys.readouterr()
    assert main(["train", f"model={tiny_model_folder}", "algorithm=my_algo.py:Best", "algorithm.alhpa=1"]) == 2
    assert "did you mean   algorithm.alpha" in capsys.readouterr().err
    assert main(["train", f"model={tiny_model_folder}", "algorithm=my_algo.py:Bst"]) == 2
    assert "did you mean   my_algo.py:Best?" in capsys.readouterr().err


def test_its_settings_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "algorithm=my_algo.py:Best"]) == 0
    told = capsys.readouterr().out
    assert "how much of the best is taken off" in told and "algorithm.kl_coef" in told
    assert main(["algorithms", "my_algo.py:Best"]) == 0
    assert "Each answer against the best of its group." in capsys.readouterr().out


def test_a_loss_of_its_own_with_the_advantages_of_grpo(tiny_model_folder: Path) -> None:
    run = covey.train(str(tiny_model_folder), ROWS, vowels, "my_algo.py:Pull", **SMALL, **{"algorithm.strength": 2.0})
    assert [row["pull/strength"] for row in run.metrics] == [2.0] * 3
    assert all("pull/loss" in row for row in run.metrics)
    assert set(schema("my_algo.py:Pull").losses) >= {"pull", "ppo_clip", "gspo"}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Half:
    """Half of what REINFORCE does."""

    needs: ClassVar[Needs] = Needs()

    share: float = 0.5  # of the reward

    def advantages(self, samples: Samples) -> Advantages:
        return Advantages(self.share * samples.total_reward(), metrics={"half/share": self.share})


def test_a_class_and_an_object(tiny_model_folder: Path) -> None:
    for given, share in ((Half, 0.5), (Half(share=0.25), 0.25)):
        with covey.Trainer(str(tiny_model_folder), ROWS, vowels, given, **SMALL) as trainer:
            step = trainer.step()
            assert step is not None and step.metrics["half/share"] == share
            assert step.metrics["advantage/mean"] == pytest.approx(share * step.metrics["reward/mean"])
            assert trainer.config.algorithm.name == f"{__file__}:Half"
            assert trainer.algorithm.estimator == Half(share=share)


def test_an_edited_algorithm_is_another_run(tiny_model_folder: Path, file: Path) -> None:
    def fingerprint() -> tuple[str, Any]:
        trainer = covey.Trainer(str(tiny_model_folder), ROWS, vowels, "my_algo.py:Best", **SMALL)
        return trainer._prepared.fingerprint, trainer.config.algorithm.alpha

    first, alpha = fingerprint()
    assert (first, alpha) == fingerprint() and alpha == 0.5
    file.write_text(ALGORITHM.replace("alpha: float = 0.5", "alpha: float = 0.7"))
    second, alpha = fingerprint()
    assert second != first and alpha == 0.7


@pytest.mark.parametrize(
    "text, message",
    [
        ("class A:\n    def advantages(self, samples): ...", "must be a dataclass"),
        ("@dataclass\nclass A:\n    x: float = 1.0", r"neither advantages\(samples\) nor loss"),
        (
            "@dataclass\nclass A:\n    x: float\n    def advantages(self, samples): ...",
            "the field x .* a default",
        ),
        ("@dataclass\nclass A:\n    def loss(self, out, batch): ...", "lacks term, couples, on_policy_only, metrics"),
        ("A = 3", "is not a class"),
        ("@dataclass\nclass A:\n    usual_loss = 'pp'\n    def advantages(self, samples): ...", "unknown usual_loss"),
    ],
)
def test_what_is_not_an_algorithm(tiny_model_folder: Path, text: str, message: str) -> None:
    Path("wrong.py").write_text(f"from dataclasses import dataclass\n\n{text}\n")
    with pytest.raises(InputError, match=message):
        covey.Trainer(str(tiny_model_folder), ROWS, vowels, "wrong.py:A", **SMALL)
