"""Whole runs of a tiny vision-language model with random weights: its actions are random, the rest is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import covey
from covey.cli.main import main
from covey.errors import InputError
from covey.images import image_of_bytes, picture
from covey.telemetry.jsonl import read_episodes
from tests.agents.gui.browsing import chromium_processes, needs_browser
from tests.vision.tiny import drawn, vlm_folder

SMALL: dict[str, Any] = {
    "agent.max_turns": 2,
    "rollout": {"group_size": 2, "max_tokens": 4},
    "loop": {"total_steps": 1},
    "data": {"train_batch_size": 2, "train_size": 4, "val_size": 2},
    "eval": {"before": False, "after": False},
    "logging.verbosity": "warning",
    "resume": "disable",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vlm_folder(tmp_path_factory.mktemp("vlm") / "model", "qwen2_5_vl")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@needs_browser
@pytest.mark.slow
def test_a_run_on_generated_pages_records_screenshots_that_the_dashboard_finds(model: Path) -> None:
    pages = [
        {
            "instruction": "Press.",
            "html": f"<title>{n}</title><button>Press</button>",
            "success": "document.title === '1'",
            "viewport": [64, 64],
        }
        for n in (1, 2)
    ]
    stop = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]  # replies of one letter, mostly
    settings = {**SMALL, "data": {"train_batch_size": 2}, "agent.format": "thought_action"}
    settings["rollout"] = {"group_size": 2, "max_tokens": 30, "stop": stop}
    run = covey.train(model=str(model), tasks=pages, agent="gui", algorithm="grpo", **settings)
    episodes = list(read_episodes(Path(run.path) / "episodes.jsonl"))
    assert episodes and {e["rewards"]["given"] for e in episodes} <= {0.0, 1.0}
    for episode in episodes:
        assert episode["stop"] in ("turns", "length") and {use["error"] for use in episode["tools"]} <= {"malformed"}
        (part,) = [part for part in episode["messages"][0]["content"] if part["type"] == "image"]
        shot = picture(image_of_bytes((Path(run.path) / part["image"]).read_bytes()))
        assert shot.size == (64, 64)
    assert any(episode["tools"] for episode in episodes) and chromium_processes() == []


@needs_browser
@pytest.mark.slow
def test_covey_sample_writes_film_strips(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.jsonl").write_text(
        '{"instruction": "Press.", "html": "<p>x", "success": "true", "viewport": [64, 64], "data_id": "a/b"}\n'
    )
    words = ["agent=gui", "agent.format=thought_action", "data.train_files=tasks.jsonl", "rollout.max_tokens=4"]
    assert main(["sample", str(model), "-n", "1", "--tasks", "1", "agent.max_turns=2", *words]) == 0
    assert "outputs/films/a-b-1.png" in capsys.readouterr().out
    assert Image.open("outputs/films/a-b-1.png").size[0] > 300


def test_a_data_set_of_screenshots_needs_no_browser(model: Path) -> None:
    rows = [{"question": "Open <image>.", "images": [drawn(seed=n)], "gt_action": "click"} for n in range(2)]
    settings = {**SMALL, "data": {"train_batch_size": 2}, "agent": {"tools": ["pyautogui_code_generator"]}}
    settings.pop("agent.max_turns")
    run = covey.train(
        model=str(model),
        tasks=rows,
        reward="gui_reward",
        algorithm="grpo",
        **{**settings, "agent": {"name": "gui", **settings["agent"]}},
    )
    episodes = list(read_episodes(Path(run.path) / "episodes.jsonl"))
    assert episodes and all(episode["rewards"]["gui_reward"] == 0.0 for episode in episodes)
    assert chromium_processes() == []


def test_generated_pages_need_the_agent(tiny_model_folder: Path) -> None:
    with pytest.raises(InputError, match="fix: agent=gui"):
        covey.train(model=str(tiny_model_folder), **{**SMALL, "data": {**SMALL["data"], "name": "gui_pages"}})


def test_a_model_that_reads_text_only_is_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(InputError, match="reads text only"):
        covey.train(model=str(tiny_model_folder), tasks="gui_pages", agent="gui", **SMALL)
