"""What a client is told when it does not get what it asked for, in OpenAI's form."""

from __future__ import annotations

from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class Refused(Exception):
    """A request that is answered with an error. `code` is for programs, the text for people."""

    def __init__(self, status: int, text: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, text: str) -> Refused:
    return Refused(400, f"{param}: {text}", param=param)
