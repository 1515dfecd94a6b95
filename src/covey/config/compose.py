"""From a recipe, a file and a command line to one frozen `Config`.

    recipe  →  --config PATH  →  command line          the later wins

Hydra composes the recipe; `settle` translates and weighs what the user wrote; OmegaConf's typed tree checks every value
against the dataclasses, and becomes them.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.resources
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
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
from covey.config.read import Given, literal, read_overrides, read_yaml
from covey.config.resolve import Settled, choice_of, settle, settle_derived
from covey.config.schema import AgentConfig, ClusterConfig, Config, ModeConfig, RolloutConfig
from covey.config.settings import Algorithms, Setting, algorithm_settings, find, losses_of, schema_settings
from covey.config.validate import Checker, WrongValues
from covey.errors import InputError, unknown
from covey.redact import learn, missing, without_secrets

DEFAULT_ALGORITHM = "gvpo"
RECIPES = "covey.recipes"

# What can be chosen in each group; the first is the default. `algorithm` is the group whose choices are passed in.
GROUPS: Mapping[str, Mapping[str, type]] = {
    "agent": dict.fromkeys(("chat", "hf", "react", "code", "flow", "gateway", "verifiers"), AgentConfig),
    "rollout": {"embedded": RolloutConfig, "vllm": RolloutConfig, "auto": RolloutConfig},
    "cluster": {"local": ClusterConfig, "ray": ClusterConfig},
    "mode": {"sync": ModeConfig, "async": ModeConfig},
}
OWN_CODE = ("agent",)  # groups that also take module:function or file.py:function

# What may differ between a run and its continuation.
NOT_IN_FINGERPRINT = (
    *("resume", "gateway.port", "gateway.max_programs", "loop.max_minutes"),
    *("logging.to", "logging.output_dir", "logging.verbosity", "logging.tags", "logging.notes"),
    *(f"cluster.{field.name}" for field in fields(ClusterConfig)),  # on other machines it is the same run
    "learner.tensor_parallel",
)


@dataclass(frozen=True)
class Composed:
    """A configuration, and how it came about."""

    config: Config
    overrides: tuple[str, ...]  # what the file and the command line changed, in native words
    warnings: tuple[str, ...]
    tree: dict[str, Any]  # the whole configuration as plain data, for config.yaml
    env: dict[str, str]  # variables that the file sets; the caller exports them
    refused: int = 0  # of the warnings, those for which a run would be refused


def compose(
    overrides: Sequence[str],
    *,
    algorithms: Algorithms,
    own_algorithm: Callable[[str], type] | None = None,
    config_name: str | None = None,
    config_path: Path | None = None,
    tolerant: bool = False,
) -> Composed:
    """`tolerant`: what a run would refuse because it is not available becomes a warning, for checks that start none.
    `own_algorithm`: the settings of an algorithm that is named file.py:Class."""
    recipe = read_recipe(config_name or "default", algorithms)
    layers = [_read_file(config_path)] if config_path is not None else []
    layers.append(read_overrides(overrides, layer=len(layers)))
    if own_algorithm is not None:
        named = (str(given.value) for layer in layers for given in layer if _names_algorithm(given, algorithms))
        algorithms = {**algorithms, **{name: own_algorithm(name) for name in named if ":" in name}}
    settled = settle(layers, algorithms, recipe["algorithm"], tolerant=tolerant)
    _check_choices(settled)

    tree = _tree(recipe, settled)
    settings = schema_settings() | algorithm_settings(settled.algorithm, settled.algorithms)
    applied = settled.native(settings)
    checker = Checker(settings, applied, settled.parts())
    wrong = [text for key, given in applied.items() for text in _assign(tree, key, given, checker)]
    wrong += _derive(tree, settled, applied, checker)
    _choose_length(tree, applied)
    if place := _place_of_runs(settled):
        wrong += _assign(tree, "logging.output_dir", place, checker)
        applied["logging.output_dir"] = place
    plain = _plain(tree)
    _check_references(plain, settings)
    if wrong := [*wrong, *checker.out_of_range(plain)]:
        raise WrongValues(wrong)
    config = _freeze(tree)
    learn(plain)
    if hidden := missing(plain):
        settled.refuse(f"{hidden}: a secret, which is not kept in a run's folder\n  give it again: {hidden}=...")
    warnings = dict.fromkeys([*settled.warnings, *derive.remarks(settled.parts()), *_unused(settled, config)])
    return Composed(config, _as_overrides(applied), tuple(warnings), plain, settled.env, settled.refused)


def fingerprint(config_tree: Mapping[str, Any]) -> str:
    """The same for two configurations exactly if they ask for the same result."""
    tree = copy.deepcopy(dict(without_secrets(config_tree)))  # with another key it is the same run
    for key in NOT_IN_FINGERPRINT:
        section, _, name = key.rpartition(".")
        (tree.get(section, {}) if section else tree).pop(name, None)
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


# --- recipes -----------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    files = importlib.resources.files(RECIPES).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_recipe(name: str, algorithms: Algorithms) -> Mapping[str, Any]:
    """A recipe on top of all defaults, as plain data; of its algorithm's settings, only those that it changes."""
    name = name.removesuffix(".yaml")
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names())
    return _read_recipe(RECIPES, name, tuple(algorithms.items()))


