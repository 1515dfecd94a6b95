"""Objects that are given in Python (models, tasks, algorithms, agents, tools) → the settings and parts of a run."""

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
from covey.config import Composed, compose, literal
from covey.config.schema import LoggingConfig
from covey.errors import InputError
from covey.storage import sha256
from covey.tasks import TaskSet, read_tasks, reward_by_answers, tasks_of_rows, with_system_prompt
from covey.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from covey.agents.tools import Tool
    from covey.protocols import Agent

    Settings: TypeAlias = Mapping[str, Any]
    ModelLike: TypeAlias = str | Path | PreTrainedModel | Settings
    TasksLike: TypeAlias = str | Path | Iterable[Task | Mapping[str, Any]]
    RewardLike: TypeAlias = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | Settings
    AlgorithmLike: TypeAlias = str | type | object | Settings  # a name, a class, or an instance
    AgentLike: TypeAlias = str | Callable[..., Any] | Agent | Settings
    ToolLike: TypeAlias = str | Callable[..., Any] | Tool


def prepare_given(
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
    """Everything that is checked before weights are loaded. A dict in place of a model, a reward, an algorithm or an
    agent is a section of settings."""
    words: list[str] = []
    kept_tokenizer = tokenizer
    if isinstance(model, (str, Path)):
        words.append(f"model.name={_quoted(str(model))}")
    elif isinstance(model, Mapping):
        words += _settings({"model": model})
    elif model is not None:
        words.append(f"model.name={_quoted(str(start_model(model, tokenizer, _place_of(settings))))}")
        kept_tokenizer = None  # it is in the folder
    if isinstance(reward, Mapping):
        words, reward = [*words, *_settings({"reward": reward})], None
    words += _algorithm(algorithm) + _agent(agent, tools) + _settings(settings)
    named, given = _tasks(tasks, validation)
    composed = _composed([*words, *named], recipe)
    if given is not None:
        given = with_system_prompt(given, composed.config.data.system_prompt)
    own_agent = None if agent is None or isinstance(agent, (str, Mapping)) else agent
    return prepare(
        composed,
        tasks=given,
        reward=reward,
        agent=own_agent,
        tools=() if all(isinstance(tool, str) for tool in tools) else tuple(tools),
        tokenizer=kept_tokenizer,
    )


def _composed(words: Sequence[str], recipe: str | None) -> Composed:
    return compose(words, algorithms=algorithm_schemas(), own_algorithm=schema, config_name=recipe)


# --- tasks ---------------------------------------------------------------------------------------------------------


def _tasks(tasks: TasksLike | None, validation: TasksLike | None) -> tuple[list[str], TaskSet | None]:
    """Settings that name the tasks, or tasks that are given."""
    if tasks is None or isinstance(tasks, (str, Path)):
        words = [] if tasks is None else [f"{_data_key(tasks)}={_quoted(str(tasks))}"]
        if isinstance(validation, (str, Path)):
            words.append(f"data.val_files={_quoted(str(validation))}")
        elif validation is not None:
            raise InputError("validation= must be a file when tasks= is one")
        return words, None
    rows = tasks_of_rows(tasks, "tasks")
    held_out: tuple[Task, ...] = ()
    if isinstance(validation, (str, Path)):
        held_out = tuple(read_tasks("validation", str(validation)))
    elif validation is not None:
        held_out = tasks_of_rows(validation, "validation")
    return [], TaskSet(rows, held_out, reward_by_answers((*rows, *held_out)), "tasks given in Python")


def _data_key(tasks: str | Path) -> str:
    is_file = isinstance(tasks, Path) or "." in tasks or "/" in tasks
    return "data.train_files" if is_file else "data.name"


# --- models --------------------------------------------------------------------------------------------------------


def start_model(model: Any, tokenizer: Any, folder: Path) -> Path:
    """The folder of a loaded model as it is now, in FOLDER/start_models, named by its contents: the same model is
    kept once, and a run that is started again finds its start model."""
    if not hasattr(model, "save_pretrained") or not hasattr(model, "state_dict"):
        raise InputError(f"model must be a name, a folder or a transformers model, got {type(model).__name__}")
    if hasattr(model, "peft_config"):
        raise InputError("model has adapters already\n  give the plain model; for new adapters: model.lora.rank=16")
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if tokenizer is None:
        tokenizer = _own_tokenizer(name)
    title = re.sub(r"[^\w.-]+", "-", Path(name).name or type(model).__name__)
    place = folder / "start_models"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".writing-") as work:
        made = Path(work) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        files = sorted(path for path in made.rglob("*") if path.is_file())
        digest = hashlib.sha256("".join(f"{path.relative_to(made)} {sha256(path)}\n" for path in files).encode())
        final = place / f"{title}-{digest.hexdigest()[:12]}"
        if not final.is_dir():
            made.rename(final)
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
        raise InputError(f"there is no tokenizer for the model ({error})\n  give it: tokenizer=...") from error


def _place_of(settings: Mapping[str, Any]) -> Path:
    """logging.output_dir, before the settings are composed: the model's name is one of them."""
    section = settings.get("logging")
    inside = section.get("output_dir") if isinstance(section, Mapping) else None
    return Path(settings.get("logging.output_dir") or inside or LoggingConfig().output_dir)


# --- algorithms, agents, tools -------------------------------------------------------------------------------------


def _algorithm(algorithm: Any) -> list[str]:
    """A name; one of the classes of `covey.algorithms.named`, or an instance; or the user's own class or instance."""
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
    values = {} if isinstance(algorithm, type) else _values(algorithm)
    return [f"algorithm={_quoted(name)}", *_settings({"algorithm": values})]


def _values(algorithm: Any) -> dict[str, Any]:
    return {item.name: getattr(algorithm, item.name) for item in dataclasses.fields(algorithm) if item.init}


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


# --- settings ------------------------------------------------------------------------------------------------------


def _settings(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested sections → key=value, quoted for Hydra."""
    found: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _settings(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_quoted(value)}")
    return found


def _quoted(value: Any) -> str:
    """A value as a word of the command line. Text stays as it is: `${x}` in a Python string refers to nothing."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_quoted(item) for item in value) + "]"
    if isinstance(value, str):
        # OmegaConf reads \\${ as text, and halves the backslashes before it.
        return literal(re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value))
    return literal(str(value) if isinstance(value, Path) else value)
