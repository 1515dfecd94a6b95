"""The gateway's endpoints, by an OpenAPI document of them: bad input is refused in OpenAI's form, never a 5xx.

Requests are drawn by schemathesis, those that fit the document and those that do not, and by hand where a document
cannot say what is wrong: broken JSON, deep nesting, half characters, huge numbers, other people's keys.
"""

from __future__ import annotations

import atexit
import json
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

from hypothesis import strategies as st  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.faults.fuzzing import Target, json_values, scalars, suite  # noqa: E402
from tests.gateway.running_gateway import RunningGateway, ScriptedEngine, serve_engine  # noqa: E402

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1, "maxLength": 2000},
                "type": {"type": "string"},
            },
        }
    },
}
CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": CALL, "maxItems": 2},
        "tool_call_id": {"type": "string"},
        "name": {"type": "string"},
    },
}
TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
        },
    },
}
CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 4},
        "tools": {"type": "array", "items": TOOL, "maxItems": 2},
        "tool_choice": {"enum": ["auto", "none"]},
        "n": {"type": "integer", "minimum": 1, "maximum": 4},
        "stop": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 3},
        "max_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_p": {"type": "number", "minimum": 0.000001, "maximum": 1},
        "logprobs": {"type": "boolean"},
        "stream": {"type": "boolean"},
    },
}
TASK = {"type": "object", "properties": {"id": {"type": "string"}, "messages": {"type": "array", "items": MESSAGE}}}


def _operation(answers: dict[str, Any], body: dict[str, Any] | None = None, ident: bool = False) -> dict[str, Any]:
    refusals = {
        str(status): {"description": "refused", "content": {"application/json": {"schema": ERROR}}}
        for status in (400, 401, 403, 404, 409, 410, 413)
    }
    found: dict[str, Any] = {
        "responses": {
            **{
                s: {"description": "done", "content": {kind: {"schema": schema}} if kind else {}}
                for s, (kind, schema) in answers.items()
            },
            **refusals,
        }
    }
    if body is not None:
        found["requestBody"] = {"content": {"application/json": {"schema": body}}}
    if ident:
        found["parameters"] = [
            {"name": "ident", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return found


OBJECT = {"type": "object"}
EITHER = {"200": ("application/json", OBJECT)}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "the gateway", "version": "1"},
    "paths": {
        "/v1/models": {"get": _operation(EITHER)},
        "/v1/chat/completions": {"post": _operation({"200": ("*/*", {})}, CHAT)},
        "/episodes": {
            "post": _operation(
                {"201": ("application/json", OBJECT)}, {"type": "object", "properties": {"task": TASK, "metadata": {}}}
            )
        },
        "/episodes/{ident}": {"get": _operation(EITHER, ident=True)},
        "/episodes/{ident}/reward": {
            "post": _operation(
                EITHER,
                {
                    "type": "object",
                    "properties": {
                        "reward": {"type": "number"},
                        "rewards": {"type": "object", "additionalProperties": {"type": "number"}},
                    },
                },
                ident=True,
            )
        },
        "/episodes/{ident}/finish": {"post": _operation(EITHER, ident=True)},
    },
}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@cache
def gateway() -> RunningGateway:
    """One server for all requests of this file; its engine says the same to everybody."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(serve_engine(ScriptedEngine(lambda text, sampling: "a reply")))


def _operations() -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    return {f"{op.ok().method.upper()} {op.ok().path}": op.ok() for op in schema.get_all_operations()}


def conforms(case: Any) -> None:
    place = gateway()
    headers = {"authorization": f"Bearer {place.registry.token}:fuzz"}
    if case.method.upper() == "POST" and case.path == "/episodes":
        headers["authorization"] = f"Bearer {place.registry.token}"
    case.call_and_validate(base_url=place.url, headers=headers, checks=CHECKS, timeout=60)


def _cases(operation: Any) -> Any:
    modes = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]
    return st.one_of(*modes)


# -- what no document says -------------------------------------------------------------------------------------------

WORDS = [
    "messages",
    "role",
    "content",
    "tools",
    "function",
    "name",
    "arguments",
    "tool_calls",
    "n",
    "stop",
    "max_tokens",
]
WORDS += ["temperature", "top_p", "stream", "logprobs", "task", "id", "answer", "metadata", "reward", "rewards", "wait"]
WORDS += ["parameters", "properties", "required", "enum", "type", "tool_choice", "response_format", "stream_options"]
values = json_values(WORDS, most=16)
sound = {"messages": [{"role": "user", "content": "?"}]}
bodies = st.one_of(
    values,
    st.dictionaries(st.sampled_from(WORDS), values, max_size=5),
    st.dictionaries(st.sampled_from(WORDS), values | scalars, max_size=2).map(lambda more: sound | more),
    st.dictionaries(st.sampled_from(["content", "tool_calls", "name"]), values, max_size=2).map(
        lambda more: {"messages": [{"role": "assistant", "content": ""} | more, sound["messages"][0]]}
    ),
    values.map(lambda v: sound | {"tools": [{"type": "function", "function": {"name": "f", "parameters": v}}]}),
    st.tuples(st.sampled_from(["reward", "a"]), scalars).map(lambda r: {"rewards": {r[0]: r[1]}}),
)
raws = st.one_of(
    bodies.map(lambda body: json.dumps(body).encode()),
    st.binary(max_size=60),
    st.sampled_from(
        [
            *(b"[" * 50_000, b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"n": ' + b"9" * 5000 + b"}"),
            *(b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"reward": 1e999}', b'{"reward": NaN}'),
            *(
                b'{"reward": 1' + b"0" * 400 + b"}",
                b'{"task": ' + b'{"a": ' * 500 + b"1" + b"}" * 501,
                b"\xff\xfe{}",
                b"null",
            ),
            b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": 1' + b"0" * 30 + b"}",
        ]
    ),
)
ROUTES = [
    "/v1/chat/completions",
    "/episodes",
    "/episodes/current/reward",
    "/episodes/current/finish",
    "/v1/models",
    "/x",
]
keys = st.one_of(
    st.just("NAMED"),
    st.just("TOKEN"),
    st.sampled_from(["", "Bearer", "x" * 9000, "é", "TOKEN:", ":"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f\x85\xa0"), max_size=12),
)
asked = st.tuples(st.sampled_from(["POST", "POST", "GET", "PUT"]), st.sampled_from(ROUTES), keys, raws)


@cache
def _client() -> Any:
    import httpx

    return httpx.Client(base_url=gateway().url, trust_env=False, timeout=60)


def refuses(given: tuple[str, str, str, bytes]) -> None:
    method, route, key, body = given
    place = gateway()
    key = key.replace("TOKEN", place.registry.token).replace("NAMED", f"{place.registry.token}:raw")
    headers = {b"authorization": f"Bearer {key}".strip().encode("latin-1")}
    answer = _client().request(method, route, content=body, headers=headers)
    assert answer.status_code < 500, (answer.status_code, answer.text[:500])
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"] and len(error["message"]) < 2000 and error["type"]


OPERATIONS = _operations()
TARGETS = [
    *(Target(f"gateway/{name}", _cases(operation), conforms, 12) for name, operation in OPERATIONS.items()),
    Target("gateway/raw", asked, refuses, 80),
]
test_fuzz = suite(TARGETS)