@cache  # part of the package, so it does not change, and a sweep reads it for every run
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
    usual = algorithm_settings(choice, _variants(dict(algorithms)))
    section = plain["algorithm"].items()
    sets = {k: v for k, v in section if k in ("name", "loss") or v != usual[f"algorithm.{k}"].default}
    return {str(key): value for key, value in plain.items()} | {"algorithm": sets}


def _variants(algorithms: Algorithms) -> Algorithms:
    """What a recipe can choose: `grpo`, and with another loss `grpo+sapo`."""
    others = ((f"{name}+{loss}", s) for name in algorithms for loss, s in losses_of(name, algorithms).items())
    return {**algorithms, **dict(others)}


def _named(package: str, choices: Algorithms) -> Algorithms:
    """Those of many choices that some recipe names. Giving Hydra all of them would take a noticeable time."""
    files = importlib.resources.files(package).iterdir()
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.name.endswith(".yaml"))
    return {name: schema for name, schema in choices.items() if name in text}


@dataclass(frozen=True)
class _Schema(Config):
    """What a recipe's `defaults: [schema, …]` stands for. `_self_` comes first: the groups fill their sections in."""

    defaults: list[Any] = field(
        default_factory=lambda: [
            "_self_",
            {"algorithm": DEFAULT_ALGORITHM},
            *({group: next(iter(choices))} for group, choices in GROUPS.items()),
        ]
    )


@contextmanager
def _hydra(package: str, algorithms: Algorithms) -> Iterator[None]:
    """Hydra with our groups in its store. Both are global: whatever was there before is there again afterwards, so that
    this works many times in a process, with other algorithms, and inside somebody's Hydra application."""
    store, running = ConfigStore.instance(), GlobalHydra.instance().hydra
    before = store.repo
    store.repo = {key: value for key, value in before.items() if key == "hydra" or key.startswith("_")}
    GlobalHydra.instance().clear()
    try:
        store.store(name="schema", node=_typed(_Schema))
        known = {**algorithms, **_named(package, _variants(algorithms))}
        for group, choices in {"algorithm": known, **GROUPS}.items():
            for name, cls in choices.items():
                node = _typed(cls)
                if group in GROUPS:  # a class may stand for several choices
                    node.name = name
                store.store(group=group, name=name, node=node)
        with hydra.initialize_config_module(package, version_base="1.3"):
            yield
    finally:
        store.repo = before
        GlobalHydra.instance().hydra = running


# --- the typed tree ----------------------------------------------------------------------------------------------


def _typed(cls: type) -> DictConfig:
    """A dataclass's defaults as a tree that checks types. OmegaConf takes frozen for read-only, and ours is still being
    filled in."""
    tree = OmegaConf.structured(cls)
    assert isinstance(tree, DictConfig)
    _thaw(tree)
    return tree


def _thaw(tree: DictConfig) -> None:
    OmegaConf.set_readonly(tree, None)
    for key in tree:
        if OmegaConf.is_dict(tree[key]):
            _thaw(tree[key])


def _tree(recipe: Mapping[str, Any], settled: Settled) -> DictConfig:
    """The recipe's values, typed. Its algorithm's settings stay behind if the user chose another algorithm, and those
    of its loss if the user chose another loss."""
    tree = _typed(Config)
    tree.algorithm = _typed(settled.algorithms[settled.algorithm])
    theirs = choice_of(recipe["algorithm"])
    same = theirs.algorithm == settled.algorithm
    sets = {key: value for key, value in recipe["algorithm"].items() if key not in ("name", "loss")}
    kept = {
        k: v for k, v in sets.items() if same and k in tree.algorithm and not settled.replaced(f"algorithm.{k}", theirs)
    }
    if left := sorted(sets.keys() - kept.keys()):
        new, old = (settled.choice.loss, f"loss={theirs.loss}") if same else (settled.algorithm, theirs.algorithm)
        key = "algorithm.loss" if same else "algorithm"
        settled.warnings.append(f"{key}={new} replaces the recipe's {old} and what it sets: {', '.join(left)}")
    merged = OmegaConf.merge(tree, dict(recipe) | {"algorithm": kept})
    assert isinstance(merged, DictConfig)
    return merged


