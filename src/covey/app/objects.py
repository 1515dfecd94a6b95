"""Prepares a run from Python objects: models, tasks, rewards, algorithms, agents and tools."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from covey.algorithms import algorithm_schemas, schema
from covey.app.prepare import Prepared, prepare
from covey.config import compose, literal
from covey.config.schema import DataConfig, LoggingConfig
from covey.errors import InputError
from covey.storage import sha256
from covey.tasks import TaskSet, read_tasks, reward_by_answers, tasks_of_rows, with_system_prompt
from covey.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from covey.agents.tools.tool import Tool
    from covey.protocols import Agent

    Settings: TypeAlias = Mapping[str, Any]
    ModelLike: TypeAlias = str | Path | PreTrainedModel | Settings
    TasksLike: TypeAlias = str | Path | Iterable[Task | Mapping[str, Any]]
    RewardLike: TypeAlias = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Settings
    AlgorithmLike: TypeAlias = str | type | object | Settings  # a name, a class, or an instance
    AgentLike: TypeAlias = str | Callable[..., Any] | Agent | Settings
    ToolLike: TypeAlias = str | Callable[..., Any] | Tool


def prepare_objects(
    model: ModelLike | None = None,
    tasks: TasksLike | None = None,
    reward: RewardLike | None = None,
    algorithm: AlgorithmLike | None = None,
    *,
    validation: TasksLike | None = None,
    tokenizer: Any = None,
    agent: AgentLike | None = None,
    tools: Sequence[ToolLike] = (),
    recipe: str | None = None,
    **settings: Any,
) -> Prepared:
    """Compose the settings and check everything that can be checked before weights are loaded. A dict as model, reward,
    algorithm or agent is a section of settings."""
    words: list[str] = []
    own_tokenizer = tokenizer
    if isinstance(model, (str, Path)):
        words.append(f"model.name={_quoted(str(model))}")
    elif isinstance(model, Mapping):
        words += _settings({"model": model})
    elif model is not None:
        words.append(f"model.name={_quoted(str(save_start_model(model, tokenizer, _output_dir(settings))))}")
        own_tokenizer = None  # it is saved with the model
    if isinstance(reward, Mapping):
        words, reward = [*words, *_settings({"reward": reward})], None
    words += _algorithm(algorithm) + _agent(agent, tools) + _settings(settings)
    task_words, task_set = _tasks(tasks, validation)
    algorithms = algorithm_schemas()
    composed = compose([*words, *task_words], algorithms=algorithms, own_algorithm=schema, config_name=recipe)
    if task_set is not None:
        task_set = with_system_prompt(_sized(task_set, composed.config.data, words), composed.config.data.system_prompt)
    return prepare(
        composed,
        tasks=task_set,
        reward=reward,
        agent=None if isinstance(agent, (str, Mapping)) else agent,
        tools=() if all(isinstance(tool, str) for tool in tools) else tuple(tools),
        tokenizer=own_tokenizer,
    )


# -- Tasks -------------------------------------------------------------------------------------------------------------


def _tasks(tasks: TasksLike | None, validation: TasksLike | None) -> tuple[list[str], TaskSet | None]:
    """Settings for tasks that are named, or the tasks themselves."""
    if tasks is None or isinstance(tasks, (str, Path)):
        words = []
        if tasks is not None:
            is_file = isinstance(tasks, Path) or "." in tasks or "/" in tasks
            words.append(f"data.{'train_files' if is_file else 'name'}={_quoted(str(tasks))}")
        if isinstance(validation, (str, Path)):
            words.append(f"data.val_files={_quoted(str(validation))}")
        elif validation is not None:
            given = "is not given" if tasks is None else f"is the name {str(tasks)!r}"
            raise InputError(f"validation= has rows, but tasks= {given}\n  fix: give both as rows, or both as files")
        return words, None
    rows = tasks_of_rows(tasks, "tasks")
    held_out: tuple[Task, ...] = ()
    if isinstance(validation, (str, Path)):
        held_out = tuple(read_tasks("validation", str(validation)))
    elif validation is not None:
        held_out = tasks_of_rows(validation, "validation")
    return [], TaskSet(rows, held_out, reward_by_answers((*rows, *held_out)), "tasks given in Python")


def _sized(tasks: TaskSet, data: DataConfig, words: Sequence[str]) -> TaskSet:
    """The first data.train_size and data.val_size tasks, if the user gives them: those of a recipe are for its data."""
    given = {key for key, _, value in (word.partition("=") for word in words) if value != "null"}
    for key, argument in (("data.train_files", "tasks=FILE"), ("data.val_files", "validation=FILE")):
        if key in given:
            raise InputError(f"{key} has no effect: tasks= has rows\n  fix: {argument}, or leave it out")
    return dataclasses.replace(
        tasks,
        train=tasks.train[: data.train_size if "data.train_size" in given else None],
        validation=tasks.validation[: data.val_size if "data.val_size" in given else None],
    )


# -- Models ------------------------------------------------------------------------------------------------------------


def save_start_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save a loaded model in FOLDER/start_models and return its folder, which is named by a hash of the files: the same
    model is saved once, and a restarted run finds its start model."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "state_dict"):
        raise InputError(f"model must be a name, a folder or a transformers model, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise InputError("model has adapters already\n  give the plain model; for new adapters: model.lora.rank=16")
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if tokenizer is None:
        tokenizer = _own_tokenizer(name)
    title = re.sub(r"[^\w.-]+", "-", Path(name).name or type(model).__name__)
    parent = folder / "start_models"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".writing-") as work:
        written = Path(work) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        files = sorted(path for path in written.rglob("*") if path.is_file())
        digest = hashlib.sha256("".join(f"{path.relative_to(written)} {sha256(path)}\n" for path in files).encode())
        final = parent / f"{title}-{digest.hexdigest()[:12]}"
        if not final.is_dir():
            written.rename(final)
    return final


def _own_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    from covey.models.hub import check_reachable

    try:
        if not name:
            raise OSError("the model has no name")
        if not Path(name).is_dir():
            check_reachable()
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer found for the model ({error})\n  pass it: tokenizer=...") from error


def _output_dir(settings: Mapping[str, Any]) -> Path:
    """logging.output_dir, read before the settings are composed, since the saved model's folder is one of them."""
    section = settings.get("logging")
    inside = section.get("output_dir") if isinstance(section, Mapping) else None
    return Path(settings.get("logging.output_dir") or inside or LoggingConfig().output_dir)


