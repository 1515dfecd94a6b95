"""Sampling where batches are neither full nor even: answers of very different lengths, queues, long answers, agents.

    python benchmarks/regime.py --device cuda [--cases queue agents-256] [--vllm-python PATH]

    heavy-tail          the 7B shape, 128 answers of log-normal length, median 1,000, at most 8,192 tokens
    queue               the 0.5B shape, 1,024 answers, median 250, over 256 rows, all prompts different
    queue-groups        the same in groups of 8
    long-16k, long-32k  the 1.5B shape, 32 answers of 16,128 or 32,256 tokens
    long-7b             the 7B shape, 64 answers of 8,192 tokens
    agents-256, -1024   the 0.5B shape, agents of 5 turns: a prompt of 32 to 96 tokens, 40 sampled, a tool of 0 to 0.2 s

Prompts and lengths are random with a fixed seed, the same for both engines. Every run has its own process and warms up
on other prompts with much shorter answers; runs of both engines alternate. Both return the log-prob of every token;
--plain also measures vLLM without them. vLLM plays the agents through AsyncLLM, with prefix caching.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.agents import AgentTurn
from kit.child import ChildFailed, Children, has_package, serve
from kit.floors import Rates, Request, Shape, queue_seconds, sampling_flops
from kit.measure import about, machine, merged, now, peak_memory, prepare
from kit.models import load_config, random_ids
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, percent, publish, ratio

WARM_UP = 64  # answers of the warm-up are this many times shorter
SIDES = {"covey": "Covey, with log-probs", "vllm-logprobs": "vLLM, with log-probs", "vllm": "vLLM, without"}
TURNS, TURN_TOKENS, TOOL_S = 5, 40, 0.2


def answer_lengths(count: int, median: int, spread: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths: half of them are above `median`, a few are cut at `longest`."""
    rng = random.Random(seed)
    return [max(1, min(longest, round(median * math.exp(spread * rng.gauss(0, 1))))) for _ in range(count)]


def answers(model: str, prompt_tokens: int, group: int, lengths: Sequence[int], rows: int = 256) -> dict[str, Any]:
    return {"model": model, "prompt_tokens": prompt_tokens, "group": group, "lengths": lengths, "rows": rows}


def agents(model: str, count: int, rows: int = 256) -> dict[str, Any]:
    return {"model": model, "agents": count, "rows": rows}


CASES: dict[str, dict[str, Any]] = {
    "heavy-tail": answers("qwen2.5-7b", 1024, 8, answer_lengths(128, 1000, 0.9, 8192)),
    "queue": answers("qwen2.5-0.5b", 256, 1, answer_lengths(1024, 250, 0.5, 1024)),
    "queue-groups": answers("qwen2.5-0.5b", 256, 8, answer_lengths(1024, 250, 0.5, 1024)),
    "long-16k": answers("qwen2.5-1.5b", 256, 8, [16_128] * 32),
    "long-32k": answers("qwen2.5-1.5b", 256, 8, [32_256] * 32),
    "long-7b": answers("qwen2.5-7b", 256, 8, [8192] * 64),
    "agents-256": agents("qwen2.5-0.5b", 256),
    "agents-1024": agents("qwen2.5-0.5b", 1024),
}
TINY = {
    "heavy-tail": answers("tiny", 8, 4, answer_lengths(8, 4, 0.9, 12), rows=8),
    "queue": answers("tiny", 8, 1, answer_lengths(8, 4, 0.5, 12), rows=2),
    "queue-groups": answers("tiny", 8, 4, answer_lengths(8, 4, 0.5, 12), rows=2),
    "long-16k": answers("tiny", 8, 4, [24] * 4, rows=4),
    "long-32k": answers("tiny", 8, 4, [48] * 4, rows=4),
    "long-7b": answers("tiny", 8, 4, [12] * 8, rows=8),
    "agents-256": agents("tiny", 2, rows=2),
    "agents-1024": agents("tiny", 4, rows=2),
}


# -- the engines, each in its own process ----------------------------------------------------------------------------


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.pipeline import Sampler

    prepare(settings)
    sampler = Sampler(settings, settings["rows"])
    seconds = run_agents(sampler, settings) if "agents" in settings else run_warm(sampler, settings)
    sampler.close()
    return {**about(settings["device"]), "covey": seconds | peak_memory(settings["device"])}


def vllm_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.rivals import AsyncVllm, Vllm

    if "agents" in settings:
        longest = max(sum(prompt + TURN_TOKENS for prompt, _ in turns) for turns in agent_turns(settings["agents"]))
        server = AsyncVllm(settings["model"], max_tokens=longest, max_sequences=settings["rows"])
        seconds = run_agents(server, settings)
        server.close()
        return {**about(settings["device"]), "vllm-logprobs": seconds}
    longest = settings["prompt_tokens"] + max(settings["lengths"])
    engine = Vllm(settings["model"], max_tokens=longest, max_sequences=settings["rows"])
    kinds = [("vllm-logprobs", True), ("vllm", False)][: 1 + settings["plain"]]
    found = {
        name: run_warm(lambda prompts, lengths, wanted=wanted: engine(prompts, lengths, wanted), settings)
        for name, wanted in kinds
    }
    return {**about(settings["device"]), **found}


