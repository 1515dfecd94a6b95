"""The parts of Covey that run inside the package `verifiers`: model client, chat harness, tool-server processes.

`PolicyClient`: every model call of a rollout goes through the package's server to a client. Ours samples with the
episode's policy, so the trained tokens and log-probs are the sampled ones.

`ChatHarness`: a harness is the program that plays a role. Ours samples a reply and runs its tool calls until a reply
has none. It runs in this process and, unlike the package's default, gives the model no way to run code here.

`HostRuntime`: the package starts `python -m MODULE` for a tool server in an empty folder and then polls for a port for
minutes, even if the process has already exited. Ours passes on this process's import path, waits until the server
listens, and raises the package's `ToolsetError` with the end of the output if the server exits or takes too long.

Importing this module requires the package; `covey.agents.verifiers` imports it when needed.
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

from covey.errors import InputError, RunFailed
from covey.protocols import NoRoom, Policy
from covey.replies import with_system
from covey.tool_calls import Format, Parsed, ReplyMemory
from covey.types import StopReason, Turn

__all__ = ["ChatHarness"]  # the package looks here for the harness of this module

Message = dict[str, Any]
MODEL = "policy"


class PolicyClient(vf.Client):
    """The model of one episode. It remembers its replies, to recognise them in later requests."""

    def __init__(self, policy: Policy, format: Format | None) -> None:
        self.policy = policy
        self.format = format
        self.traces: dict[str, Any] = {}
        self.conversations: dict[str, list[Mapping[str, Any]]] = {}  # by trace, with the last reply
        self.no_room = False  # no further token may be sampled
        self.fatal_error: Exception | None = None  # ends the run, not only this episode
        self._replies = ReplyMemory(format)

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
            self.fatal_error = InputError(
                f"this environment uses {type(dialect).__name__}: only chat completions are supported"
            )
            raise vf.ProviderError(str(self.fatal_error), status_code=400)
        request = dialect.parse_request(body)
        tools = [tool_to_wire(tool) for tool in request.tools or []]
        messages = self._replies.to_template([_normalise(message_to_wire(message)) for message in request.messages])
        trace = self.traces[str(session_id)]
        try:
            return await self._reply(trace, messages, tools, body)
        except NoRoom as error:
            self.no_room = True
            raise vf.ProviderError(str(error), status_code=400) from error
        except (InputError, RunFailed) as error:
            self.fatal_error = error
            raise vf.ProviderError(str(error), status_code=400) from error

    async def _reply(
        self, trace: Any, messages: list[Mapping[str, Any]], tools: list[Message], body: Mapping[str, Any]
    ) -> vf.Response:
        format = self._format(tools)
        native = format is not None and format.native_tools
        explained = messages if native or format is None else with_system(messages, format.instructions(tools))
        stop = body.get("stop") or ()
        reply = await self.policy.ask(
            explained,
            tools=tools if native else None,
            stop=((stop,) if isinstance(stop, str) else tuple(stop)) + (format.stop if format is not None else ()),
            max_tokens=body.get("max_tokens") or body.get("max_completion_tokens"),
            trained=trace.agent.trainable,
        )
        parsed = Parsed({"role": "assistant", "content": reply.text})
        if format is not None and reply.stop is not StopReason.LENGTH:  # calls of a truncated reply are not run
            parsed = format.parse(reply.text)
            self.policy.remember(parsed.message)
        self.conversations[trace.id] = [*messages, parsed.message]
        assert reply.turn is not None
        return self._response(parsed, reply.turn)

    def _format(self, tools: Sequence[Message]) -> Format | None:
        if tools and self.format is None:
            raise InputError(
                "this environment has tools, and the model's tool-call format is not known\n  fix: agent.format=NAME"
            )
        return self.format if tools else None

    def _response(self, reply: Parsed, turn: Turn) -> vf.Response:
        """The reply for the package, without malformed calls, which cannot be run."""
        valid = [call for call in reply.calls if call.problem is None]
        content = str(reply.message.get("content") or "")
        wire_message = vf.AssistantMessage(
            content=content if content or not valid else None,
            tool_calls=[
                vf.ToolCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False))
                for call in valid
            ]
            or None,
        )
        self._replies.add(reply, _normalise(message_to_wire(wire_message)))
        response = vf.Response(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            model=MODEL,
            message=wire_message,
            finish_reason="length" if turn.stop is StopReason.LENGTH else "tool_calls" if valid else "stop",
            usage=vf.Usage(prompt_tokens=len(turn.prompt_ids), completion_tokens=len(turn.completion_ids)),
        )
        response.raw = serialize_completion(response, MODEL)
        return response


def _normalise(wire: Message) -> Message:
    """A message with a text content and the keys of chat templates, and tool arguments as an object."""
    content = wire.get("content")
    if isinstance(content, list):
        if not all(part.get("type") == "text" for part in content):
            raise InputError("this environment has images, which are not supported")
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


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Sample a reply and run its tool calls, until a reply has none, or the package or the policy ends the rollout."""

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
                request: dict[str, Any] = {"model": ctx.model, "messages": messages}
                try:
                    completion = await model.chat.completions.create(
                        **request, **({"tools": schemas} if schemas else {})
                    )
                except BadRequestError:
                    break  # a limit or the task's own stop condition: the episode is scored as it is
                reply = completion.choices[0].message
                messages.append(reply.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
                if not reply.tool_calls:
                    break
                messages += await asyncio.gather(*map(result, reply.tool_calls))
        return ProgramResult(exit_code=0, stdout="", stderr="")


# -- Tool servers ------------------------------------------------------------------------------------------------------

READY_SECONDS = 180.0  # to import and set up a server; the package waits this long for a port
POLL_SECONDS = 0.1
WAIT_SECONDS = 10.0  # between two reports about a server that is not ready
TAIL_CHARACTERS = 2000  # of a server's output

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

_reported_at: dict[str, float] = {}  # by module: time of the last report about waiting


def install() -> None:
    """Make the package use `HostRuntime` for every process it starts on this machine."""
    runtimes.SubprocessRuntime = HostRuntime


class HostRuntime(SubprocessRuntime):
    report: Callable[[str], None] = staticmethod(lambda text: None)  # called while a server is not ready

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        if "MCP_PORT_FILE" not in env:  # not a tool server
            await super().run_background(argv, env, log)
            return
        module = argv[-1]
        # Absolute entries of this process's sys.path, so that the server imports the same modules.
        import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        await super().run_background(_command(argv, module), env | {"PYTHONPATH": import_path}, log)
        port_file = Path(env["MCP_PORT_FILE"])
        await _wait_until_ready(self._background[-1], module, port_file, self.workdir / log, self.report)


def _command(argv: list[str], module: str) -> list[str]:
    if "." in module or importlib.machinery.PathFinder.find_spec(module) is not None:
        return argv
    return [argv[0], "-c", _RUN_FILE, module, str(sys.modules[module].__file__)]


async def _wait_until_ready(
    process: asyncio.subprocess.Process, module: str, port_file: Path, log: Path, report: Callable[[str], None]
) -> None:
    start = time.monotonic()
    while not await _listens(port_file):
        if process.returncode is not None:
            raise ToolsetError(_exit_text(module, process.returncode, _tail(log)))
        if time.monotonic() > start + READY_SECONDS:
            raise ToolsetError(
                f"the tool server of {module} is not ready after {READY_SECONDS:g} s (is its setup() too slow?)"
                + _tail(log)
            )
        _report_waiting(module, start, log, report)
        await asyncio.sleep(POLL_SECONDS)


def _report_waiting(module: str, start: float, log: Path, report: Callable[[str], None]) -> None:
    """One report every WAIT_SECONDS, even if many episodes wait for servers of this module."""
    now = time.monotonic()
    if now - max(start, _reported_at.get(module, 0.0)) < WAIT_SECONDS:
        return
    _reported_at[module] = now
    last = _tail(log).splitlines()[-1:]
    report(
        f"waiting for the tool server of {module}: {now - start:.0f} s of at most {READY_SECONDS:g}"
        + (f", its last output: {last[0]}" if last else "")
    )


async def _listens(port_file: Path) -> bool:
    """Whether the server accepts connections. It writes its port before its setup, and listens after it."""
    try:
        port = port_file.read_text()
    except FileNotFoundError:
        return False
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
    except (ValueError, ConnectionError):  # partially written, or not listening yet
        return False
    writer.close()
    return True


def _exit_text(module: str, code: int, tail: str) -> str:
    if code == 0:
        tail += f'\n  does {module} end with  if __name__ == "__main__": ITS_TOOLSET.run() ?'
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the tool server of {module} ended with {how} before it was ready{tail}"


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    return f":\n{text}" if text else ""