# -- Algorithms, agents, tools -----------------------------------------------------------------------------------------


def _algorithm(algorithm: Any) -> list[str]:
    """Settings for a name, a class or instance of `covey.algorithms.named`, or the user's own class or instance."""
    from covey.algorithms.assemble import register_class
    from covey.algorithms.named import Named

    if algorithm is None:
        return []
    if isinstance(algorithm, str):
        return [f"algorithm={_quoted(algorithm) if ':' in algorithm else algorithm}"]
    if isinstance(algorithm, Mapping):
        return _settings({"algorithm": algorithm})
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    if issubclass(cls, Named):
        changed = {} if isinstance(algorithm, type) else algorithm.changed()
        return [f"algorithm={cls.algorithm}", *_settings({"algorithm": changed})]
    name = register_class(cls)
    values: dict[str, Any] = {}
    if not isinstance(algorithm, type):
        values = {item.name: getattr(algorithm, item.name) for item in dataclasses.fields(algorithm) if item.init}
    return [f"algorithm={_quoted(name)}", *_settings({"algorithm": values})]


def _agent(agent: Any, tools: Sequence[Any]) -> list[str]:
    from covey.algorithms.assemble import import_name

    words: list[str] = []
    if tools and (agent is None or isinstance(agent, Mapping)):
        words.append("agent=hf")  # the model's own tool calls, unless the settings name another agent
    if isinstance(agent, Mapping):
        words += _settings({"agent": agent})
    elif agent is not None:
        name = agent if isinstance(agent, str) else import_name(getattr(agent, "function", agent))
        words.append(f"agent={_quoted(name)}")
    if tools:
        names = [tool if isinstance(tool, str) else import_name(getattr(tool, "function", tool)) for tool in tools]
        words.append(f"agent.tools={_quoted(names)}")
    return words


# -- Settings ----------------------------------------------------------------------------------------------------------


def _settings(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested sections → key=value, quoted for Hydra."""
    words: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            words += _settings(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={_quoted(value)}")
    return words


def _quoted(value: Any) -> str:
    """A value quoted for the command line. `${x}` in a Python string is text, not an interpolation."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_quoted(item) for item in value) + "]"
    if isinstance(value, str):
        # OmegaConf reads \\${ as text, and halves the backslashes before it.
        return literal(re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value))
    return literal(str(value) if isinstance(value, Path) else value)
