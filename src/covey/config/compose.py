"""Composes a recipe, a file and a command line into one frozen `Config`.

    recipe  →  --config PATH  →  command line          later layers win

Hydra composes the recipe. `resolve` translates the user's settings and resolves conflicts. OmegaConf's structured
config checks every value against the dataclasses and is converted to them.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.resources
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from covey.config import derive
from covey.config.aliases import translate
from covey.config.read import Override, literal, read_overrides, read_yaml
from covey.config.resolve import Resolved, choice_of, resolve, resolve_derived
from covey.config.schema import OWN_TASKS, AgentConfig, ClusterConfig, Config, ModeConfig, RolloutConfig, TeacherConfig
from covey.config.settings import Algorithms, Setting, algorithm_settings, find, losses_of, schema_settings
from covey.config.validate import Checker, WrongValues, value_at
from covey.errors import InputError, unknown
from covey.redact import hidden_setting, remember_secrets, without_secrets

DEFAULT_ALGORITHM = "gvpo"
RECIPES = "covey.recipes"

# The choices of each config group; the first is the default. The choices of `algorithm` are an argument.
GROUPS: Mapping[str, Mapping[str, type]] = {
    "agent": dict.fromkeys(("chat", "hf", "react", "code", "flow", "gateway", "gui", *OWN_TASKS), AgentConfig),
    "rollout": {"embedded": RolloutConfig, "vllm": RolloutConfig, "auto": RolloutConfig},
    "cluster": {"local": ClusterConfig, "ray": ClusterConfig},
    "mode": {"sync": ModeConfig, "async": ModeConfig},
}
OWN_CODE = ("agent",)  # groups that also accept module:function or file.py:function

# Settings of the number of learners, any of which may use the GVPO guide's variable N_GPUS.
DEVICE_COUNTS = frozenset(("trainer.n_gpus_per_node", "train_model.num_devices", "cluster.learner_devices"))

# Settings that resume=auto ignores when it looks for the same run.
NOT_IN_FINGERPRINT = (
    *("resume", "gateway.port", "gateway.max_programs", "loop.max_minutes"),
    *("agent.chromium", "agent.browsers", "agent.pages_per_browser"),
    *("logging.to", "logging.output_dir", "logging.verbosity", "logging.tags", "logging.notes"),
    *(f"cluster.{field.name}" for field in fields(ClusterConfig)),  # on other machines it is still the same run
    *("learner.tensor_parallel", "teacher.url", "teacher.api_key_env"),
)

# Settings that older runs do not have, with the value that stands for what they did. The fingerprint skips a setting
# with this value, so `resume=auto` finds those runs.
ADDED: Mapping[str, Any] = {
    "agent.keep_images": None,
    "agent.opponent_options": {},
    "agent.opponents": [],
    "agent.train_roles": [],
    "algorithm.reject_level": "auto",
    "algorithm.turn_gamma": 1.0,
    "data.sampler": "uniform",
    "data.sampler_options": {},
    "eval.min_p": 0.0,
    "learner.optimizer": "adamw",
    "learner.replay_routing": False,
    "model.freeze_vision": True,
    "model.lora.part": "language",
    "model.max_pixels": None,
    "model.min_pixels": None,
    "model.quantization": None,
    "teacher": asdict(TeacherConfig()),
}


@dataclass(frozen=True)
class Composed:
    """A configuration and its sources."""

    config: Config
    overrides: tuple[str, ...]  # settings of the file and the command line, under their native names
    warnings: tuple[str, ...]
    tree: dict[str, Any]  # the whole configuration as plain data, for config.yaml
    env: dict[str, str]  # variables that the file sets; the caller exports them
    rejected: int = 0  # warnings that would be errors in a run


def compose(
    overrides: Sequence[str],
    *,
    algorithms: Algorithms,
    own_algorithm: Callable[[str], type] | None = None,
    config_name: str | None = None,
    config_path: Path | None = None,
    tolerant: bool = False,
) -> Composed:
    """`tolerant`: unsupported options are warnings, for checks that start no run. `own_algorithm` returns the settings
    class of an algorithm named file.py:Class."""
    recipe = read_recipe(config_name or "default", algorithms)
    layers = [_read_file(config_path)] if config_path is not None else []
    layers.append(read_overrides(overrides, layer=len(layers)))
    if own_algorithm is not None:
        named = {str(word.value) for layer in layers for word in layer if _names_algorithm(word, algorithms)}
        algorithms = {**algorithms, **{name: own_algorithm(name) for name in named if ":" in name}}
    resolved = resolve(layers, algorithms, recipe["algorithm"], tolerant=tolerant)
    _check_choices(resolved)

    tree = _tree(recipe, resolved)
    settings = schema_settings() | algorithm_settings(resolved.algorithm, resolved.algorithms)
    applied = resolved.native(settings)
    checker = Checker(settings, applied, resolved.parts())
    wrong = [text for key, override in applied.items() for text in _assign(tree, key, override, checker)]
    wrong += _derive(tree, resolved, applied, checker)
    _resolve_length(tree, applied)
    if folder := _output_dir_variable(resolved):
        wrong += _assign(tree, "logging.output_dir", folder, checker)
        applied["logging.output_dir"] = folder
    plain = _plain(tree)
    _check_references(plain, settings)
    if wrong := [*wrong, *checker.out_of_range(plain)]:
        raise WrongValues(wrong)
    config = _freeze(tree)
    remember_secrets(plain)
    if hidden := hidden_setting(plain):
        resolved.reject(f"{hidden}: a secret, which is not stored in a run's folder\n  give it again: {hidden}=...")
    warnings = dict.fromkeys([*resolved.warnings, *derive.remarks(resolved.parts()), *_unused(resolved, config)])
    return Composed(config, _as_overrides(applied), tuple(warnings), plain, resolved.env, resolved.rejected)


def fingerprint(config_tree: Mapping[str, Any]) -> str:
    """A hash of everything in a configuration that changes results."""
    tree = copy.deepcopy(dict(without_secrets(config_tree)))  # another API key does not change results
    for key, default in ADDED.items():
        section, name = _section(tree, key)
        if name in section and section[name] == default:
            del section[name]
    for key in NOT_IN_FINGERPRINT:
        section, name = _section(tree, key)
        section.pop(name, None)
    model = tree.get("model", {})
    if model.get("gradient_checkpointing", False) is None:  # automatic, which computes the same as false
        model["gradient_checkpointing"] = False
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _section(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The part of a configuration that holds a setting, and the setting's name there."""
    *path, name = key.split(".")
    for part in path:
        tree = tree.get(part, {})
    return tree, name


