"""Runs studies: every experiment with every seed, several runs at a time, in parts that can be interrupted.

    python benchmarks/study.py gsm8k --models MODELS --data DATA --minutes 25 --share 4 --export EXPORT
    python benchmarks/study.py smollm2 --share 2 --export EXPORT          on two CPU cores
    python benchmarks/study.py agents --tiny --out outputs/tiny-studies

MODELS holds a folder for each model, DATA the public data (benchmarks/studies/data.py says which files). The studies
smollm2 and smollm2-rewards need neither. The same command continues: runs that are finished here or whose record is
committed are not repeated. Several studies share the places, so that the next one fills those that become free. The
exit code is 0 if all runs are finished, 75 if the time was up, 1 if some failed. Records are written to
EXPORT/STUDY.tar whenever a run ends; benchmarks/publish_studies.py makes tables of them. Settings are in
benchmarks/studies.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kit.report import provenance
from studies import tiny
from studies.catalogue import NAMES, chosen
from studies.data import prepare
from studies.jobs import UNFINISHED, Job, StudyJobs, environment
from studies.plan import WITHOUT_FILES, RunName, Study
from studies.record import FAILED, FINISHED, RECORDS, collect, device, pack, read_record, write_record
from studies.schedule import Schedule, Start, start_process

from covey.models.builtin import BUILTIN
from covey.models.loading import locate

SOURCE = Path(__file__).parent.parent / "src"
GRACE_S = 75.0  # between the signal and the kill: a step, an evaluation and a checkpoint, beside other runs
LEAST_S = 120.0  # a run that starts later than this before the end does not get to its first step
ENOUGH = 50 << 30  # free bytes on the disk below which a warning is printed


@dataclass
class Export:
    """Writes records and, after each, the archive of the study."""

    jobs: StudyJobs
    folder: Path | None  # of archives
    about: dict[str, Any]
    share: int

    @property
    def records(self) -> Path:
        return self.jobs.folder / "records"

    def write(self, run: RunName, status: str | None = None) -> None:
        record = collect(self.jobs, run, self.about, self.share)
        if record is None:
            return
        write_record(record | ({"status": status} if status else {}), self.records)
        if self.folder is not None:
            pack(self.records, self.folder / f"{self.jobs.study.name}.tar")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=NAMES, metavar="STUDY", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--models", type=Path, help="the folder with a folder for each model")
    parser.add_argument("--data", type=Path, help="the folder of public data")
    parser.add_argument("--out", type=Path, default=Path("outputs/studies"))
    parser.add_argument("--export", type=Path, help="where archives of records go")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop all runs cleanly within this time")
    parser.add_argument("--share", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these")
    parser.add_argument("--only", nargs="+", metavar="EXPERIMENT", help="only these experiments")
    parser.add_argument("--again", action="store_true", help="repeat runs whose records are committed")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of finished runs")
    parser.add_argument("--commit", help="of this code, where there is no git")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the machine, as sandbox.*"
    )
    parser.add_argument("--tiny", action="store_true", help="a random model, a few tasks and steps, on a CPU")
    options = parser.parse_args(argv)
    studies = [study for name in options.studies for study in chosen(name)]
    if not options.tiny and options.models is None and any(study.model not in BUILTIN for study in studies):
        parser.error("--models is needed, or --tiny")
    if not options.tiny and options.data is None and any(study.data not in WITHOUT_FILES for study in studies):
        parser.error("--data is needed, or --tiny")
    experiments = {one.name for study in studies for one in study.experiments}
    if unknown := set(options.only or ()) - experiments:
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(sorted(experiments))}")
    return options


def plan(study: Study, options: argparse.Namespace) -> StudyJobs:
    """The jobs of the chosen runs that are not recorded yet, with their data prepared."""
    out = options.out.resolve()
    data = options.data
    if options.tiny:
        study = tiny.shrunk(study)
        data = tiny.make_source(out / "tiny-data")
        model = tiny.make_model(out / "tiny-model")
    elif study.model in BUILTIN:
        model = Path(locate(study.model).path)
    else:
        model = (options.models / study.model).resolve()
        if not (model / "config.json").is_file():
            raise SystemExit(f"{model} is not the folder of a model")
    names = [one.name for one in study.experiments if options.only is None or one.name in options.only]
    seeds = study.seeds if options.seeds is None else options.seeds
    # All experiments of a seed before the next seed: a study that is cut short can still be compared.
    runs = [RunName(study.name, name, seed) for seed in seeds for name in names]
    todo = tuple(run for run in runs if options.again or not is_recorded(run, options.tiny))
    extra = dict(word.split("=", 1) for word in options.set)
    jobs = StudyJobs(study, out, model, extra, todo)
    prepare(study.data, data, jobs.data, limit=8 if options.tiny else None)
    _say(f"{study.name}: {len(todo)} of {len(runs)} runs to make")
    return jobs


def is_recorded(run: RunName, tiny: bool) -> bool:
    """Whether a finished record of the run is committed."""
    path = RECORDS / run.study / f"{run}.json.gz"
    return not tiny and path.is_file() and read_record(path)["status"] == FINISHED


def run_all(plans: Sequence[StudyJobs], options: argparse.Namespace, start: Start, kill_at: float) -> Schedule:
    """Run the jobs of all studies side by side, and export each run that ends."""
    about = {**provenance(), "device": device(), "tiny": options.tiny}
    about |= {"commit": options.commit} if options.commit else {}
    owners = {job: jobs for jobs in plans for job in jobs.all_jobs()}
    exports = {jobs.study.name: Export(jobs, options.export, about, options.share) for jobs in plans}

    def on_done(job: Job) -> None:
        jobs = owners[job]
        run = jobs.run_of(job)
        if run is None or not jobs.is_done(run):
            return
        exports[run.study].write(run)
        if not options.keep:  # seven gigabytes for each half a billion parameters
            for checkpoints in (jobs.run_folder(run) / "train").glob("*/*/checkpoints"):
                shutil.rmtree(checkpoints)

    grace = min(GRACE_S, 15 * options.minutes)
    schedule = Schedule(
        [*owners],
        lambda job: owners[job].command(job),
        start,
        options.share,
        kill_at - grace,
        kill_at,
        0.0 if options.tiny else LEAST_S,
        on_done,
        say=_say,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: schedule.stop_within(GRACE_S))
    schedule.run()
    for jobs in plans:
        for run in jobs.runs:
            failed = any(job in schedule.failed for job in jobs.jobs_of(run))
            if failed or not jobs.is_done(run):
                exports[run.study].write(run, FAILED if failed else None)
    return schedule


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def lock(out: Path) -> IO[str]:
    """One process for each output folder."""
    out.mkdir(parents=True, exist_ok=True)
    file = (out / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another study is running in {out}") from None
    return file


def main(argv: Sequence[str] | None = None, start: Start | None = None) -> int:
    options = parse(argv)
    kill_at = time.monotonic() + 60 * options.minutes
    with lock(options.out):
        if shutil.disk_usage(options.out).free < ENOUGH and not options.tiny:
            _say(f"less than {ENOUGH >> 30} GiB are free in {options.out}: give a larger --out, such as /dev/shm")
        start = start or start_process(environment(os.environ, SOURCE, options.share, os.cpu_count() or 1))
        plans = [plan(study, options) for name in options.studies for study in chosen(name)]
        schedule = run_all(plans, options, start, kill_at)
        left = sum(not jobs.is_done(run) for jobs in plans for run in jobs.runs)
        _say(f"{left} runs are not finished" if left else "all runs are finished")
        return 1 if schedule.failed else UNFINISHED if left else 0


if __name__ == "__main__":
    sys.exit(main())
