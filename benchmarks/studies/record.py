"""The compact record of a run: metrics of every step, every evaluation task by task, settings, versions and times.

A record is one gzipped JSON file of at most MOST bytes, EXPERIMENT-sSEED.json.gz; those of a study go into one archive,
STUDY.tar. benchmarks/records/studies/STUDY has the committed ones.
"""

from __future__ import annotations

import gzip
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.jobs import StudyJobs, run_in
from studies.plan import RunName

SCHEMA = 1
MOST = 1 << 20
RECORDS = Path(__file__).parent.parent / "records" / "studies"
FINISHED, UNFINISHED, FAILED = "finished", "unfinished", "failed"

Record = dict[str, Any]


def collect(jobs: StudyJobs, run: RunName, provenance: Mapping[str, Any], share: int) -> Record | None:
    """The record of a run as far as it has come; None if it has no step yet."""
    from covey.telemetry import read_history

    folder = jobs.run_folder(run)
    if not list((folder / "train").glob("*/*/run.json")):
        return None
    path = run_in(folder / "train")
    history = read_history(path)
    if not history.steps:
        return None
    evaluations = [(record.step, record.metrics) for record in history.evaluations]
    return {
        "schema": SCHEMA,
        **{"study": run.study, "experiment": run.experiment, "seed": run.seed},
        "status": FINISHED if jobs.is_done(run) else UNFINISHED,
        **_about(path, jobs),
        **provenance,
        "share": share,
        "parts": [*_parts(folder)],
        "demonstrations": _demonstrations(jobs, run),
        "steps": _columns([record.metrics for record in history.steps]),
        "evaluations": _evaluations(path, evaluations),
        "transfer": {when: _transfer(place, jobs) for when, place in _places(jobs, folder).items()},
        "kl": json.loads(kl.read_text()) if (kl := folder / "kl.json").is_file() else None,
    }


def device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _about(path: Path, jobs: StudyJobs) -> Record:
    import yaml

    info = json.loads((path / "run.json").read_text())
    settings = yaml.safe_load((path / "config.yaml").read_text())
    versions = {name: str(version) for name, version in info.get("versions", {}).items()}
    text = json.dumps(settings)
    for place, name in ((jobs.out, "OUT"), (jobs.model, jobs.model.name)):  # no paths of a machine in a record
        text = text.replace(json.dumps(str(place.resolve()))[1:-1], name).replace(json.dumps(str(place))[1:-1], name)
    return {"settings": json.loads(text), "versions": versions, "dtype": info.get("dtype"), "started": info["started"]}


def _parts(folder: Path) -> Iterable[Record]:
    path = folder / "parts.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        part = json.loads(line)
        yield {**part, "start": round(part["start"]), "end": round(part["end"])}


def _demonstrations(jobs: StudyJobs, run: RunName) -> Record | None:
    """The loss of `covey sft`, if it came first."""
    folder = jobs.folder / f"{run.experiment}-sft" / "sft"
    if not list(folder.glob("*/*/run.json")):
        return None
    lines = (run_in(folder) / "metrics.jsonl").read_text().splitlines()
    steps = [record["metrics"] for record in map(json.loads, lines) if record["kind"] == "step"]
    seconds = sum(step["timing/step"] for step in steps)
    return {"loss": [_short(step["sft/loss"]) for step in steps], "seconds": _short(seconds)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Each metric over the steps; None where a step has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: Any) -> Any:
    """Five digits; whole numbers as such."""
    if not isinstance(value, float):
        return value
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")


def _evaluations(path: Path, metrics: Sequence[tuple[int, Mapping[str, float]]]) -> Record:
    """The tasks once, and for each evaluation its answers (greedy) as columns."""
    from covey.telemetry import evaluation_files, read_evaluation

    found: list[Record] = []
    tasks: list[str] = []
    files = evaluation_files(path)
    for step, values in metrics:
        answers = read_evaluation(files[step])["modes"]["greedy"]
        tasks = tasks or answers["task"]
        assert answers["task"] == tasks, "the tasks of an evaluation changed"
        rewards = {name: [_short(x) for x in column] for name, column in answers["rewards"].items()}
        plain = {name: answers[name] for name in ("tokens", "turns", "tools")}
        ends = [int(stop == "length") for stop in answers["stop"]]
        seconds = _short(values.get("timing/evaluate"))
        found.append({"step": step, "seconds": seconds, "rewards": rewards, **plain, "cut": ends})
    return {"tasks": tasks, "at": found}


def _places(jobs: StudyJobs, folder: Path) -> dict[str, Path]:
    if not jobs.study.transfer:
        return {}
    places = {"before": jobs.folder / "before" / "before", "after": folder / "after"}
    return {when: place for when, place in places.items() if (place / "results.json").is_file()}


def _transfer(place: Path, jobs: StudyJobs) -> Record:
    """Rewards and lengths of each set of tasks, in the order of the tasks."""
    names = {one.file: one.name for one in jobs.study.transfer}
    found: Record = {}
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    for answer in sorted(answers, key=lambda answer: answer["index"]):
        name = names[Path(answer["task"]).name]
        entry = found.setdefault(name, {"ids": [], "rewards": {}, "tokens": []})
        entry["ids"].append(answer["id"])
        entry["tokens"].append(answer["tokens"])
        for reward, value in answer["rewards"].items():
            entry["rewards"].setdefault(reward, []).append(_short(value) if answer["failure"] is None else None)
    return found


# -- Files -------------------------------------------------------------------------------------------------------------


def file_name(record: Record) -> str:
    return f"{record['experiment']}-s{record['seed']}.json.gz"


def write_record(record: Record, folder: Path) -> Path:
    """Answers of the evaluations in between are dropped if the record would be too large; their means stay."""
    data = _packed(record)
    if len(data) > MOST:
        for evaluation in record["evaluations"]["at"][1:-1]:
            for name in ("tokens", "turns", "tools", "cut"):
                evaluation.pop(name)
        data = _packed(record)
    assert len(data) <= MOST, f"{file_name(record)} has {len(data)} bytes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(record)
    path.write_bytes(data)
    return path


def _packed(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":"), allow_nan=False, default=str)
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def read_record(path: Path) -> Record:
    record: Record = json.loads(gzip.decompress(path.read_bytes()))
    if record.get("schema") != SCHEMA:
        raise SystemExit(f"{path} is not a record of schema {SCHEMA}")
    return record


def read_records(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.glob("*.json.gz"))]


def pack(folder: Path, archive: Path) -> None:
    """All records of a folder as one archive, with the same bytes for the same records."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        for path in sorted(folder.glob("*.json.gz")):
            data = path.read_bytes()
            entry = tarfile.TarInfo(path.name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def unpack(archive: Path, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
        return [folder / name for name in tar.getnames()]