# -- Recipes -----------------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    files = importlib.resources.files(RECIPES).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_recipe(name: str, algorithms: Algorithms) -> Mapping[str, Any]:
    """A recipe on top of all defaults, as plain data. The algorithm section has only the settings that it changes."""
    name = name.removesuffix(".yaml")
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names())
    return _read_recipe(RECIPES, name, tuple(algorithms.items()))


@cache  # a sweep reads the same recipe for every run
def _read_recipe(package: str, name: str, algorithms: tuple[tuple[str, type], ...]) -> Mapping[str, Any]:
    try:
        with _hydra(package, dict(algorithms)):
            tree = hydra.compose(config_name=name, return_hydra_config=True)
            choice = tree.hydra.runtime.choices.algorithm
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        reason = "\n  ".join(str(error).strip().splitlines())
        raise InputError(f"the recipe {name} cannot be read\n  {reason}") from error
    plain = OmegaConf.to_container(OmegaConf.masked_copy(tree, [f.name for f in fields(Config)]))
    assert isinstance(plain, dict)
    defaults = algorithm_settings(choice, _variants(dict(algorithms)))
    section = plain["algorithm"].items()
    changed = {k: v for k, v in section if k in ("name", "loss") or v != defaults[f"algorithm.{k}"].default}
    return {str(key): value for key, value in plain.items()} | {"algorithm": changed}


def _variants(algorithms: Algorithms) -> Algorithms:
    """The choices of a recipe: `grpo`, or with another loss `grpo+sapo`."""
    others = ((f"{name}+{loss}", s) for name in algorithms for loss, s in losses_of(name, algorithms).items())
    return {**algorithms, **dict(others)}


