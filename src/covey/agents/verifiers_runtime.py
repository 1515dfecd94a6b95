"""The two places where an environment of the package `verifiers` meets the model: its client, and its chat harness.

Every model call of a rollout goes through the package's own server to a `Client`. `PolicyClient` answers it through the
episode's policy, so that tokens and log-probs are those that were sampled. A harness is the program that plays a role;
`ChatHarness` is the plain one: ask, call the tools that the reply asks for, until it asks for none. It runs in this
process and gives the model no way to run code here, as the package's default does.

This module needs the package: `covey.agents.verifiers` imports it.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from openai import AsyncOpenAI, BadRequestError
from verifiers import v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ToolsetError
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from covey.agents.formats import Format
from covey.agents.formats.base import Call
from covey.agents.turns import with_system
from covey.errors import InputError, RunFailed
from covey.protocols import NoRoom, Policy
from covey.types import StopReason, Turn

__all__ = ["ChatHarness"]  # what the package looks for where a harness is called by this module's name

Message = dict[str, Any]
MODEL = "policy"


class PolicyClient(vf.Client):
    """One episode's model, behind the interface of the package. It remembers its replies, to know their echoes."""

    def __init__(self, policy: Policy, format: Format | None) -> None:
        self.policy = policy
        self.format = format
        self.traces: dict[str, Any] = {}
        self.said: dict[str, list[Mapping[str, Any]]] = {}  # by trace: the conversation, with its last reply
        self.full = False  # no further token may be sampled
        self.broken: Exception | None = None  # what must end the run, and not only this episode
        self._replies: dict[str, tuple[Mapping[str, Any], Sequence[Call]]] = {}

    def watch(self, trace: Any) -> None:
        self.traces[trace.id] = trace

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            self.broken = InputError(f"this environment speaks {type(dialect).__name__}: only chat is answered")
            raise vf.ProviderError(str(self.broken), status_code=400)
        request = dialect.parse_request(body)
        tools = [tool_to_wire(tool) for tool in request.tools or []]
        messages = self._inward([_plain(message_to_wire(message)) for message in request.messages])
        trace = self.traces[str(session_id)]
        try:
            return await self._reply(trace, messages, tools, body)
        except NoRoom as error:
            self.full = True
            raise vf.ProviderError(str(error), status_code=400) from error
        except (InputError, RunFailed) as error:
            self.broken = error
            raise vf.ProviderError(str(error), status_code=400) from error

    async def _reply(
        self, trace: Any, messages: list[Mapping[str, Any]], tools: list[Message], body: Mapping[str, Any]
    ) -> vf.Response:
        format = self._format(tools)
        native = format is not None and format.native_tools
        shown = messages if native or format is None else with_system(messages, format.instructions(tools))
        stop = body.get("stop") or ()
        reply = await self.policy.ask(
            shown,
            tools=tools if native else None,
            stop=((stop,) if isinstance(stop, str) else tuple(stop)) + (format.stop if format is not None else ()),
            max_tokens=body.get("max_tokens") or body.get("max_completion_tokens"),
            trained=trace.agent.trainable,
        )
        message: Mapping[str, Any] = {"role": "assistant", "content": reply.text}
        calls: Sequence[Call] = ()
        if format is not None and reply.stop is not StopReason.LENGTH:  # of a reply cut off nothing is called
            parsed = format.parse(reply.text)
            message, calls = parsed.message, parsed.calls
            self.policy.remember(message)
        self.said[trace.id] = [*messages, message]
        assert reply.turn is not None
        return self._response(message, calls, reply.turn)

    def _format(self, tools: Sequence[Message]) -> Format | None:
        if tools and self.format is None:
            raise InputError("this environment has tools, and it is not known how the model calls them\n  agent.format")
        return self.format if tools else None

    def _response(self, message: Mapping[str, Any], calls: Sequence[Call], turn: Turn) -> vf.Response:
        """Calls that could not be read are not told: nothing can be run for them."""
        good = [call for call in calls if call.problem is None]
        content = str(message.get("content") or "")
        said = vf.AssistantMessage(
            content=content if content or not good else None,
            tool_calls=[
                vf.ToolCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False))
                for call in good
            ]
            or None,
        )
        self._replies[_echo(_plain(message_to_wire(said)))] = (message, calls)
        response = vf.Response(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=MODEL,
            message=said,
            finish_reason="length" if turn.stop is StopReason.LENGTH else "tool_calls" if good else "stop",
            usage=vf.Usage(prompt_tokens=len(turn.prompt_ids), completion_tokens=len(turn.completion_ids)),
        )
        response.raw = serialize_completion(response, MODEL)
        return response

    def _inward(self, wire: Sequence[Message]) -> list[Mapping[str, Any]]:
        """The package's messages as the template shows them: our own replies as they were, tools' results in the form
        that the model knows."""
        found: list[Mapping[str, Any]] = []
        rest = list(wire)
        while rest:
            message = rest.pop(0)
            reply = self._replies.get(_echo(message)) if message["role"] == "assistant" else None
            if reply is None:
                found.append(message)
                continue
            said, calls = reply
            found.append(said)
            results: dict[str, str] = {}
            while calls and rest and rest[0]["role"] == "tool":
                result = rest.pop(0)
                results[result["tool_call_id"]] = result["content"]
            if results:
                assert self.format is not None  # only a format finds calls
                answered = [call for call in calls if call.problem or call.id in results]
                found += self.format.observe([(call, call.problem or results[call.id]) for call in answered])
        return found


