"""Memory growth over many steps, counted inside the process. The long version, measured from
outside and with tools that fail, is benchmarks/soak.py."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from covey.cli.main import main
from covey.training.record import Step
from covey.training.run import Run

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
FIRST, LAST = 15, 45  # the steps that are compared
REWARD = "def score(task, episode):\n    return len(episode.final_answer) % 3 / 2\n"
SETTINGS = [
    *("model=model", "data.train_files=tasks.jsonl", "data.val_files=tasks.jsonl", "reward=reward.py:score"),
    *("agent=hf", "agent.tools=[calculator]", "agent.format=hermes", "agent.max_turns=2", "agent.max_tool_tokens=16"),
    *("data.train_batch_size=1", "rollout.group_size=2", "rollout.max_tokens=6", "loop.threads=1", "eval.every=10"),
    *("algorithm=grpo", "eval.before=false", f"loop.total_steps={LAST + 2}", "loop.save_every=10", "resume=disable"),
]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_leak_nothing(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    from kit.caller import save

    save(Path("model"), [("calculator", {"expression": text}) for text in ("1+2", "2/0", "3*3")])
    Path("reward.py").write_text(REWARD)
    Path("tasks.jsonl").write_text("\n".join(json.dumps({"question": f"q {n}", "answer": "3"}) for n in range(4)))
    counted: list[dict[str, int]] = []
    one_step = Run.step

    async def counting(self: Run) -> Step | None:
        made = await one_step(self)
        if made is not None and made.index in (FIRST, LAST):
            gc.collect()
            files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
            found = {"tasks": len(asyncio.all_tasks()), "files": files, "tracked": len(gc.get_objects())}
            counted.append(found | {"blocks": sys.getallocatedblocks()})
        return made

    monkeypatch.setattr(Run, "step", counting)
    assert main(["train", *SETTINGS, f"mode={mode}"]) == 0, capfd.readouterr().err
    first, last = counted
    grown = {name: last[name] - first[name] for name in first}
    steps = LAST - FIRST
    assert abs(grown["tasks"]) <= 8, "those of the episodes under way vary"
    assert grown["files"] <= 4, "a worker more or less"
    # A leaked group has dozens. In sync mode nothing is in progress between two steps; in async mode the amount varies.
    assert grown["tracked"] < (1 if mode == "sync" else 10) * steps, grown
    # The console keeps a few numbers per step, up to a limit; a leaked episode has hundreds.
    assert grown["blocks"] < 60 * steps, grown
