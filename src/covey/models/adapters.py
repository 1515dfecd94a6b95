"""LoRA adapters (peft): creating them, loading them, and checking adapter folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from covey.config.schema import ModelConfig
from covey.errors import InputError
from covey.imports import require
from covey.models.builtin import BUILTIN
from covey.models.families import auto_model, vision_family
from covey.models.folder import AGAIN, built_empty, check_file, first_few, reason
from covey.models.hub import ADAPTER, check_adapter, no_pickles

CONFIG = "adapter_config.json"


def require_peft() -> Any:
    return require("peft", "lora", "model.lora needs peft")


def adapter_base(folder: Path) -> str:
    """The model that an adapter was trained on, as a name for `locate`."""
    file = folder / CONFIG
    try:
        about = json.loads(file.read_bytes())
        base, revision = about["base_model_name_or_path"], about.get("revision")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{file} does not name its base model ({reason(error)})\n{AGAIN}") from error
    if not isinstance(base, str) or not base:
        raise InputError(f"{file} does not name its base model\n{AGAIN}")
    return f"{base}@{revision}" if revision and not Path(base).expanduser().is_dir() and base not in BUILTIN else base


def check_adapter_fits(folder: Path, model_config: Any, *, trusted: bool = False) -> None:
    """Before weights are read, check that the adapter has the tensors that its configuration needs on this model. peft
    would leave missing ones at their initial values."""
    from safetensors import safe_open

    check_adapter(folder)
    check_file(folder / ADAPTER)
    peft = require_peft()
    model = built_empty(auto_model(model_config), str(folder), model_config, trusted=trusted)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if config.peft_type != peft.PeftType.LORA:
            return
        config.init_lora_weights = False  # some initialisations need the model's weights, which are not loaded
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            expected = peft.get_peft_model_state_dict(peft.get_peft_model(model, config), save_embedding_layers=False)
    except Exception as error:  # a wrong value may raise anything
        raise InputError(
            f"{folder / CONFIG}: no adapter for a {model_config.model_type} model ({reason(error)})\n"
            "  fix: copy or download the adapter again, with the model it was trained on"
        ) from error
    with safe_open(folder / ADAPTER, framework="pt") as file:
        saved = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    problems = {
        "missing from its weights": [name for name in expected if name not in saved],
        "of another shape in its weights": [
            f"{name} {saved[name]}, not {list(weight.shape)}"
            for name, weight in expected.items()
            if name in saved and saved[name] != list(weight.shape)
        ],
        "in its weights, but not in the adapter": [name for name in saved if "lora_" in name and name not in expected],
    }
    if any(problems.values()):
        lines = [f"  {what}: {first_few(sorted(names))}" for what, names in problems.items() if names]
        fix = "  fix: copy or download the adapter again, with the model it was trained on"
        raise InputError("\n".join([f"{folder}: the adapter does not fit its model and {CONFIG}", *lines, fix]))


def with_new_adapter(model: Any, config: ModelConfig, seed: int, revision: str | None = None) -> Any:
    peft = require_peft()
    torch.manual_seed(seed)  # the adapter's A matrices are random
    lora = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        exclude_modules=_without_adapter(model, config.lora.part),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        revision=revision,  # of the base model, which is recorded with the adapter
    )
    return peft.get_peft_model(model, lora)


def _without_adapter(model: Any, part: str) -> str | None:
    """A pattern of the modules without an adapter: the other part of a vision-language model, and routers that peft
    takes for linear layers, though they return the chosen experts (Phi-3.5-MoE)."""
    linear = ((name, type(module).__name__) for name, module in model.named_modules() if hasattr(module, "in_features"))
    patterns = [re.escape(name) for name, kind in linear if kind.endswith("Router")]
    family = vision_family(model.config)
    if family is not None and part != "both":
        names = family.tower if part == "language" else (family.language,)
        patterns.append(rf"(.*\.)?({'|'.join(names)})\..*")
    return "|".join(patterns) or None


def with_saved_adapter(model: Any, folder: Path) -> Any:
    with no_pickles(str(folder)):
        return require_peft().PeftModel.from_pretrained(model, folder, is_trainable=True)
