"""Public data sets by name: their sources, the conversion of raw rows, preparation and loading.

dataset.py      what describes a data set             prepare.py  raw files → checked rows → Parquet and a manifest
math_sets.py, question_sets.py, code_and_tool_sets.py fetch.py    raw files, local or from the hub or a repository
                the data sets                         load.py     DATASETS, and prepared sets → Task
"""

from covey.tasks.datasets.dataset import Dataset
from covey.tasks.datasets.load import DATASETS, data_folder, load_dataset

__all__ = ["DATASETS", "Dataset", "data_folder", "load_dataset"]
