"""The judges of the endurance and load runs: they must see what they are there for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def walk(n: int, spread: float, stay: float) -> Any:
    """Noise whose neighbours are alike, as samples of memory are."""
    rng = np.random.default_rng(3)
    found = np.zeros(n)
    for i in range(1, n):
        found[i] = stay * found[i - 1] + spread * rng.standard_normal()
    return found


def test_a_slope_is_found_with_an_interval_that_knows_of_alike_neighbours() -> None:
    from soak import slope

    steps = np.arange(0, 20_000, 50.0)
    noise = walk(len(steps), spread=0.5, stay=0.9)
    flat, grows = slope(steps, 400 + noise), slope(steps, 400 + noise + 0.4 * steps / 1000)
    assert flat.flat and flat.verdict(1000) == "indistinguishable from zero"
    assert not grows.flat and grows.verdict(1000) == "grows" and grows.low < 0.4 < grows.high
    assert grows.verdict(100) == "grows"
    few = slope(steps, 400 + noise / 1e4 + 5e-5 * steps / 1000)
    assert not few.flat and few.verdict(1500) == "level (+0 KiB in 1,500 steps)"
    assert abs(grows.value - flat.value - 0.4) < 1e-9  # least squares is linear
    white = slope(steps, 400 + np.random.default_rng(3).standard_normal(len(steps)) * noise.std())
    assert flat.high - flat.low > 2 * (white.high - white.low)  # the same spread, but fewer independent samples


def test_steps_are_counted_as_lines_are_finished(tmp_path: Path) -> None:
    from soak import Steps

    folder = tmp_path / "outputs" / "day" / "time"
    folder.mkdir(parents=True)
    path, steps = folder / "metrics.jsonl", Steps(tmp_path)
    path.write_text(json.dumps({"kind": "step", "step": 0}) + "\n" + json.dumps({"kind": "eval", "step": 1}) + "\n")
    assert steps.read() == 1
    line = json.dumps({"kind": "step", "step": 1})
    with path.open("a") as file:
        file.write(line[:9])
    assert steps.read() == 1
    with path.open("a") as file:
        file.write(line[9:] + "\n")
    assert steps.read() == steps.read() == 2


def line(number: int, logprobs: list[float], mask: list[int]) -> dict[str, Any]:
    row = {"mask": mask, "logprobs": logprobs, "text": ["x"] * len(mask), "prompt_text": f"session-{number}-turn 0"}
    return {"id": f"e{number}", "rewards": {"reward": number}, "rows": [row]}


def test_whatever_is_recorded_wrongly_is_told() -> None:
    from kit.load import Session, wrongs

    def session(number: int, *replies: tuple[float, ...], lost: int = 0) -> Session:
        texts = [["x"] * len(reply) for reply in replies]
        return Session(number, "plain", f"e{number}", replies=list(replies), texts=texts, lost=lost)

    one, two = session(1, (-1.0, -2.0), (-3.0,)), session(2, (-4.0,))
    first, second = line(1, [-1.0, -2.0, 0.0, -3.0], [1, 1, 0, 1]), line(2, [-4.0], [1])
    assert wrongs([one, two], [second, first]) == []
    assert wrongs([one, two], [first]) == ["session 2 (plain): recorded 0 times"]
    assert wrongs([one, two], [first, second, second]) == ["session 2 (plain): recorded 2 times"]
    mixed = [first | {"rows": second["rows"]}, second]
    assert any("not in the record" in wrong for wrong in wrongs([one, two], mixed))
    assert any("marks" in wrong for wrong in wrongs([one, two], mixed))
    unheard = line(2, [-4.0, 0.0, -5.0], [1, 0, 1])
    assert wrongs([two], [unheard]) == ["session 2 (plain): 1 replies in the record that it did not hear"]
    assert wrongs([session(2, (-4.0,), lost=1)], [unheard]) == []  # it had hung up: the reply may have been whole
    assert wrongs([two], [second | {"rewards": {"reward": 9}}]) == ["session 2 (plain): rewards {'reward': 9}"]
