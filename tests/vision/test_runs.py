"""Whole runs of a tiny vision-language model: training, resuming, SFT, evaluation, sampling, export."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import covey.training.step
from covey.app.checks import check_vision
from covey.cli.main import main
from covey.config.schema import Config
from covey.errors import InputError, RunFailed
from covey.images import image_of_bytes
from covey.models.loading import open_source
from covey.telemetry.jsonl import read_episodes
from covey.training.step import learn
from tests.vision.tiny import drawn, vlm_folder

SMALL: dict[str, Any] = {
    "data.train_batch_size": 2,
    "rollout": {"group_size": 3, "max_tokens": 5},
    "loop": {"total_steps": 2},
    "learner.lr": 1e-3,
    "logging.verbosity": "warning",
    "resume": "disable",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vlm_folder(tmp_path_factory.mktemp("vlm") / "model", "qwen2_5_vl")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(count: int = 4) -> list[dict[str, Any]]:
    return [{"question": "what is <image>?", "images": [drawn(seed=n)], "answer": "a"} for n in range(count)]


def vowels(final_answer: str) -> float:
    return sum(letter in "aeiou" for letter in final_answer) / 5


def test_training_changes_the_language_part_and_leaves_the_vision_tower(model: Path) -> None:
    run = covey.train(model=str(model), tasks=rows(), reward=vowels, algorithm="grpo", **SMALL)
    (saved,) = Path(run.path).glob("checkpoints/*/model")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, saved))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any("visual" in name for name in changed) and any("visual" in name for name in before)
    assert (saved / "preprocessor_config.json").is_file()
    # Episodes refer to images by file, each written once.
    text = (Path(run.path) / "episodes.jsonl").read_text()
    assert "base64" not in text and len(text) < 100_000
    for episode in read_episodes(Path(run.path) / "episodes.jsonl"):
        (part,) = [part for part in episode["messages"][0]["content"] if part["type"] == "image"]
        file = Path(run.path) / part["image"]
        assert image_of_bytes(file.read_bytes()).digest == file.stem
    assert len(list((Path(run.path) / "images").iterdir())) == 2  # one task of each step


def test_a_trained_vision_tower_changes(model: Path) -> None:
    run = covey.train(
        model=str(model), tasks=rows(), reward=vowels, algorithm="gvpo", **SMALL | {"model.freeze_vision": False}
    )
    (saved,) = Path(run.path).glob("checkpoints/*/model")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, saved))
    assert any("visual" in name and not torch.equal(before[name], after[name]) for name in before)


def test_a_critic_sees_the_images(model: Path) -> None:
    run = covey.train(model=str(model), tasks=rows(), reward=vowels, algorithm="ppo", **SMALL)
    steps = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
    assert [step["metrics"]["optim/skipped"] for step in steps if step["kind"] == "step"] == [0, 0]


def test_an_image_that_the_model_cannot_see_fails_only_its_episode(model: Path) -> None:
    class Strip:
        """Shows the odd tasks an image of 900 to 3 pixels."""

        def reset(self, task: Any) -> Any:
            strip = {"type": "image", "image": drawn(900, 3)}
            return [{"role": "user", "content": [strip]}] if task.answer == "odd" else task.messages

        def step(self, reply: Any) -> Any:
            return covey.Done(reward=1.0)

        def end(self, reason: str) -> Any:
            return covey.Done(reward=0.0)

    tasks = [{**row, "answer": "odd" if n == 0 else "a"} for n, row in enumerate(rows(2))]
    run = covey.train(model=str(model), tasks=tasks, agent=Strip, algorithm="grpo", **SMALL)
    (step, _) = [json.loads(x)["metrics"] for x in (Path(run.path) / "metrics.jsonl").read_text().splitlines()][:2]
    assert step["episodes/failed/image"] == 3
    with pytest.raises(RunFailed, match=r"absolute aspect ratio(.|\n)*likely fix: look at the images"):
        covey.train(model=str(model), tasks=tasks[:1], agent=Strip, algorithm="grpo", **SMALL)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(model: Path) -> None:
    saved = []
    for name, steps in (("whole", [3]), ("halves", [1, 3])):
        for total in steps:
            changes = {"loop": {"total_steps": total, "save_every": 1}, "logging.output_dir": name}
            if len(saved) == 1 and total == 3:
                (before,) = Path("halves").glob("*/*")
                changes["resume"] = str(before)
            settings = SMALL | changes
            run = covey.train(model=str(model), tasks=rows(), reward=vowels, algorithm="grpo", **settings)
        saved.append(load_file(sorted(Path(run.path).glob("checkpoints/step-*/model"))[-1] / "model.safetensors"))
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


ASYNC: dict[str, Any] = {"mode": {"name": "async", "max_staleness": 2}}


@pytest.mark.parametrize("frozen", [True, False])
def test_sampling_ahead_with_images(model: Path, frozen: bool) -> None:
    """With the vision tower trained, features change with the weights."""
    settings = SMALL | ASYNC | {"loop": {"total_steps": 4}, "model.freeze_vision": frozen, "data.train_batch_size": 1}
    run = covey.train(model=str(model), tasks=rows(), reward=vowels, algorithm="grpo", **settings)
    records = [json.loads(line) for line in (Path(run.path) / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    assert len(steps) == 4 and max(step["policy/age_max"] for step in steps) in (1, 2)
    assert all(step["optim/skipped"] == 0 for step in steps)


def test_groups_sampled_ahead_keep_their_images_in_a_checkpoint(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        time.sleep(0.5)  # sampling is ahead when the checkpoint is written
        return learn(*arguments)

    monkeypatch.setattr(covey.training.step, "learn", slow)
    settings = SMALL | ASYNC | {"data.train_batch_size": 1}
    settings |= {"loop": {"total_steps": 4, "save_every": 1, "keep_last": 10}}

    def train(**changes: Any) -> Any:
        return covey.train(model=str(model), tasks=rows(), reward=vowels, algorithm="grpo", **settings | changes)

    whole = train()
    ahead = 0
    for checkpoint in sorted(Path(whole.path).glob("checkpoints/step-*"))[:-1]:
        stored = json.loads((checkpoint / "state.json").read_text())["source"]["groups"]
        ahead += len(stored)
        for group in stored.values():
            assert len(group["images"]) == 1 and all(turn["images"] for e in group["episodes"] for turn in e["turns"])
    assert ahead, "no group was complete ahead of its step: the test shows nothing"
    again = train(resume=str(Path(whole.path) / "checkpoints" / "step-000002"))
    assert max(int(folder.name[5:]) for folder in Path(again.path).glob("checkpoints/step-*")) == 4


def test_sft_eval_sample_and_export_from_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        Path(f"{number}.png").write_bytes(drawn(seed=number))
    lines = [json.dumps({"question": "what?", "image": f"{n}.png", "answer": f"it is {n}"}) for n in range(4)]
    Path("data.jsonl").write_text("\n".join(lines) + "\n")
    files = ["data.train_files=data.jsonl", "data.val_files=data.jsonl"]
    common = ["data.train_batch_size=2", "logging.verbosity=warning", "resume=disable"]
    assert main(["sft", f"model={model}", *files, "loop.total_steps=2", "learner.lr=1e-2", *common]) == 0
    (run,) = Path("outputs").glob("*/*")
    records = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    tasks = ["data.val_files=data.jsonl", "rollout.max_tokens=4", "reward=qa_em_reward"]
    assert main(["sample", str(run), "-n", "2", *tasks]) == 0
    assert "[image] what?" in capsys.readouterr().out
    assert main(["eval", str(run), *tasks]) == 0
    assert main(["data", "check", "data.jsonl"]) == 0
    assert main(["export", str(run), "exported"]) == 0
    assert {"preprocessor_config.json", "tokenizer.json", "config.json"} <= {p.name for p in Path("exported").iterdir()}


def test_what_does_not_work_yet_is_refused_by_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"model={model}", "data=sort", "resume=disable", "--dry-run", "cluster=ray"]) == 2
    assert "cluster=ray does not work with images yet" in capsys.readouterr().err


UNSUPPORTED: dict[str, tuple[str, str, Any]] = {
    "cluster=ray": ("cluster", "name", "ray"),
    "agent=verifiers": ("agent", "name", "verifiers"),
    "learner.tensor_parallel": ("learner", "tensor_parallel", 2),
    "teacher": ("teacher", "name", "initial"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_part_that_does_not_see_is_refused_whatever_is_installed(model: Path, name: str) -> None:
    config = Config()
    config = replace(config, model=replace(config.model, name=str(model)))
    source = open_source(config.model)
    check_vision(config, source)
    section, key, value = UNSUPPORTED[name]
    config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    with pytest.raises(InputError, match=f"{name} does not work with images yet"):
        check_vision(config, source)


def test_vllm_takes_images_of_models_with_a_grid(model: Path, tmp_path: Path) -> None:
    """Its processors cut pictures into other tiles than those of transformers."""
    config = Config()
    vllm = replace(config, rollout=replace(config.rollout, name="vllm"))
    check_vision(vllm, open_source(replace(config.model, name=str(model))))
    tiles = open_source(replace(config.model, name=str(vlm_folder(tmp_path / "tiles", "smolvlm"))))
    with pytest.raises(InputError, match="rollout=vllm does not work with images yet"):
        check_vision(vllm, tiles)


def test_images_for_a_text_model_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(InputError, match=r"has images, but .* reads text only"):
        covey.train(model=str(tiny_model_folder), tasks=rows(), reward=vowels, **SMALL)
    with pytest.raises(InputError, match=r"model.max_pixels is for vision-language models"):
        covey.train(
            model=str(tiny_model_folder),
            tasks=[{"question": "a", "answer": "b"}],
            reward=vowels,
            **SMALL | {"model.max_pixels": 1000},
        )
