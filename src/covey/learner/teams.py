"""Tensor parallelism: the ranks of a team share the matrices of every layer, as transformers' plan for the model says.

    colwise   q, k, v, gate, up: a rank has some of the outputs, so some of the heads
    rowwise   o, down: a rank has some of the inputs; what they make of them is added up over the team

Between layers every rank of a team has the same activations, bit for bit. Embedding, norms and output matrix are whole
on every member. A norm inside of attention (of queries and keys) sees only a member's heads: its gradient is a part.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from covey.errors import InputError
from covey.learner.forward import causal_lm
from covey.learner.ranks import Ranks

COLWISE, ROWWISE, PART_OF_GRADIENT = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_teams(config: Any, team: int) -> None:
    """Whether a model can be split so, before its weights are loaded. `config` is transformers'."""
    text = config.get_text_config(decoder=True)
    plan = layer_plan(config)
    if not plan or (other := sorted(set(plan.values()) - {COLWISE, ROWWISE, PART_OF_GRADIENT})):
        why = f"its plan has {', '.join(other)}" if plan else "transformers has no plan for it"
        raise InputError(
            f"learner.tensor_parallel={team}: {config.model_type} models cannot be split, {why}\n"
            "  leave it out: learner.parallel=fsdp shares any model out"
        )
    sizes = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes["intermediate_size"] = getattr(text, "intermediate_size", None)
    for name, size in sizes.items():
        if size is not None and size % team:
            raise InputError(
                f"learner.tensor_parallel={team} does not divide the model's {name}, {size}\n"
                f"  use a number that divides {', '.join(f'{n} ({s})' for n, s in sizes.items() if s is not None)}"
            )


def layer_plan(config: Any) -> dict[str, str]:
    """How transformers would split the layers' modules: {"layers.*.mlp.up_proj": "colwise", ...}."""
    plan = getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}


def split_matrices(lm: Any, ranks: Ranks) -> None:
    """In place. Weights may be in CPU memory, where they stay."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, plan = ranks.mesh["members"], layer_plan(lm.config)
    blocks = {pattern.rpartition(".")[0] for pattern in plan}  # layers.*.self_attn, layers.*.mlp
    for name, module in lm.base_model.named_modules():
        style = style_of(name, plan)
        inside = any(fnmatchcase(name, f"{block}.*") for block in blocks)
        if style is None and inside and list(module.parameters(recurse=False)):
            raise InputError(  # each member would have a part of its gradient, and nobody would add them up
                f"learner.tensor_parallel: {name} has weights that the plan for {lm.config.model_type} models leaves "
                "out\n  leave it out: learner.parallel=fsdp shares any model out"
            )
        if style in (COLWISE, ROWWISE):
            assert isinstance(module, nn.Linear), f"{name} is no matrix"
            parallelize_module(module, mesh, ColwiseParallel() if style == COLWISE else RowwiseParallel())


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """Of a module of the backbone. A star in a pattern stands for a layer's number."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def parts_of_gradients(model: Any) -> set[str]:
    """The weights, by their names in `model`, whose gradient on a rank is a part of the team's."""
    lm = causal_lm(model)
    plan, before = layer_plan(lm.config), f"{lm.base_model_prefix}."
    modules = {name: name.removeprefix(before).rpartition(".")[0] for name, _ in model.named_parameters()}
    return {name for name, module in modules.items() if style_of(module, plan) == PART_OF_GRADIENT}