def _named_in_recipes(package: str, choices: Algorithms) -> Algorithms:
    """The choices that some recipe names. Registering all of them with Hydra would be slow."""
    files = importlib.resources.files(package).iterdir()
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.name.endswith(".yaml"))
    return {name: schema for name, schema in choices.items() if name in text}


@dataclass(frozen=True)
class _Schema(Config):
    """The config of a recipe's `defaults: [schema, …]`. `_self_` comes first, so that the groups override it."""

    defaults: list[Any] = field(
        default_factory=lambda: [
            "_self_",
            {"algorithm": DEFAULT_ALGORITHM},
            *({group: next(iter(choices))} for group, choices in GROUPS.items()),
        ]
    )


@contextmanager
def _hydra(package: str, algorithms: Algorithms) -> Iterator[None]:
    """Hydra with our groups in its config store. Both are global and are restored afterwards, so that this works
    repeatedly, with other algorithms, and inside a Hydra application."""
    store, running = ConfigStore.instance(), GlobalHydra.instance().hydra
    before = store.repo
    store.repo = {key: value for key, value in before.items() if key == "hydra" or key.startswith("_")}
    GlobalHydra.instance().clear()
    try:
        store.store(name="schema", node=_typed(_Schema))
        algorithm_choices = {**algorithms, **_named_in_recipes(package, _variants(algorithms))}
        for group, choices in {"algorithm": algorithm_choices, **GROUPS}.items():
            for name, cls in choices.items():
                node = _typed(cls)
                if group in GROUPS:  # several choices may share a class
                    node.name = name
                store.store(group=group, name=name, node=node)
        with hydra.initialize_config_module(package, version_base="1.3"):
            yield
    finally:
        store.repo = before
        GlobalHydra.instance().hydra = running


# -- The structured config ---------------------------------------------------------------------------------------------


def _typed(cls: type) -> DictConfig:
    """The structured config of a dataclass, writable: OmegaConf makes it read-only for frozen classes."""
    tree = OmegaConf.structured(cls)
    assert isinstance(tree, DictConfig)
    _thaw(tree)
    return tree


def _thaw(tree: DictConfig) -> None:
    OmegaConf.set_readonly(tree, None)
    for key in tree:
        if OmegaConf.is_dict(tree[key]):
            _thaw(tree[key])


def _tree(recipe: Mapping[str, Any], resolved: Resolved) -> DictConfig:
    """The recipe's values, typed. Settings of its algorithm or loss are dropped if the user chose another one."""
    tree = _typed(Config)
    tree.algorithm = _typed(resolved.algorithms[resolved.algorithm])
    base = choice_of(recipe["algorithm"])
    same = base.algorithm == resolved.algorithm
    section = {key: value for key, value in recipe["algorithm"].items() if key not in ("name", "loss")}
    kept = {
        k: v for k, v in section.items() if same and k in tree.algorithm and not resolved.drops(f"algorithm.{k}", base)
    }
    if dropped := sorted(section.keys() - kept.keys()):
        new, old = (resolved.choice.loss, f"loss={base.loss}") if same else (resolved.algorithm, base.algorithm)
        key = "algorithm.loss" if same else "algorithm"
        resolved.warnings.append(f"{key}={new} replaces the recipe's {old} and its settings: {', '.join(dropped)}")
    merged = OmegaConf.merge(tree, dict(recipe) | {"algorithm": kept})
    assert isinstance(merged, DictConfig)
    return merged


def _derive(tree: DictConfig, resolved: Resolved, applied: dict[str, Override], checker: Checker) -> list[str]:
    """Set the values that are derived from foreign settings. Returns errors about their values."""
    wrong = []
    with _reference_errors():
        for rule in derive.rules():
            try:
                for derived in rule(checker.parts, tree):
                    if override := resolve_derived(resolved, derived):
                        wrong += _assign(tree, derived.key, override, checker)
                        applied[derived.key] = override
            except derive.NotACount as error:
                wrong.append(str(error))
    return wrong


