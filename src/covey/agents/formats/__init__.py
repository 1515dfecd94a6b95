"""Formats: how a model writes tool calls and how their results are shown to it. docs/formats.md"""

from covey.agents.formats.base import Format, Parsed
from covey.agents.formats.code import CodeFormat
from covey.agents.formats.detect import FORMATS, choose_format, detect, make_format, shows_tools
from covey.agents.formats.hermes import HermesFormat
from covey.agents.formats.llama import LlamaFormat
from covey.agents.formats.mistral import MistralFormat
from covey.agents.formats.react import ReactFormat

__all__ = [
    "FORMATS",
    "CodeFormat",
    "Format",
    "HermesFormat",
    "LlamaFormat",
    "MistralFormat",
    "Parsed",
    "ReactFormat",
    "choose_format",
    "detect",
    "make_format",
    "shows_tools",
]
