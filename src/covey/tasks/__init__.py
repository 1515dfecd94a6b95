"""Tasks from data files, public data sets and generators."""

from covey.tasks.datasets import DATASETS, Dataset, data_folder
from covey.tasks.files import list_rows, read_tasks, tasks_of_rows
from covey.tasks.generated import GENERATED, GeneratedTask
from covey.tasks.load import (
    ask_like_tasks,
    batch_for_step,
    default_reward,
    fresh_tasks,
    load_tasks,
    nothing_to_train_on,
    plain_question,
    reward_by_answers,
    steps_per_epoch,
    with_system_prompt,
)
from covey.types import TaskSet

__all__ = ["DATASETS", "GENERATED", "Dataset", "GeneratedTask", "TaskSet", "ask_like_tasks", "batch_for_step"]
__all__ += ["data_folder", "default_reward", "fresh_tasks", "list_rows", "load_tasks", "nothing_to_train_on"]
__all__ += ["plain_question", "read_tasks", "reward_by_answers", "steps_per_epoch", "tasks_of_rows"]
__all__ += ["with_system_prompt"]
