"""What goes wrong with a tool call, and whose fault it is.

What the model did wrong is an observation: it reads the text and may do better. What the infrastructure did wrong ends
the episode as a failure, which is neither learned from nor compared with.
"""

from __future__ import annotations

from typing import Literal

from covey.errors import NamedFailure
from covey.redact import hide
from covey.types import Failure

Kind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "deadline"]


class ToolMistake(Exception):
    """The model's mistake. `text` is what it is shown; `detail`, where the tool raised, is for the user alone."""

    def __init__(self, kind: Kind, text: str, detail: str = "") -> None:
        super().__init__(kind, text, detail)  # all of them: an exception is pickled by its arguments
        self.kind = kind
        self.text = text
        self.detail = detail

    def __str__(self) -> str:
        return self.text


class ToolFailure(NamedFailure):
    """The infrastructure's fault. `cause` is short and countable: tool_timeout, tool_crash, tool_result, sandbox,
    search, or a word of a user's own tool."""

    @property
    def failure(self) -> Failure:
        return Failure(self.cause, hide(self.message))