def _plain(wire: Message) -> Message:
    """A message of text with what chat templates know, and arguments as the object that they are."""
    content = wire.get("content")
    if isinstance(content, list):
        if not all(part.get("type") == "text" for part in content):
            raise InputError("this environment shows images, which this model is not given")
        content = "\n".join(part["text"] for part in content)
    message: Message = {"role": wire["role"], "content": content or ""}
    if wire.get("tool_calls"):
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": _function(call["function"])}
            for call in wire["tool_calls"]
        ]
    return message | {key: wire[key] for key in ("name", "tool_call_id") if wire.get(key)}


def _function(function: Mapping[str, Any]) -> Message:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]
    return {"name": function["name"], "arguments": arguments}


def _echo(message: Message) -> str:
    return json.dumps([message["content"], message.get("tool_calls") or []], sort_keys=True)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Ask, call tools, ask again, until a reply calls none; or until the package or the policy says that it is over."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        from verifiers.v1.runtimes import ProgramResult

        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as model,
            AsyncExitStack() as stack,
        ):
            schemas, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)

            async def result(call: Any) -> Message:
                name = call.function.name
                if name not in dispatch:
                    text: Any = f"error: there is no tool {name!r}; the tools are: {', '.join(dispatch) or 'none'}"
                else:
                    text = await call_mcp(connected, dispatch, name, json.loads(call.function.arguments))
                return {"role": "tool", "tool_call_id": call.id, "content": text}

            while True:
                asked: dict[str, Any] = {"model": ctx.model, "messages": messages}
                try:
                    completion = await model.chat.completions.create(**asked, **({"tools": schemas} if schemas else {}))
                except BadRequestError:
                    break  # a limit was reached, or the task's own stop: what there is is scored
                said = completion.choices[0].message
                messages.append(said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
                if not said.tool_calls:
                    break
                messages += await asyncio.gather(*map(result, said.tool_calls))
        return ProgramResult(exit_code=0, stdout="", stderr="")


# -- Tool servers of a verifiers environment: processes of this machine that import what this process can import -------
# The package starts `python -m MODULE` in an empty folder and then polls for a port for minutes, even if the process
# has already ended. `HostRuntime` gives the process this one's import path, waits until it listens, and raises the
# package's `ToolsetError` with the end of the process's output if it ends first or is not ready in time.
#
# This module needs the package: `covey.agents.verifiers` imports it.

READY_SECONDS = 180.0  # to import and set up a server; the package itself waits this long for a port
POLL_SECONDS = 0.1
WAIT_SECONDS = 10.0  # between two lines about a server that is not ready
TAIL_CHARACTERS = 2000  # of a failed process's output

# A file loaded by path (agent.environment=file.py:make) has a module name that only this process knows. The server
# fetches its task by that name and starts in the file's `if __name__ == "__main__"`, so it needs both.
_RUN_FILE = """
import importlib.util, runpy, sys
name, path = sys.argv[1:3]
spec = importlib.util.spec_from_file_location(name, path)
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
runpy.run_path(path, run_name="__main__")
"""

_shown: dict[str, float] = {}  # by module: when a line about waiting was last printed


def install() -> None:
    """Make the package use `HostRuntime` for every process it starts on this machine."""
    runtimes.SubprocessRuntime = HostRuntime


class HostRuntime(SubprocessRuntime):
    tell: Callable[[str], None] = staticmethod(lambda text: None)  # where to report that a server is not ready yet

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        if "MCP_PORT_FILE" not in env:  # not a tool server
            await super().run_background(argv, env, log)
            return
        module = argv[-1]
        await super().run_background(_command(argv, module), env | {"PYTHONPATH": _import_path()}, log)
        await _ready(self._background[-1], module, Path(env["MCP_PORT_FILE"]), self.workdir / log, self.tell)


def _command(argv: list[str], module: str) -> list[str]:
    if "." in module or importlib.machinery.PathFinder.find_spec(module) is not None:
        return argv
    return [argv[0], "-c", _RUN_FILE, module, str(sys.modules[module].__file__)]


def _import_path() -> str:
    """This process's `sys.path`, in its order, so that the server imports the same modules."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


async def _ready(
    process: asyncio.subprocess.Process, module: str, port_file: Path, log: Path, tell: Callable[[str], None]
) -> None:
    begun = time.monotonic()
    until = begun + READY_SECONDS
    while not await _listens(port_file):
        if process.returncode is not None:
            raise ToolsetError(_ended(module, process.returncode, _tail(log)))
        if time.monotonic() > until:
            raise ToolsetError(
                f"the tool server of {module} is not ready after {READY_SECONDS:g} s (is its setup() too slow?)"
                + _tail(log)
            )
        _show_waiting(module, begun, log, tell)
        await asyncio.sleep(POLL_SECONDS)


def _show_waiting(module: str, begun: float, log: Path, tell: Callable[[str], None]) -> None:
    """A line every WAIT_SECONDS, however many episodes wait for servers of this module."""
    now = time.monotonic()
    if now - max(begun, _shown.get(module, 0.0)) < WAIT_SECONDS:
        return
    _shown[module] = now
    last = _tail(log).splitlines()[-1:]
    tell(
        f"waiting for the tool server of {module}: {now - begun:.0f} s of at most {READY_SECONDS:g}"
        + (f", its last output: {last[0]}" if last else "")
    )


async def _listens(port_file: Path) -> bool:
    """The server reports its port before its setup, and listens after it."""
    try:
        port = port_file.read_text()
    except FileNotFoundError:
        return False
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
    except (ValueError, ConnectionError):  # written only in part; not listening yet
        return False
    writer.close()
    return True


def _ended(module: str, code: int, tail: str) -> str:
    if code == 0:
        tail += f'\n  does {module} end with  if __name__ == "__main__": ITS_TOOLSET.run() ?'
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the tool server of {module} ended with {how} before it was ready{tail}"


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    return f":\n{text}" if text else ""
