"""The result of a benchmark: a printed table, a JSON record and a picture in a folder, and a section of
docs/benchmarks.md.

Files are called NAME-DEVICE.json and .png, the same in every run. `benchmarks/results` has those of this machine,
`benchmarks/records` the committed ones that the page shows (publish.py) and new ones are compared with (compare.py).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tiny import table, write_section

RESULTS = Path(__file__).parent.parent / "results"
RECORDS = Path(__file__).parent.parent / "records"
ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PLACES = {"--limit", "--out", "--trl-python", "--vllm-python"}
COLOURS = ("#2f6db5", "#d9822b", "#1b8a5a", "#a4478c", "#b33c3c", "#5b5b5b")


@dataclass(frozen=True)
class Plot:
    """Lines where `x` is given, otherwise bars over `labels`."""

    title: str
    y: str
    series: Mapping[str, Sequence[float | None]]
    labels: Sequence[str] = ()
    x: Sequence[float] = ()
    x_label: str = ""
    logarithmic: bool = False


@dataclass(frozen=True)
class Measure:
    """One of Covey's figures, for the comparison with another record: the median, and its repeats if there are any."""

    name: str
    value: float
    unit: str  # s or GiB: less is better; tokens/s, episodes/s: more is better
    repeats: Sequence[float] = ()

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")


@dataclass(frozen=True)
class Result:
    name: str
    device: str  # as people call it
    versions: Mapping[str, str]
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]  # the values behind the cells
    plot: Plot
    notes: Sequence[str] = ()
    rates: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    tiny: bool = False
    measures: Sequence[Measure] = ()
    runs: Any = None  # all repeats of all sides, as they were measured
    date: str = ""
    commit: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        return f"{self.name}-{'tiny-' if self.tiny else ''}{slug(self.device)}"

    def text(self) -> str:
        """Markdown: the table, and the conditions of the measurement below it."""
        lines = [table(self.header, self.cells), ""]
        lines += [f"- {note}" for note in self.notes]
        if self.rates:
            lines.append(
                f"- floor: {number(self.rates['bandwidth'] / 1e9)} GB/s, {number(self.rates['flops'] / 1e9)} GFLOP/s "
                f"({self.rates['source']})"
            )
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f"{self.date}, commit {self.commit}; " if self.date else ""
        lines += [f"- {when}{self.device}; {versions}", f"- `{self.command}`"]
        return "\n".join(lines)


def slug(device: str) -> str:
    """cpu, or the card's name without its maker's: nvidia-h200."""
    if "threads" in device:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file and the picture")
    parser.add_argument("--tiny", action="store_true", help="seconds, a tiny model, also without a GPU")
    parser.add_argument(
        "--limit", type=float, default=6 * 3600, help="seconds; measurements after this time are skipped"
    )
    return parser


def measured_on(chosen: argparse.Namespace) -> str:
    """The device. With --tiny, GPU benchmarks run the same code on a CPU if there is no GPU."""
    import torch

    return "cpu" if chosen.tiny and not torch.cuda.is_available() else str(chosen.device)


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command of this benchmark, without paths of this machine."""
    script, *words = argv or sys.argv
    shown = [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & PLACES]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *shown])


def publish(result: Result, out: Path) -> Path:
    """Print the result and write its files. Without matplotlib, benchmarks/publish.py draws the picture later."""
    result = replace(result, **provenance())
    print(f"\n{result.name}\n\n{result.text()}\n")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result.file_name}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(result.plot, path.with_suffix(".png"))
    return path


def provenance() -> dict[str, Any]:
    """When, where and with which code a result was measured."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True) if shutil.which("git") else None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": found.stdout.strip() if found is not None and found.returncode == 0 else "unknown",
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def read(path: Path) -> Result:
    found = json.loads(path.read_text())
    measures = [Measure(**measure) for measure in found["measures"]]
    return Result(**found | {"plot": Plot(**found["plot"]), "measures": measures})


def write_page(result: Result, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Write the table into its section of the page, and draw the picture."""
    picture = draw(result.plot, images / f"benchmark-{result.file_name}.png")
    text = f"![{result.plot.title}](images/{picture.name})\n\n{result.text()}"
    write_section(result.file_name, text, page)


def draw(plot: Plot, path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=200, layout="constrained")
    width = 0.8 / len(plot.series)
    for number, (name, values) in enumerate(plot.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        known = [(at, value) for at, value in enumerate(values) if value is not None]
        if plot.x:
            axes.plot([plot.x[at] for at, _ in known], [v for _, v in known], marker="o", color=colour, label=name)
        else:
            places = [at + (number - (len(plot.series) - 1) / 2) * width for at, _ in known]
            axes.bar(places, [v for _, v in known], width, color=colour, label=name)
    if plot.x:
        axes.set_xlabel(plot.x_label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(plot.x)), [f"{x:g}" for x in sorted(set(plot.x))])
    else:
        axes.set_xticks(range(len(plot.labels)), plot.labels)
    if plot.logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(plot.y)
    axes.set_title(plot.title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def number(value: float | None) -> str:
    """The number with three digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to