def _resolve_length(tree: DictConfig, applied: Mapping[str, Override]) -> None:
    """A run's length is set in steps or in epochs. A later layer's value of one replaces the other."""

    def layer(key: str) -> int:
        override = applied.get(key)
        return -1 if override is None or override.value is None else override.layer

    steps, epochs = layer("loop.total_steps"), layer("loop.total_epochs")
    if steps > epochs:
        tree.loop.total_epochs = None
    elif epochs > steps:
        tree.loop.total_steps = None


def _assign(tree: DictConfig, key: str, override: Override, checker: Checker) -> list[str]:
    """Set a value in the tree. Returns an error if it has the wrong type; the tree is then unchanged."""
    setting = find(key, checker.settings)
    assert setting is not None
    value = override.value
    if setting.type.startswith("list") and isinstance(value, str):
        value = [value]  # logging.to=wandb
    if setting.type.startswith("int") and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e3
    try:
        if key != setting.key and OmegaConf.select(tree, setting.key) is None:
            OmegaConf.update(tree, setting.key, {}, merge=False)  # the first key of a dict that was null
        OmegaConf.update(tree, key, value, merge=True)
    except (OmegaConfBaseException, OverflowError):  # OverflowError: a whole number beyond all floats
        return [checker.wrong_type(key, override)]
    return []


@contextmanager
def _reference_errors() -> Iterator[None]:
    """Turns OmegaConf's errors about `${...}` into InputErrors. Interpolations are resolved when a value is read."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise InputError(str(error)) from None


def _plain(tree: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain data with every `${...}` resolved."""
    with _reference_errors():
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _freeze(tree: DictConfig) -> Config:
    with _reference_errors():
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def _check_references(plain: Mapping[str, Any], settings: Mapping[str, Setting]) -> None:
    """Check that a dict setting that is an interpolation resolves to a dict, which OmegaConf does not check."""
    for key, setting in settings.items():
        value = value_at(plain, key)
        if setting.free and value is not None and not isinstance(value, dict):
            raise InputError(f"{key} must be {setting.type}, got {value!r:.200}")


# -- The user's settings -----------------------------------------------------------------------------------------------


def _read_file(path: Path) -> list[Override]:
    return [Override(key, value, f"{path}, line {line}", layer=0) for key, value, line in read_yaml(path)]


def _names_algorithm(override: Override, algorithms: Algorithms) -> bool:
    target = translate(override.key, algorithms)
    return target is not None and target.key == "algorithm.name"


def _check_choices(resolved: Resolved) -> None:
    for group, choices in GROUPS.items():
        override = resolved.slots.get(f"{group}.name")
        if override is None or str(override.value) in choices or (group in OWN_CODE and ":" in str(override.value)):
            continue
        raise unknown(group, str(override.value), [*choices, *(["module:function"] if group in OWN_CODE else [])])


def _output_dir_variable(resolved: Resolved) -> Override | None:
    """logging.output_dir from the variable CKPT_DIR, unless a setting gives it."""
    folder = os.environ.get("CKPT_DIR") or resolved.env.get("CKPT_DIR")
    return Override("CKPT_DIR", folder) if folder and "logging.output_dir" not in resolved.slots else None


def _unused(resolved: Resolved, config: Config) -> Iterator[str]:
    if "BASE_MODEL" in resolved.env and "model.name" not in resolved.slots:
        yield "env.BASE_MODEL is not used by any setting: to train that model, set model.name to ${BASE_MODEL}"
    if resolved.env.get("N_GPUS", "1") != "1" and not resolved.slots.keys() & DEVICE_COUNTS:
        yield "env.N_GPUS is not used by any setting: to train on these GPUs, set trainer.n_gpus_per_node to ${N_GPUS}"
    port = resolved.slots.get("gateway.port")
    if port is not None and port.key == "agentflow.port" and config.agent.name != "gateway":
        agent = config.agent.name
        yield f"{port.label} has no effect with agent={agent}: only agent=gateway listens on a port"


def _as_overrides(applied: Mapping[str, Override]) -> tuple[str, ...]:
    groups = {f"{group}.name": group for group in ("algorithm", *GROUPS)}
    return tuple(f"{groups.get(key, key)}={literal(override.value)}" for key, override in applied.items())
