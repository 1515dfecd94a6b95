"""The processes of a study, in their order, and whether each is done.

    OUT/STUDY/data/                      prepared data
    OUT/STUDY/EXPERIMENT-sft/            demonstrations, if the experiment has any: one for all seeds
    OUT/STUDY/before/                    transfer sets with the start model: one for the study
    OUT/STUDY/EXPERIMENT-sSEED/train/    `covey train`, which continues its unfinished run by itself
                              after/     transfer sets with the trained model
                              kl.json    the distance to the start model

A job is done once its process has ended with 0; a file `JOB.done` says so. Everything else can be killed and repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.plan import Experiment, RunName, Settings, Study, words

COVEY = (sys.executable, "-m", "covey.cli.main")
KL = Path(__file__).parent / "kl.py"
UNFINISHED = 75  # exit code of covey train after SIGTERM
ASKED = ("agent", "rollout.", "sandbox.", "reward", "data.system_prompt")  # what an evaluation shares with training


@dataclass(frozen=True)
class Job:
    name: str  # unique in the study
    folder: Path
    kind: str  # sft, before, train, after, kl
    needs: tuple[Job, ...] = ()

    @property
    def mark(self) -> Path:
        return self.folder / f"{self.kind}.done"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.kind}.log"

    @property
    def done(self) -> bool:
        return self.mark.is_file()


@dataclass(frozen=True)
class StudyJobs:
    """The jobs of the chosen runs of a study. `extra` are settings of all processes of covey."""

    study: Study
    out: Path
    model: Path
    extra: Settings
    runs: tuple[RunName, ...]

    @property
    def folder(self) -> Path:
        return self.out / self.study.name

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def run_folder(self, run: RunName) -> Path:
        return self.folder / str(run)

    def jobs_of(self, run: RunName) -> tuple[Job, ...]:
        """In their order; the first ones may be shared with other runs."""
        experiment = self.study.experiment(run.experiment)
        folder = self.run_folder(run)
        first: tuple[Job, ...] = ()
        if experiment.demonstrations:
            first = (Job(f"{self.study.name} {experiment.name}-sft", self.folder / f"{experiment.name}-sft", "sft"),)
        if self.study.transfer:
            first = (*first, Job(f"{self.study.name} before", self.folder / "before", "before"))
        train = Job(f"{run.study} {run} train", folder, "train", tuple(job for job in first if job.kind == "sft"))
        after = (Job(f"{run.study} {run} after", folder, "after", (train,)),) if self.study.transfer else ()
        return (*first, train, *after, Job(f"{run.study} {run} kl", folder, "kl", (train,)))

    def is_done(self, run: RunName) -> bool:
        return all(job.done for job in self.jobs_of(run))

    def all_jobs(self) -> list[Job]:
        """Depth first: what is shared, then run after run."""
        return list(dict.fromkeys(job for run in self.runs for job in self.jobs_of(run)))

    def run_of(self, job: Job) -> RunName | None:
        return next((run for run in self.runs if self.run_folder(run) == job.folder), None)

    # -- Commands ------------------------------------------------------------------------------------------------------

    def command(self, job: Job) -> list[str]:
        run = self.run_of(job)
        if job.kind == "sft":
            experiment = self.study.experiment(job.folder.name.removesuffix("-sft"))
            return self._sft(experiment, job.folder)
        if job.kind == "before":
            return self._transfer(str(self.model), job.folder / "before")
        assert run is not None
        if job.kind == "train":
            return self._train(run)
        if job.kind == "after":
            return self._transfer(str(last_checkpoint(job.folder / "train")), job.folder / "after")
        start = self._start(self.study.experiment(run.experiment))
        return [sys.executable, str(KL), str(run_in(job.folder / "train")), str(start), str(job.folder / "kl.json")]

    def _train(self, run: RunName) -> list[str]:
        experiment = self.study.experiment(run.experiment)
        settings = {
            **{"model.name": str(self._start(experiment)), "seed": str(run.seed)},
            **self.study.settings,
            **experiment.settings,
            # One checkpoint on the disk, and eight answers of every step for the distance to the start model.
            **{"loop.keep_last": "1", "loop.keep_best": "false", "logging.episodes_per_step": "8"},
            **{"logging.experiment": f"{run.study}-{run}", "logging.output_dir": str(self.run_folder(run) / "train")},
            **self.extra,
        }
        return [*COVEY, "train", "--unfinished", str(UNFINISHED), *words(settings, str(self.data))]

    def _sft(self, experiment: Experiment, folder: Path) -> list[str]:
        settings = {
            **{"model.name": str(self.model), "logging.output_dir": str(folder / "sft")},
            **experiment.demonstrations,
            **self.extra,
        }
        return [*COVEY, "sft", *words(settings, str(self.data))]

    def _transfer(self, model: str, out: Path) -> list[str]:
        files = ",".join(str(self.data / one.file) for one in self.study.transfer)
        settings = {key: value for key, value in self.study.settings.items() if key.startswith(ASKED)}
        sets = [*words({**settings, **self.extra}, str(self.data))]
        return [*COVEY, "eval", model, "--tasks", files, "--n", "1", "--out", str(out), *sets]

    def _start(self, experiment: Experiment) -> Path:
        """The model that reinforcement learning begins with."""
        if not experiment.demonstrations:
            return self.model
        return last_checkpoint(self.folder / f"{experiment.name}-sft" / "sft") / "model"


def run_in(folder: Path) -> Path:
    """The one run in an output folder; the newest, if a process was killed before its first checkpoint."""
    return max(path.parent for path in folder.glob("*/*/run.json"))


def last_checkpoint(folder: Path) -> Path:
    return max((run_in(folder) / "checkpoints").glob("step-*"))


def is_busy(job: Job) -> bool:
    """Whether a process of an earlier call still holds one of the job's runs."""
    from covey.storage import is_locked

    folders: Iterable[Path] = (path.parent for path in (job.folder / job.kind).glob("*/*/run.json"))
    return any(is_locked(folder) for folder in folders)


def environment(base: Mapping[str, str], source: Path, share: int, cores: int) -> dict[str, str]:
    """Each process imports Covey from this checkout and gets its part of the processor."""
    paths = ":".join(filter(None, [str(source), base.get("PYTHONPATH")]))
    return {**base, "PYTHONPATH": paths, "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(max(1, cores // share)))}
