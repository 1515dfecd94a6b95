"""Chat templates by name, for models without one or with one that does not support tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.errors import InputError, unknown

NAMED = {"qwen2.5": "qwen2.5.jinja", "qwen2.5-vl": "qwen2.5.jinja", "none": "none.jinja"}
MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>")


def use_template(tokenizer: Any, template: str | None) -> None:
    """Replace the model's chat template by a named one or by that of a file. A model without any raises."""
    if template is not None:
        tokenizer.chat_template = _named(tokenizer, template) if template in NAMED else _read(template)
    if tokenizer.chat_template is None:
        raise InputError(
            "this model has no chat template\n  give one: agent.template=qwen2.5, or a Jinja file\n"
            "  or use an instruction-tuned model"
        )


def _named(tokenizer: Any, name: str) -> str:
    """The text of a named template. A model whose own template has the same markers keeps its own. `none` adds only the
    BOS token, if the tokenizer begins every text with it."""
    if name == "none":
        ids = tokenizer("a")["input_ids"]
        begins = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
        return ("{{ bos_token }}" if begins else "") + (Path(__file__).parent / NAMED[name]).read_text().strip()
    own = str(tokenizer.chat_template or "")
    if all(mark in own for mark in MARKS):
        return own
    missing = [mark for mark in MARKS[:2] if mark not in tokenizer.get_vocab()]
    if missing:
        raise InputError(
            f"agent.template={name} marks turns with {missing[0]}, which is not a token of this model\n"
            "  leave it out to use the model's own template"
        )
    return (Path(__file__).parent / NAMED[name]).read_text()


def _read(template: str) -> str:
    if Path(template).is_file():
        return Path(template).read_text()
    if "/" not in template and not template.endswith((".jinja", ".jinja2", ".j2", ".txt")):
        raise unknown("template", template, NAMED)
    raise InputError(f"agent.template={template}: no such file\n  leave it out to use the model's own template")