def run_warm(call: Callable[[list[list[int]], list[int]], int], settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of the warm-up and of the measurement. One row of the warm-up is as long as the longest one of the
    measurement."""
    lengths = settings["lengths"]
    short = [math.ceil(length / WARM_UP) for length in lengths]
    prompts = requests(settings, "warm-up")
    longest = settings["prompt_tokens"] + max(lengths) - short[0]
    prompts[0] = (prompts[0] * (1 + longest // len(prompts[0])))[:longest]
    taken = []
    for asked, wanted in ((prompts, short), (requests(settings, "work"), lengths)):
        start = now()
        sampled = call(asked, wanted)
        taken.append(now() - start)
        assert sampled == sum(wanted)
    return {"warm_up_s": taken[0], "seconds": taken[1]}


def run_agents(sampler: Any, settings: dict[str, Any]) -> dict[str, float]:
    taken = []
    for run in ("warm-up", "second warm-up", "work"):  # batch sizes differ a little from run to run
        start = now()
        sampled = sampler.agents(agent_work(settings, run))
        taken.append(now() - start)
        assert sampled == settings["agents"] * TURNS * TURN_TOKENS
    return {"warm_up_s": sum(taken[:-1]), "seconds": taken[-1]}


def agent_work(settings: dict[str, Any], run: str) -> list[list[Any]]:
    """The turns of every agent: new prompts in every run, with the same lengths and tool times."""
    vocabulary = load_config(settings["model"]).vocab_size
    return [
        [
            AgentTurn(random_ids(vocabulary, 1, tokens, (run, number, turn))[0], TURN_TOKENS, tool_s)
            for turn, (tokens, tool_s) in enumerate(turns)
        ]
        for number, turns in enumerate(agent_turns(settings["agents"]))
    ]


def agent_turns(count: int) -> list[list[tuple[int, float]]]:
    """Prompt tokens and seconds of the tool, for each turn of each agent."""
    rng = random.Random(0)
    return [[(rng.randint(32, 96), rng.uniform(0, TOOL_S)) for _ in range(TURNS)] for _ in range(count)]


def requests(settings: dict[str, Any], run: str) -> list[list[int]]:
    """The prompt of each answer; equal within a group."""
    groups = len(settings["lengths"]) // settings["group"]
    vocabulary = load_config(settings["model"]).vocab_size
    prompts = random_ids(vocabulary, groups, settings["prompt_tokens"], ("regime", run))
    return [prompt for prompt in prompts for _ in range(settings["group"])]


# -- the report ------------------------------------------------------------------------------------------------------

HEADER = ("case", "side", "wall s", "tokens/s", "× vLLM with log-probs", "× floor", "MFU", "warm-up s")


def load_of(settings: dict[str, Any]) -> list[Request]:
    """All that a case computes, for its floor."""
    if "agents" not in settings:
        lengths, size = settings["lengths"], settings["group"]
        groups = [lengths[at : at + size] for at in range(0, len(lengths), size)]
        return [Request(0, settings["prompt_tokens"], group) for group in groups]
    found = []
    for turns in agent_turns(settings["agents"]):
        cached = 0
        for prompt, _ in turns:
            found.append(Request(cached, prompt, [TURN_TOKENS]))
            cached += prompt + TURN_TOKENS
    return found


def floor_seconds(settings: dict[str, Any], rates: Rates) -> float:
    """For agents at least the tools of the slowest one."""
    shape = Shape.of(load_config(settings["model"]))
    itemsize = {"float32": 4, "bfloat16": 2}[settings["dtype"]]
    tools = [sum(tool_s for _, tool_s in turns) for turns in agent_turns(settings.get("agents", 0))]
    return max([queue_seconds(shape, rates, itemsize, load_of(settings), settings["rows"]), *tools])


def rows_of(
    case: str, found: dict[str, list[dict[str, float]]], settings: dict[str, Any], rates: Rates
) -> list[dict[str, Any]]:
    """`found`: the repeats of each side."""
    load, least = load_of(settings), floor_seconds(settings, rates)
    tokens = sum(sum(request.answers) for request in load)
    flops = sampling_flops(Shape.of(load_config(settings["model"])), load)
    medians = {side: statistics.median(run["seconds"] for run in runs) for side, runs in found.items()}
    rows: list[dict[str, Any]] = []
    for side, seconds in medians.items():
        row = {"case": case, "side": side, "seconds": seconds, "tokens_per_s": tokens / seconds}
        row |= {"over_floor": seconds / least, "mfu": flops / rates.flops / seconds}
        row |= {"speed_up": ratio(medians.get("vllm-logprobs"), seconds)}
        row |= {"warm_up_s": statistics.median(run["warm_up_s"] for run in found[side])}
        rows.append(row | {"repeats_s": [run["seconds"] for run in found[side]]})
    return [*rows, {"case": case, "side": "floor", "seconds": least, "tokens_per_s": tokens / least}]


def cells(row: dict[str, Any]) -> list[str]:
    figures = [number(row.get(key)) for key in ("seconds", "tokens_per_s", "speed_up", "over_floor")]
    return [
        row["case"],
        SIDES.get(row["side"], row["side"]),
        *figures,
        percent(row.get("mfu")),
        number(row.get("warm_up_s")),
    ]


def loads(chosen: Any) -> dict[str, dict[str, Any]]:
    common = {"device": measured_on(chosen), "dtype": "float32" if chosen.tiny else "bfloat16", "plain": chosen.plain}
    return {case: common | (TINY if chosen.tiny else CASES)[case] for case in chosen.cases}


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, help="processes of each side; default 3")
    parser.add_argument("--sides", nargs="+", choices=("covey", "vllm"), help="default: all there are")
    parser.add_argument("--plain", action="store_true", help="vLLM without log-probs too")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="a Python with vLLM")
    found = parser.parse_args(argv)
    found.repeats = found.repeats or (1 if found.tiny else 3)
    if found.sides is None:
        there = found.device == "cuda" and has_package(found.vllm_python, "vllm")
        found.sides = ["covey", *(["vllm"] if there else [])]
    return found


def measure(
    children: Children, case: str, settings: dict[str, Any], chosen: Any, failures: list[str]
) -> tuple[dict[str, list[dict[str, float]]], dict[str, Any]]:
    """The repeats of each side, and the sides' versions. One that fails is not run again."""
    sides = list(chosen.sides)
    found: dict[str, list[dict[str, float]]] = {}
    versions: dict[str, Any] = {}
    for _ in range(chosen.repeats):
        for side in tuple(sides):
            try:
                done = children.run(side, settings, chosen.vllm_python if side == "vllm" else sys.executable)
            except ChildFailed as error:
                failures.append(f"{case}: {error}")
                sides.remove(side)
                continue
            versions[side] = done["versions"]
            for name in set(SIDES) & set(done):
                found.setdefault(name, []).append(done[name])
    return found, versions


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    todo = loads(chosen)
    here = children.run("machine", next(iter(todo.values())) | {"quick": chosen.tiny})
    versions: dict[str, Any] = {"covey": here["versions"]}
    failures: list[str] = []
    rows: list[dict[str, Any]] = []
    for case, settings in todo.items():
        found, theirs = measure(children, case, settings, chosen, failures)
        versions |= theirs
        rows += rows_of(case, found, settings, Rates(**here["rates"])) if found else []
    if rows:
        publish(report(chosen, todo, here, versions, rows), chosen.out)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def description(case: str, settings: dict[str, Any]) -> str:
    head = f"{case}: {settings['model']}, {settings['dtype']}, {settings['rows']} rows"
    if "agents" in settings:
        return (
            f"{head}; {settings['agents']} agents of {TURNS} turns: 32 to 96 prompt tokens, {TURN_TOKENS} sampled, "
            f"tools of 0 to {TOOL_S} s."
        )
    lengths = settings["lengths"]
    return (
        f"{head}; {len(lengths)} answers in groups of {settings['group']}, prompts of {settings['prompt_tokens']} "
        f"tokens; answers of {min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):.0f}."
    )


def report(chosen: Any, todo: dict[str, Any], here: Any, versions: Any, rows: list[dict[str, Any]]) -> Result:
    missing = [] if any(row["side"].startswith("vllm") for row in rows) else ["vLLM was not measured."]
    shown = [row for row in rows if row["side"] in SIDES]
    ours = [row for row in rows if row["side"] == "covey"]
    return Result(
        name="regime" if "vllm" in chosen.sides else "regime-covey",
        device=here["device"],
        versions=merged(versions),
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=Plot(
            "Sampling at uneven load",
            "floor / wall time",
            {"floor / wall time": [1 / row["over_floor"] for row in shown]},
            [f"{row['case']}\n{row['side']}" for row in shown],
        ),
        notes=[*(description(case, settings) for case, settings in todo.items()), *missing],
        rates=here["rates"],
        settings={case: {k: v for k, v in settings.items() if k != "lengths"} for case, settings in todo.items()},
        command=command_line(),
        tiny=chosen.tiny,
        measures=[Measure(f"{row['case']}: wall time", row["seconds"], "s", row["repeats_s"]) for row in ours],
        runs=rows,
    )


if __name__ == "__main__":
    serve({"covey": covey_side, "vllm": vllm_side, "machine": machine})
    raise SystemExit(main())
