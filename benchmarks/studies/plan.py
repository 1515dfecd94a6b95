"""What a study is: experiments, each a set of settings of `covey train`, and the seeds that each is run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, str]  # key → value, as on the command line
GENERATED = "generated"  # tasks that `covey train` makes itself
WITHOUT_FILES = (GENERATED, "sums")  # data that is made from no file


@dataclass(frozen=True)
class Transfer:
    """A set of tasks that no run trains on, measured before and after training with `covey eval`."""

    name: str
    file: str  # in the folder of prepared data


@dataclass(frozen=True)
class Experiment:
    name: str
    settings: Settings
    demonstrations: Settings = field(default_factory=dict)  # of `covey sft`, which comes first; empty: none


@dataclass(frozen=True)
class Study:
    """`settings` are those of all experiments; `{data}` in a value is the folder of prepared data."""

    name: str
    title: str
    model: str  # built in, or a folder in --models
    data: str  # what studies/data.py prepares, or GENERATED
    settings: Settings
    experiments: tuple[Experiment, ...]
    seeds: tuple[int, ...]
    metric: str  # the reward that is accuracy
    transfer: tuple[Transfer, ...] = ()
    baseline: str = ""  # the experiment that the others are compared with; default: the first
    limit: int | None = None  # tokens that an answer should not exceed: its share is measured too
    compare_all: bool = False  # every pair of experiments, not just each with the baseline
    timed: bool = True  # compared at equal time too; not on a machine that does other work meanwhile

    def experiment(self, name: str) -> Experiment:
        return next(one for one in self.experiments if one.name == name)

    @property
    def first(self) -> str:
        return self.baseline or self.experiments[0].name


@dataclass(frozen=True)
class RunName:
    """One run of a study."""

    study: str
    experiment: str
    seed: int

    def __str__(self) -> str:
        return f"{self.experiment}-s{self.seed}"


def words(settings: Settings, data: str) -> list[str]:
    """Settings as words of a command line."""
    return [f"{key}={value.replace('{data}', data)}" for key, value in settings.items()]
