"""All formats, and the choice of the one that a model was trained on, from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from covey.agents.formats.base import function_of
from covey.agents.formats.code import TOOLS, CodeFormat
from covey.agents.formats.hermes import HermesFormat
from covey.agents.formats.llama import LlamaFormat
from covey.agents.formats.mistral import MistralFormat
from covey.agents.formats.react import ReactFormat
from covey.errors import unknown
from covey.models.families import TOOL_CALLS
from covey.tool_calls import Format, Schemas

FORMATS: Mapping[str, Callable[[Schemas, bool], Format]] = {
    "hermes": lambda schemas, native: HermesFormat(native),
    "llama": lambda schemas, native: LlamaFormat(native),
    "mistral": lambda schemas, native: MistralFormat(native),
    "react": lambda schemas, native: ReactFormat(schemas),
    "code": lambda schemas, native: CodeFormat(_code_tool(schemas)),
}
NOT_JSON = ("<function=", "<arg_key>")  # inside <tool_call>: Qwen3-Coder, GLM
LLAMA = ("<|eom_id|>", "<|start_header_id|>ipython")  # Llama 3.2 has only the second
PROBE = "covey_probe_tool"


def _code_tool(schemas: Schemas) -> str:
    """The name of the tool that runs code."""
    names = [function_of(schema)["name"] for schema in schemas]
    return next((name for name in TOOLS if name in names), TOOLS[0])


def make_format(name: str, schemas: Schemas = (), *, native_tools: bool = True) -> Format:
    """A format by name. `native_tools`: the chat template shows tools in this format."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name](schemas, native_tools)


def choose_format(setting: str, tokenizer: Any, model_type: str, schemas: Schemas = ()) -> Format:
    """The format of agent.format: `auto`, or a name. The template shows the tools only if it uses the same format."""
    template = template_of(tokenizer)
    name = detect(template, model_type) if setting == "auto" else setting
    return make_format(name, schemas, native_tools=_template_format(template) == name and shows_tools(tokenizer))


def detect(chat_template: str | None, model_type: str) -> str:
    """The format of a chat template; hermes if it has none."""
    if chat_template is None:
        return TOOL_CALLS.get(model_type, "hermes")
    return _template_format(chat_template) or "hermes"


def _template_format(template: str | None) -> str | None:
    """The format in which a template writes calls; None if it is unknown."""
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
    """The chat template of a tokenizer. If there are several, the one for tools."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template


def shows_tools(tokenizer: Any) -> bool:
    """Whether the template shows tools: a rendering with a tool must contain the tool's name."""
    function = {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    }
    messages = [{"role": "user", "content": "?"}]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tools=[{"type": "function", "function": function}], add_generation_prompt=True, tokenize=False
        )
    except Exception:  # a template that does not accept tools may raise anything
        return False
    return PROBE in str(rendered)
