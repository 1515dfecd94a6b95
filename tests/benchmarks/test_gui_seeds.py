"""The table of benchmarks/gui_seeds.py. The whole script needs Chromium."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from covey.cli.main import main


def test_the_share_of_each_model_on_live_pages(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gui_seeds = importlib.import_module("gui_seeds")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gui_seeds, "run_covey", lambda words: main([*words]))
    monkeypatch.setattr(gui_seeds, "PAGES", ["data=sort", "rollout.max_tokens=4"])
    monkeypatch.setattr(gui_seeds, "LIVE", 2)
    models = [str(tiny_model_folder), str(shutil.copytree(tiny_model_folder, tmp_path / "other"))]
    shares = gui_seeds.live(models, tmp_path, [])
    assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
    seed = {
        "seed": 0,
        "imitation_steps": 700,
        "success": {"greedy": (0.5, 1.0), "sampled": (0.25, 0.75)},
        "reward": [0.25, 0.75],
        "training_s": 60,
    }
    text = gui_seeds.text({"seeds": [seed], "live": {"seed 0": shares}})
    assert "| 0 | 700 | 50.0 % (45 to 55) |" in text and "| seed 0 | 0.0 % (0 to " in text
