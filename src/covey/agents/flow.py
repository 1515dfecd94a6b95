"""agent=flow: four modules that share a memory. Planner, executor and verifier take turns; a generator answers.

AgentFlow, Li et al. 2025, https://arxiv.org/abs/2510.05592

    planner     sees the query, the tools and the memory; writes the next sub-goal and the tool for it
    executor    writes a call of that tool, which is run; the result goes into the memory
    verifier    sees the query and the memory; decides whether more is needed
    generator   writes the answer from the query and the memory

Images of the task and of tool results are shown to every module, before its prompt.

All modules are the same policy. Each turn is a separate conversation, so it becomes a separate row of tokens. The
episode's reward goes to every trained turn: those of the modules in `agent.train_modules`. Modules are roles: a reward
that returns {"planner": 1.0, "executor": 0.0, ...} gives each its own (rollout/roles.py).

Deviations: no analysis of the query before the first plan; planner and executor write short lines and JSON rather than
justifications and Python; a truncated reply of any module ends the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.agents.formats.base import describe_tools, function_of
from covey.agents.formats.hermes import HermesFormat
from covey.agents.formats.llama import LlamaFormat
from covey.agents.tools.session import ToolResult, reward_of_tools
from covey.agents.turns import Toolbox
from covey.errors import unknown
from covey.images import images_of, text_of, with_images
from covey.protocols import NoRoom, Policy
from covey.replies import thinking_end
from covey.tool_calls import Call
from covey.types import Episode, Messages, StopReason, Task, ToolUse

MODULES = ("planner", "executor", "verifier", "generator")
LINE = re.compile(r"^[ \t]*+\**+(?P<label>sub-?goal|tool(?: name)?)\**+[ \t]*+:\**+", re.IGNORECASE | re.MULTILINE)
VERDICT = re.compile(r"\bconclusion\W{1,8}(stop|continue)\b", re.IGNORECASE)

PLANNER = """You plan how to answer a query with tools, one step at a time.

Query:
{query}

Tools:
{tools}

Steps so far:
{memory}

Decide what to do next: one sub-goal that brings the answer closer, and the one tool for it. Do not repeat a step. The
tool is used by somebody who sees only your sub-goal, so put all names, numbers and facts into it that are needed.
You may think first. End with these two lines:
Sub-goal: what is to be found out or computed
Tool: the name of one tool"""

EXECUTOR = """You turn a sub-goal into a call of a tool.

Query:
{query}

Sub-goal:
{goal}

Tool:
{tool}

Write the call, and nothing after it:
<tool_call>
{{"name": "{name}", "arguments": {{"parameter": "value"}}}}
</tool_call>"""

VERIFIER = """You decide whether enough is known to answer a query.

Query:
{query}

Tools:
{tools}

Steps so far:
{memory}

Is everything that the query asks for known from these steps, and without contradiction? Say briefly why. End with
Conclusion: STOP
if it is, or with
Conclusion: CONTINUE
if a further step is needed."""

GENERATOR = """You answer a query from what was found out.

Query:
{query}

Steps taken:
{memory}

