"""The table of docs/models.md: which model families are compared, and what each supports.

PYTHONPATH=src python tools/models_table.py    rewrites the table between the marks on the page
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
HEADER = ("model type", "sampling on a CPU", "sampling on a GPU", "LoRA", "sharding", "tool calls without a template")


def rows() -> list[tuple[str, ...]]:
    from transformers import AutoConfig

    from covey.errors import InputError
    from covey.learner.forward import check_layers
    from covey.learner.parallel import check_tensor_parallel
    from covey.models.families import FAMILIES

    found = []
    for family in FAMILIES:
        if not family.compared:
            continue
        for name in family.model_types:
            config = AutoConfig.for_model(name)
            check_layers(config)
            try:
                check_tensor_parallel(config, 1)
                sharding = "fsdp, tensor parallel"
            except InputError:
                sharding = "fsdp"
            lora = LORA[name] if family.experts else "all linear layers"
            decoding = "fused layers" if family.fused else "plain layers"
            found.append(
                (f"`{name}`{'*' * bool(family.router)}", "yes", decoding, lora, sharding, family.tool_calls or "hermes")
            )
    return found


# What peft adapts in a mixture of experts with target_modules=all-linear (tests/models/test_families.py).
LORA = dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "glm4_moe"), "attention, router, experts")
LORA |= {"qwen2_moe": "attention, shared experts", "granitemoe": "attention"}


def table() -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(text: str) -> str:
    begin, end = "<!-- families: begin -->", "<!-- families: end -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{table()}\n\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