def _derive(tree: DictConfig, settled: Settled, applied: dict[str, Given], checker: Checker) -> list[str]:
    """Fill in what foreign settings make together. Returns errors about their values."""
    wrong = []
    with _references_in_words():
        for rule in derive.rules():
            try:
                for derived in rule(checker.parts, tree):
                    if given := settle_derived(settled, derived):
                        wrong += _assign(tree, derived.key, given, checker)
                        applied[derived.key] = given
            except derive.NotACount as error:
                wrong.append(str(error))
    return wrong


def _choose_length(tree: DictConfig, applied: Mapping[str, Given]) -> None:
    """A run's length is given in steps or in epochs. One of them replaces the other of an earlier layer."""
    layers = {
        key: given.layer if (given := applied.get(f"loop.{key}")) is not None and given.value is not None else -1
        for key in ("total_steps", "total_epochs")
    }
    if layers["total_steps"] > layers["total_epochs"]:
        tree.loop.total_epochs = None
    elif layers["total_epochs"] > layers["total_steps"]:
        tree.loop.total_steps = None


def _assign(tree: DictConfig, key: str, given: Given, checker: Checker) -> list[str]:
    """Set a value in the tree. Returns the error about a value of the wrong type, which leaves the tree as it is."""
    setting = find(key, checker.settings)
    assert setting is not None
    value = given.value
    if setting.type.startswith("list") and isinstance(value, str):
        value = [value]  # logging.to=wandb
    if setting.type.startswith("int") and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e3
    try:
        if key != setting.key and OmegaConf.select(tree, setting.key) is None:
            OmegaConf.update(tree, setting.key, {}, merge=False)  # the first key of a dict that was null
        OmegaConf.update(tree, key, value, merge=True)
    except (OmegaConfBaseException, OverflowError):  # OverflowError: a whole number beyond all floats
        return [checker.wrong_type(key, given)]
    return []


@contextmanager
def _references_in_words() -> Iterator[None]:
    """`${...}` in a value is followed when the value is read: it may lead nowhere, or to what does not fit."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise InputError(str(error)) from None


def _plain(tree: DictConfig) -> dict[str, Any]:
    """The whole configuration as plain data, every `${...}` followed."""
    with _references_in_words():
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _freeze(tree: DictConfig) -> Config:
    with _references_in_words():
        config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def _check_references(plain: Mapping[str, Any], settings: Mapping[str, Setting]) -> None:
    """Where a table refers to something else, omegaconf takes whatever that is."""
    for key, setting in settings.items():
        found: Any = plain
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if setting.free and found is not None and not isinstance(found, dict):
            raise InputError(f"{key} must be {setting.type}, got {found!r:.200}")


# --- the user's words --------------------------------------------------------------------------------------------


def _read_file(path: Path) -> list[Given]:
    return [Given(key, value, f"{path}, line {line}", layer=0) for key, value, line in read_yaml(path)]


def _names_algorithm(given: Given, algorithms: Algorithms) -> bool:
    target = translate(given.key, algorithms)
    return target is not None and target.key == "algorithm.name"


def _check_choices(settled: Settled) -> None:
    for group, choices in GROUPS.items():
        given = settled.slots.get(f"{group}.name")
        if given is None or str(given.value) in choices or (group in OWN_CODE and ":" in str(given.value)):
            continue
        raise unknown(group, str(given.value), [*choices, *(["module:function"] if group in OWN_CODE else [])])


def _place_of_runs(settled: Settled) -> Given | None:
    """The variable CKPT_DIR says where runs go, unless a setting does."""
    folder = os.environ.get("CKPT_DIR") or settled.env.get("CKPT_DIR")
    return Given("CKPT_DIR", folder) if folder and "logging.output_dir" not in settled.slots else None


def _unused(settled: Settled, config: Config) -> Iterator[str]:
    if "BASE_MODEL" in settled.env and "model.name" not in settled.slots:
        yield "env.BASE_MODEL is a variable that no setting uses: to train it, set model.name to ${BASE_MODEL}"
    port = settled.slots.get("gateway.port")
    if port is not None and port.key == "agentflow.port" and config.agent.name != "gateway":
        agent = config.agent.name
        yield f"{port.place}{port.key} has no effect with agent={agent}: only agent=gateway listens on a port"


def _as_overrides(applied: Mapping[str, Given]) -> tuple[str, ...]:
    groups = {f"{group}.name": group for group in ("algorithm", *GROUPS)}
    return tuple(f"{groups.get(key, key)}={literal(given.value)}" for key, given in applied.items())