Write the answer to the query, in the form that it asks for."""


@dataclass(frozen=True, slots=True)
class Step:
    """A sub-goal, the tool calls for it, and their results."""

    goal: str
    calls: str
    result: str


@dataclass
class Memory:
    """The steps that the modules of one episode share, and what the episode is built from."""

    steps: list[Step] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)
    uses: list[ToolUse] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)  # of the task and of results; every module sees them
    answer: str | None = None

    def __str__(self) -> str:
        """The steps, as they are shown to the modules."""
        steps = (
            f"Step {number}\nSub-goal: {step.goal}\nCall: {step.calls}\nResult: {step.result}"
            for number, step in enumerate(self.steps, 1)
        )
        return "\n\n".join(steps) or "(none)"


@dataclass(frozen=True)
class FlowAgent:
    """`modules`: names of the modules whose turns are trained on, or `all`. `max_turns`: plans per episode."""

    tools: Toolbox
    modules: Sequence[str] = ("planner",)
    max_turns: int = 8
    opponents: Sequence[str] = ()  # modules that a past policy plays

    def __post_init__(self) -> None:
        for module in self.modules:
            if module not in (*MODULES, "all"):
                raise unknown("module of agent.train_modules", module, (*MODULES, "all"))
        for module in self.opponents:
            if module not in MODULES:
                raise unknown("module of agent.opponents", module, MODULES)

    @property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that the pool for `in_workers` must have."""
        return self.tools.functions

    def in_workers(self, pool: Any) -> FlowAgent:
        return replace(self, tools=self.tools.in_workers(pool))

    def opening(self, task: Task) -> tuple[Messages, None]:
        return _with_images(self._planner(_query(task), Memory()), images_of(with_images(task.messages))), None

    async def run(self, policy: Policy, task: Task) -> Episode:
        memory = Memory(images=list(images_of(with_images(task.messages))))
        try:
            stop = await self._run_modules(policy, _query(task), memory)
        except NoRoom:
            stop = StopReason.LENGTH
        return Episode(
            task,
            tuple(policy.turns),
            (*task.messages, *memory.replies),
            stop=stop,
            answer=memory.answer,
            tools=tuple(memory.uses),
        )

    async def _run_modules(self, policy: Policy, query: str, memory: Memory) -> StopReason:
        async with self.tools.open(policy) as session:
            done = False
            for _ in range(self.max_turns):
                plan, _ = await self._ask("planner", policy, memory, self._planner(query, memory))
                goal, calls = await self._calls(policy, query, memory, plan)
                results = await session.call(calls)
                policy.record_turn(reward=reward_of_tools(results))
                self._remember(memory, goal, calls, results)
                if memory.answer is not None:
                    return StopReason.ANSWER
                verdict, _ = await self._ask("verifier", policy, memory, self._verifier(query, memory))
                if done := _says_stop(verdict):
                    break
        _, stop = await self._ask("generator", policy, memory, _prompt(GENERATOR, query=query, memory=memory))
        return stop if done else StopReason.TURNS

    async def _ask(self, module: str, policy: Policy, memory: Memory, messages: Messages) -> tuple[str, StopReason]:
        """A module's reply without its thinking. A truncated reply is useless to the other modules."""
        trained = module in self.modules or "all" in self.modules
        reply = await policy.ask(_with_images(messages, memory.images), trained=trained, role=module)
        memory.replies.append({"role": "assistant", "name": module, "content": reply.text})
        if reply.stop is StopReason.LENGTH:
            raise NoRoom(f"the {module}'s reply was cut off")
        start = thinking_end(reply.text)
        return ("" if start is None else reply.text[start:].strip()), reply.stop

    async def _calls(self, policy: Policy, query: str, memory: Memory, plan: str) -> tuple[str, tuple[Call, ...]]:
        """The sub-goal and the calls for it. A plan that names no known tool becomes a malformed call."""
        goal, name = _parse_plan(plan)
        if not goal or not name:
            problem = "The plan must end with the lines\nSub-goal: what is to be done\nTool: the name of one tool"
            return goal or "(none)", (Call(name, problem=problem),)
        schema = next((s for s in self.tools.schemas() if function_of(s)["name"] == name), None)
        if schema is None:
            return goal, (Call(name),)
        prompt = _prompt(EXECUTOR, query=query, goal=goal, tool=describe_tools([schema]), name=name)
        reply, _ = await self._ask("executor", policy, memory, prompt)
        return goal, _parse_calls(reply, name)

    def _remember(self, memory: Memory, goal: str, calls: Sequence[Call], results: Sequence[ToolResult]) -> None:
        text = "\n".join(result.text for result in results)
        memory.steps.append(Step(goal, "; ".join(map(_call_text, calls)), text))
        memory.uses += [result.use for result in results]
        memory.images += [image for result in results for image in result.images]
        for result in results:
            if result.ended:
                memory.answer = result.answer or ""
                return

    def _planner(self, query: str, memory: Memory) -> Messages:
        return _prompt(PLANNER, query=query, tools=describe_tools(self.tools.schemas()), memory=memory)

    def _verifier(self, query: str, memory: Memory) -> Messages:
        return _prompt(VERIFIER, query=query, tools=describe_tools(self.tools.schemas()), memory=memory)


def _prompt(text: str, **parts: object) -> Messages:
    return ({"role": "user", "content": text.format(**parts)},)


def _with_images(messages: Messages, images: Sequence[Any]) -> Messages:
    """The prompt of a module, after the images."""
    if not images:
        return messages
    (prompt,) = messages
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": prompt["content"]}]
    return ({**prompt, "content": parts},)


def _query(task: Task) -> str:
    """The task as one text. Roles are written out if there is more than a system message and a question."""
    system = [text_of(m["content"]) for m in task.messages if m["role"] == "system"]
    rest = [m for m in task.messages if m["role"] != "system"]
    if len(rest) == 1:
        return "\n\n".join([*system, text_of(rest[0]["content"])])
    return "\n\n".join([*system, *(f"{m['role']}: {text_of(m['content'])}" for m in rest)])


def _parse_plan(text: str) -> tuple[str, str]:
    """Sub-goal and tool: the last of each, since a planner may write its reasoning first."""
    values = {"goal": "", "tool": ""}
    lines = list(LINE.finditer(text))
    ends = [*(line.start() for line in lines[1:]), len(text)]
    for line, end in zip(lines, ends, strict=False):
        is_tool = line["label"].lower().startswith("tool")
        values["tool" if is_tool else "goal"] = text[line.end() : end].strip()
    return values["goal"], values["tool"].split("\n")[0].strip().strip("`'\"[]*").strip()


def _parse_calls(reply: str, name: str) -> tuple[Call, ...]:
    """The executor's calls of the planned tool, between tags or as bare JSON."""
    tagged = "<tool_call>" in reply or not reply.startswith("{")
    parsed = (HermesFormat() if tagged else LlamaFormat()).parse(reply)
    if not parsed.calls:
        return (Call(name, problem="The executor wrote no tool call."),)
    return tuple(
        call
        if call.problem or call.name == name
        else Call(call.name, id=call.id, problem=f"The executor called {call.name}, but the plan says {name}.")
        for call in parsed.calls
    )


def _call_text(call: Call) -> str:
    if call.problem is not None:
        return f"{call.name or 'none'} (malformed)"
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"


def _says_stop(verdict: str) -> bool:
    """Whether the last conclusion is STOP; without a conclusion, whether the last line is just STOP."""
    conclusions = VERDICT.findall(verdict)
    last = conclusions[-1] if conclusions else verdict.rpartition("\n")[2].strip(" .*`")
    return bool(last.lower() == "stop")
