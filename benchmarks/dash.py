"""Speed of the dashboard with 10,000 steps and 100,000 episodes: first paint, filters, reading, scrolling, memory.

PYTHONPATH=.venv/dash .venv/bin/python benchmarks/dash.py        (after make dash-test, which installs the packages)

If tensorboard is installed, it is measured with the same scalars.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKENS = 60
METRICS = 40
REPEATS = 5


def make_run(folder: Path, steps: int, episodes: int) -> None:
    """A run folder of this size, with the files that a run writes."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    info = {"title": "covey/large", "algorithm": "grpo", "model": "made up", "task": "made up", "status": "running"}
    info |= {"total_steps": steps + 1, "reward_names": ["exact"], "trained_reward": "exact", "started": "2026-01-01"}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text("data: {val_size: 200}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            file.write(json.dumps({"kind": "step", "step": step, "metrics": scalars(step, steps, rng)}) + "\n")
            if step % 100 == 0:
                found = {"eval/accuracy": 0.2 + 0.6 * step / steps, "timing/evaluate": 2.0}
                file.write(json.dumps({"kind": "eval", "step": step, "metrics": found}) + "\n")
    with (folder / "episodes.jsonl").open("w") as file:
        for number in range(episodes):
            file.write(episode_line(number, number * steps // episodes, rng))


def scalars(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    done = step / steps
    found = {
        "reward/mean": 0.2 + 0.6 * done + rng.gauss(0, 0.05),
        "policy/entropy": 1.2 - 0.7 * done + rng.gauss(0, 0.05),
        "kl/reference": 0.2 * done + rng.random() * 0.01,
        "grad/norm": 0.8 + rng.random(),
        "groups/flat": 0.2 + 0.1 * rng.random(),
        "response/length_mean": 120 + rng.gauss(0, 5),
        "response/truncated": 0.05 * rng.random(),
        "perf/tokens_per_second": 2600 + rng.gauss(0, 90),
        "perf/generated_tokens": 8000.0,
        "timing/rollout": 3 + rng.random(),
        "timing/update": 1.5 + rng.random(),
        "timing/step": 5.5,
    }
    return found | {f"more/{number}": rng.random() for number in range(METRICS - len(found))}


def episode_line(number: int, step: int, rng: random.Random) -> str:
    tokens = rng.randrange(TOKENS // 2, TOKENS * 3 // 2)
    words = [f" w{rng.randrange(1000)}" for _ in range(tokens)]
    reward = float(rng.random() < 0.5)
    row = {
        "prompt_ids": list(range(20)),
        "response_ids": [rng.randrange(49000) for _ in range(tokens)],
        "mask": [1] * tokens,
        "text": words,
        "prompt_text": "a question",
        **{
            name: [round(rng.random(), 6) for _ in range(tokens)]
            for name in ("logprobs", "advantage", "ratio", "entropy")
        },
        "versions": [step] * tokens,
    }
    said = [{"role": "user", "content": f"question {number % 5000}"}, {"role": "assistant", "content": "".join(words)}]
    line = {
        "schema": 1,
        "step": step,
        "task_id": f"task-{number % 5000}",
        "group": number % 10 // 5,
        "attempt": number % 5,
    }
    line |= {
        "messages": said,
        "answer": "1",
        "rewards": {"exact": reward},
        "total_reward": reward,
        "advantage": reward - 0.5,
    }
    return json.dumps(line | {"stop": "eos", "failure": None, "tools": [], "rows": [row]}) + "\n"


@contextmanager
def dash_server(folder: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-c", "from covey.cli.main import main; main()", "dash", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def megabytes(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS"))) / 1000


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def index(folder: Path) -> None:
    """The work of the server in the background after a run is opened."""
    from covey.dashboard.episodes import EpisodeIndex

    episodes = EpisodeIndex(folder)
    while episodes.poll():
        pass


def in_the_page(page: Any) -> dict[str, str]:
    """Filtering, searching, reading and scrolling on the page of episodes."""
    found: dict[str, str] = {}
    page.goto(page.url.split("#")[0] + "#episodes")
    page.wait_for_function(INDEXED, timeout=120_000)
    for label, name, value in (
        ("filter by reward", "min_reward", "0.5"),
        ("search a task", "task", "task-77"),
        ("search in the text", "text", "w1 w2 "),
    ):
        times = [milliseconds(lambda name=name, value=value: _filter(page, name, value)) for _ in range(REPEATS)]
        found[label] = f"{statistics.median(times):.0f} ms"
        _filter(page, name, "")
    times = []
    for number in range(REPEATS):
        times.append(milliseconds(lambda number=number: _open(page, number)))
    found["open an episode"] = f"{statistics.median(times):.0f} ms"
    frames = page.evaluate(SCROLL)
    worst = sorted(frames)[int(0.99 * len(frames))]
    found["a frame while scrolling"] = f"median {statistics.median(frames):.0f} ms, 99 % below {worst:.0f} ms"
    return found


INDEXED = """() => {
  const said = document.querySelector('.count')?.textContent ?? '';
  return said.includes('episodes') && !said.includes('reading');
}"""
SCROLL = """async () => {
  const list = document.querySelector('.list'), frames = [];
  let last = performance.now();
  for (let i = 0; i < 240; i++) {
    list.scrollTop += 7500;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    frames.push(now - last); last = now;
  }
  return frames;
}"""


def _filter(page: Any, name: str, value: str) -> None:
    """Milliseconds until the list is filtered, including the 160 ms that the page waits for further typing."""
    with page.expect_response(lambda reply: "api/episodes" in reply.url and (f"{name}=" in reply.url) == bool(value)):
        page.fill(f".filters [name={name}]", value)
    page.evaluate("() => new Promise(requestAnimationFrame)")


def _open(page: Any, number: int) -> None:
    page.locator(".row").nth(number + 1).click()
    page.wait_for_function("() => document.querySelectorAll('.tokens span').length > 0")


def first_paint(browser: Any, link: str, shown: str) -> tuple[float, float, Any]:
    """Milliseconds to the first contentful paint, and until the charts are drawn."""
    page = browser.new_page()
    start = time.perf_counter()
    page.goto(link)
    page.wait_for_selector(shown, timeout=120_000)
    drawn = 1000 * (time.perf_counter() - start)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    return float(paint), drawn, page


def visit(browser: Any, link: str, shown: str) -> tuple[float, float]:
    paint, drawn, page = first_paint(browser, link, shown)
    page.close()
    return paint, drawn


def paints(browser: Any, link: str, shown: str, pause: float = 0.0) -> dict[str, str]:
    """The first visit, and later visits with everything loaded."""
    cold = visit(browser, link, shown)
    time.sleep(pause)
    warm = [visit(browser, link, shown) for _ in range(REPEATS)]
    paint, drawn = (statistics.median(one[at] for one in warm) for at in (0, 1))
    return {
        "first paint, first visit": f"{cold[0]:.0f} ms, charts {cold[1]:.0f} ms",
        "first paint, again": f"{paint:.0f} ms, charts {drawn:.0f} ms",
    }


def measure_dash(browser: Any, folder: Path) -> dict[str, str]:
    begun = time.perf_counter()
    with dash_server(folder) as (link, pid):
        found = {"from the command to the link": f"{time.perf_counter() - begun:.1f} s"}
        found |= paints(browser, link, "html[data-ready]")
        _, _, page = first_paint(browser, link, "html[data-ready]")
        found |= in_the_page(page)
        found["indexing all episodes, behind"] = f"{milliseconds(lambda: index(folder)) / 1000:.1f} s"
        heap = page.evaluate("performance.memory ? performance.memory.usedJSHeapSize / 1e6 : NaN")
        return found | {"memory of the server": f"{megabytes(pid):.0f} MB", "memory of the scripts": f"{heap:.0f} MB"}


def measure_tensorboard(browser: Any, folder: Path, work: Path) -> dict[str, str]:
    """With as many points per curve as our dashboard, and loading in the background, its default."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(work / "tb")) as writer:
        for line in (folder / "metrics.jsonl").open():
            record = json.loads(line)
            for name, value in record["metrics"].items():
                writer.add_scalar(name, value, record["step"])
    begun = time.perf_counter()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(work / "tb"), "--port", "0"]
    command += ["--samples_per_plugin", "scalars=1000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            link = next(found[0] for line in process.stderr if (found := re.search(r"http://localhost:\d+/", line)))
            found = {"from the command to the link": f"{time.perf_counter() - begun:.1f} s"}
            found |= paints(browser, f"{link}#timeseries", "scalar-card line-chart", pause=20)
            return found | {"memory of the server": f"{megabytes(process.pid):.0f} MB"}
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--run", type=Path, help="where the run is made, and kept; one that is there is taken")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as play:
        work = Path(name)
        run = asked.run or work / "run"
        if not run.exists():
            make_run(run, asked.steps, asked.episodes)
        sizes = {file: round((run / file).stat().st_size / 1e6) for file in ("metrics.jsonl", "episodes.jsonl")}
        print(f"a run of {' and '.join(f'{size} MB {file}' for file, size in sizes.items())}")
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        show("covey dash", measure_dash(browser, run))
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            print("tensorboard is not installed: not compared")
        else:
            show("tensorboard", measure_tensorboard(browser, run, work))
        browser.close()


def show(title: str, found: dict[str, str]) -> None:
    print(f"\n{title}")
    for name, value in found.items():
        print(f"  {name:34} {value}", flush=True)


if __name__ == "__main__":
    main()
