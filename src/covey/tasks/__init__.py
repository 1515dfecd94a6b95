"""Where questions come from: data files or generated problems, as `Task`."""

from covey.tasks.demonstrations import DemonstrationSet, load_demonstrations
from covey.tasks.generated import GENERATED, GeneratedTask
from covey.tasks.load import load_tasks
from covey.tasks.order import batch_for_step, fresh_tasks, steps_per_epoch
from covey.tasks.taskset import TaskSet

__all__ = [
    "GENERATED",
    "DemonstrationSet",
    "GeneratedTask",
    "TaskSet",
    "batch_for_step",
    "fresh_tasks",
    "load_demonstrations",
    "load_tasks",
    "steps_per_epoch",
]
