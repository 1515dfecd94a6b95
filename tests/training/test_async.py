"""Training in mode=async."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.app.build import _learner_thread
from covey.cli.main import main
from covey.learner.learner import Learner

SMALL = ["data.val_size=4", "data.train_batch_size=2", "rollout.group_size=4", "rollout.max_tokens=6"]
SMALL += ["loop.total_steps=6", "eval.before=false", "eval.after=false", "algorithm=grpo"]
# An agent whose episodes take different times, as tools make them.
AGENT = """
import asyncio, zlib
async def agent(policy, task):
    text = ""
    for turn in range(2):
        text = (await policy.ask([*task.messages, {"role": "user", "content": f"{turn}"}])).text
        await asyncio.sleep((zlib.crc32(f"{task.id} {turn}".encode()) % 40) / 100)
    return text
def letters(final_answer):
    return len(set(final_answer)) / 10
"""


def run(*settings: str) -> Path:
    """The new run's folder."""
    before = set(Path("outputs").glob("*/*"))
    assert main(["train", *SMALL, *settings]) == 0
    (found,) = set(Path("outputs").glob("*/*")) - before
    return found


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"] for line in lines if line["kind"] == "step"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(AGENT)
    return tmp_path


def test_without_staleness_it_equals_synchronous_training(here: Path, tiny_model_folder: Path) -> None:
    common = [f"model={tiny_model_folder}", "reward=slow.py:letters", "loop.threads=2"]
    by_turns = steps(run(*common))
    ahead = steps(run(*common, "mode=async", "mode.max_staleness=0"))
    for one, other in zip(by_turns, ahead, strict=True):
        assert other["policy/age_max"] == 0
        for name in ("reward/mean", "policy/entropy", "grad/norm", "loss/total"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("update", ["in_flight", "drain"])
def test_a_policy_is_never_older_than_allowed(here: Path, tiny_model_folder: Path, update: str) -> None:
    words = [f"model={tiny_model_folder}", "agent=slow.py:agent", "reward=slow.py:letters", "mode=async"]
    found = steps(run(*words, "mode.max_staleness=2", f"mode.update={update}"))
    assert len(found) == 6
    assert max(step["policy/age_max"] for step in found) in (1, 2)
    assert all(step["correction/weight_mean"] == pytest.approx(1.0, abs=0.2) for step in found)


def test_the_learner_always_runs_in_its_own_thread(
    here: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread that computes keeps buffers and workers, so more threads would need more memory."""
    seen, update = [], Learner.update

    def watched(self: Learner, *given: Any) -> Any:
        seen.append(threading.current_thread())
        return update(self, *given)

    monkeypatch.setattr(Learner, "update", watched)
    run(f"model={tiny_model_folder}", "reward=slow.py:letters", "mode=async")
    assert len(seen) == 6 and len(set(seen)) == 1
    assert seen[0].name.startswith("covey-learner") and not seen[0].is_alive()


def test_a_remote_learner_is_closed_before_the_thread_that_waits_for_it() -> None:
    ended = threading.Event()
    resources = ExitStack()
    learner: Any = SimpleNamespace(close=ended.set)
    thread = _learner_thread(learner, resources)
    waiting = thread.submit(ended.wait, 60)
    resources.close()
    assert waiting.result(0) is True


@pytest.mark.slow
def test_a_killed_run_resumes_with_finished_episodes(here: Path, tiny_model_folder: Path) -> None:
    """Finished episodes are not sampled again, unfinished ones are, and each task is trained on once."""
    command = [sys.executable, "-m", "covey.cli.main", "train", f"model={tiny_model_folder}", *SMALL]
    command += ["agent=slow.py:agent", "reward=slow.py:letters", "mode=async", "mode.max_staleness=2"]
    command += ["loop.total_steps=8", "loop.save_every=1", "logging.episodes_per_step=100"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(here.glob("outputs/*/*/checkpoints/step-000003")):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (checkpoint,) = here.glob("outputs/*/*/checkpoints/step-000003")
    kept = json.loads((max(checkpoint.parent.glob("step-*")) / "state.json").read_text())["source"]
    assert kept["window"]["tickets"], "nobody was under way or waiting: the test shows nothing"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (folder,) = here.glob("outputs/*/*")
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert len(steps(folder)) == 8
    assert max(step["policy/age_max"] for step in steps(folder)) <= 2


def test_groups_are_reused(here: Path, tiny_model_folder: Path) -> None:
    words = [f"model={tiny_model_folder}", "agent=slow.py:agent", "reward=slow.py:letters", "mode=async"]
    found = steps(run(*words, "mode.max_staleness=5", "mode.max_uses=2", "data.train_batch_size=4"))
    assert "groups/reused" not in found[0]
    assert sum(step.get("groups/reused", 0) for step in found) == 10
    assert all(step["groups/total"] == 2 + step.get("groups/reused", 0) for step in found)
    assert max(step["policy/age_max"] for step in found) <= 5


@pytest.mark.parametrize(("uses", "every", "least"), [(3, 1, 2), (1, 3, 2), (3, 2, 3)])
def test_a_bound_that_is_too_short_is_refused(
    capsys: pytest.CaptureFixture[str], uses: int, every: int, least: int
) -> None:
    settings = [f"mode.max_staleness={least - 1}", f"mode.max_uses={uses}", f"mode.publish_every={every}"]
    assert main(["train", "mode=async", *settings]) == 2
    assert f"mode.max_staleness must be at least {least}" in capsys.readouterr().err
