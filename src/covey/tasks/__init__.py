"""Where questions come from: data files or generated problems, as `Task`."""

from covey.tasks.datasets import DATASETS, Dataset, data_folder
from covey.tasks.demonstrations import DemonstrationSet, load_demonstrations
from covey.tasks.files import read_tasks
from covey.tasks.generated import GENERATED, GeneratedTask
from covey.tasks.load import default_reward, load_tasks, nothing_to_train_on, reward_by_answers, with_system_prompt
from covey.tasks.order import batch_for_step, fresh_tasks, steps_per_epoch
from covey.tasks.rows import list_rows, tasks_of_rows
from covey.tasks.taskset import TaskSet

__all__ = [
    "DATASETS",
    "GENERATED",
    "Dataset",
    "DemonstrationSet",
    "GeneratedTask",
    "TaskSet",
    "batch_for_step",
    "data_folder",
    "default_reward",
    "fresh_tasks",
    "list_rows",
    "load_demonstrations",
    "load_tasks",
    "nothing_to_train_on",
    "read_tasks",
    "reward_by_answers",
    "steps_per_epoch",
    "tasks_of_rows",
    "with_system_prompt",
]
