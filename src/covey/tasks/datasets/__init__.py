"""Public data sets by name: where each is at home, how its raw rows become tasks, and how prepared ones are loaded.

registry.py   the visible list                        prepare.py  raw files → rows → checked → Parquet and a manifest
dataset.py    what a description says                 fetch.py    raw files from the hub or a repository
maths.py, qa.py, code.py, tools.py, following.py      load.py     a prepared set → Task
              one description per set                 clean.py, text.py   what is left out, and when texts are equal
"""

from covey.tasks.datasets.dataset import Dataset
from covey.tasks.datasets.load import DATASETS, data_folder, load_dataset

__all__ = ["DATASETS", "Dataset", "data_folder", "load_dataset"]
