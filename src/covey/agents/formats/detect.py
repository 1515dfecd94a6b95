"""Which format a model was taught, from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from covey.agents.formats.base import Format, Schemas, function_of
from covey.agents.formats.code import TOOLS, CodeFormat
from covey.agents.formats.hermes import HermesFormat
from covey.agents.formats.llama import LlamaFormat
from covey.agents.formats.mistral import MistralFormat
from covey.agents.formats.react import ReactFormat
from covey.errors import unknown
from covey.models.families import TOOL_CALLS

FORMATS: Mapping[str, Callable[[Schemas, bool], Format]] = {
    "hermes": lambda schemas, native: HermesFormat(native),
    "llama": lambda schemas, native: LlamaFormat(native),
    "mistral": lambda schemas, native: MistralFormat(native),
    "react": lambda schemas, native: ReactFormat(schemas),
    "code": lambda schemas, native: CodeFormat(_executor(schemas)),
}
NOT_JSON = ("<function=", "<arg_key>")  # inside <tool_call>: Qwen3-Coder, GLM
LLAMA = ("<|eom_id|>", "<|start_header_id|>ipython")  # Llama 3.2 has only the second
PROBE = "covey_probe_tool"


def _executor(schemas: Schemas) -> str:
    """What the tool is called that runs code."""
    names = [function_of(schema)["name"] for schema in schemas]
    return next((name for name in TOOLS if name in names), TOOLS[0])


def make_format(name: str, schemas: Schemas = (), *, native_tools: bool = True) -> Format:
    """A format by its name. `native_tools`: the template shows tools in that format."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name](schemas, native_tools)


def choose_format(setting: str, tokenizer: Any, model_type: str, schemas: Schemas = ()) -> Format:
    """agent.format: auto, or a name. Tools are left to the template only if it shows them in this very format."""
    template = template_of(tokenizer)
    name = detect(template, model_type) if setting == "auto" else setting
    return make_format(name, schemas, native_tools=_written(template) == name and shows_tools(tokenizer))


def detect(chat_template: str | None, model_type: str) -> str:
    """The name of the format that a template writes calls in; hermes where it writes none."""
    if chat_template is None:
        return TOOL_CALLS.get(model_type, "hermes")
    return _written(chat_template) or "hermes"


def _written(template: str | None) -> str | None:
    """The format of a template's calls; None if it is none of ours."""
    if template is None:
        return None
    if "<tool_call>" in template:
        return None if any(mark in template for mark in NOT_JSON) else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ('"parameters"' in template and any(mark in template for mark in LLAMA)):
        return "llama"
    return None


def template_of(tokenizer: Any) -> str | None:
    """A tokenizer's template as it is used with tools; some have several."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        found = found.get("tool_use") or found.get("default")
    return found


def shows_tools(tokenizer: Any) -> bool:
    """Whether the template shows tools at all: it is given one and its name looked for."""
    function = {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    }
    talk = [{"role": "user", "content": "?"}]
    try:
        shown = tokenizer.apply_chat_template(
            talk, tools=[{"type": "function", "function": function}], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # a template may raise anything at tools it does not want
        return False
    return PROBE in str(shown)
