"""The data sets, by name."""

from __future__ import annotations

from covey.tasks.datasets.code import HUMANEVAL, MBPP, MBPP_SANITIZED
from covey.tasks.datasets.dataset import Dataset
from covey.tasks.datasets.following import IFEVAL
from covey.tasks.datasets.maths import AIME24, AMC23, DAPO_MATH, DEEPSCALER, GSM8K, MATH, MATH_500
from covey.tasks.datasets.qa import HOTPOTQA, MUSIQUE, WIKI2
from covey.tasks.datasets.tools import BFCL, RLLA

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        GSM8K,
        MATH,
        MATH_500,
        AIME24,
        AMC23,
        DEEPSCALER,
        DAPO_MATH,
        IFEVAL,
        HOTPOTQA,
        MUSIQUE,
        WIKI2,
        MBPP,
        MBPP_SANITIZED,
        HUMANEVAL,
        BFCL,
        RLLA,
    )
}
