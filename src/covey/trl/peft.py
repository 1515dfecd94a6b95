"""peft's `LoraConfig` → model.lora. It is read by its fields, so that peft is only needed where it is used."""

from __future__ import annotations

from typing import Any

from covey.errors import InputError

# Fields that change what is learned, and the values that Covey's adapters have.
SAME = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "init_lora_weights": (True, None),
    "layers_to_transform": (None,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
}


def translate_adapter(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings of the section `model`, and remarks."""
    if config is None:
        return {}, []
    if not hasattr(config, "r") or not hasattr(config, "lora_alpha"):
        raise InputError(f"peft_config={type(config).__name__} is not supported\n  supported: peft.LoraConfig")
    for name, allowed in SAME.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise InputError(f"LoraConfig({name}={getattr(config, name)!r}) is not supported\n  leave it out")
    modules, remarks = config.target_modules, []
    if modules is None:
        remarks.append("LoraConfig without target_modules: every linear layer gets an adapter (all-linear)")
    if getattr(config, "lora_dropout", 0):
        remarks.append(f"LoraConfig(lora_dropout={config.lora_dropout}) has no effect: adapters learn without dropout")
    target = "all-linear" if modules is None else modules if isinstance(modules, str) else sorted(modules)
    return {"lora": {"rank": config.r, "alpha": config.lora_alpha, "target_modules": target}}, remarks
