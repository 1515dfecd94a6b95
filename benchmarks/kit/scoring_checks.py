"""The checks of scoring.py over public data: each yields rows of (data, what, tried, as it should be, exceptions)."""

from __future__ import annotations

import asyncio
import collections
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.rewards import RewardError, resolve_rewards
from covey.types import Episode, Task
from kit.perturb import gold_arguments, wrong_answers, wrong_calls, wrong_test

ROOT = Path(__file__).parent.parent.parent
AST = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")


@dataclass(frozen=True)
class Row:
    data: str
    what: str
    tried: int
    right: int
    exceptions: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True)
class Try:
    """A reply and the score it should have."""

    name: str
    task: Task
    reply: str
    wanted: float


def lines(file: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(row) for row in text.splitlines()]


def attempt(name: str, answer: Any, reply: str, wanted: float, **columns: Any) -> Try:
    return Try(
        name, Task(name, ({"role": "user", "content": columns.pop("question", "?")},), answer, columns), reply, wanted
    )


def judge(data: str, what: str, reward: Any, tries: Iterable[Try], at_once: int = 4) -> Row:
    """Score all, a few at a time, with a line of progress on standard error."""
    rewards, todo, wrong = resolve_rewards(reward, None, {}), list(tries), []
    (name,) = rewards.names
    start = time.monotonic()

    async def all_of_them() -> None:
        left, done = iter(todo), 0

        async def some() -> None:
            nonlocal done
            for one in left:
                episode = Episode(one.task, (), (*one.task.messages, {"role": "assistant", "content": one.reply}))
                try:
                    rewards.check(one.task)
                    score = (await rewards(one.task, episode))[name]
                    said = f"{score:g}"
                except RewardError as error:
                    score, said = None, error.why
                except InputError as error:  # an answer that the reward cannot read
                    score, said = None, str(error).splitlines()[0]
                done += 1
                if score is None or abs(score - one.wanted) > 1e-9:
                    wrong.append(f"{one.name}: {said} for {one.reply[-60:]!r}")
                if sys.stderr.isatty() or done % 500 == 0:
                    print(
                        f"\r{data}, {what}: {done} of {len(todo)}, {time.monotonic() - start:.0f} s",
                        end="",
                        file=sys.stderr,
                    )

        await asyncio.gather(*(some() for _ in range(at_once)))

    asyncio.run(all_of_them())
    print(file=sys.stderr)
    return Row(data, what, len(todo), len(todo) - len(wrong), sorted(wrong))


# -- mathematics -------------------------------------------------------------------------------------------------------


def gsm8k(data: Path, sample: int | None) -> Iterator[Row]:
    rows = [
        (part, i, row) for part in ("train", "test") for i, row in enumerate(lines(data / "gsm8k" / f"{part}.jsonl"))
    ]
    rows = rows[:: _stride(rows, sample)]
    for reward in ("math_verify", "math_reward_string_equal"):
        yield judge(
            "GSM8K",
            f"gold answers ({reward})",
            reward,
            [attempt(f"{part} {i}", row["answer"], row["answer"], 1) for part, i, row in rows],
        )
    off = [attempt(f"{part} {i}", row["answer"], f"#### {_more(row['answer'])}", 0) for part, i, row in rows]
    yield judge("GSM8K", "one more than the gold answer", "math_verify", off)


def _more(answer: str) -> str:
    return str(int(answer.rpartition("####")[2].replace(",", "")) + 1)


def maths(data: Path, sample: int | None) -> Iterator[Row]:
    sets = {name: lines(data / "math_eval" / f"{name}.jsonl") for name in ("math500", "amc23", "aime24")}
    for name, rows in sets.items():
        tries = [
            attempt(f"{name} {i}", str(row["answer"]), f"\\boxed{{{row['answer']}}}", 1) for i, row in enumerate(rows)
        ]
        yield judge(name, "`\\boxed{gold}`", "math_verify", tries)
    solved = {"math500": sets["math500"], "math_train": lines(data / "math_train" / "math_train.jsonl")}
    for name, rows in solved.items():
        some = list(enumerate(rows))[:: _stride(rows, sample)]
        tries = [attempt(f"{name} {i}", row["answer"], row["solution"], 1) for i, row in some]
        yield judge(name, "full gold solutions", "math_verify", tries)
    answers = [str(row["answer"]) for rows in sets.values() for row in rows]
    wrong = wrong_answers(answers, 200)
    tries = [attempt(f"{how} of {gold}", gold, f"\\boxed{{{other}}}", 0) for how, gold, other in wrong]
    kinds = collections.Counter(how for how, _, _ in wrong)
    what = "perturbed (" + ", ".join(f"{count} {kind}" for kind, count in kinds.items()) + ")"
    yield judge("math500, amc23, aime24", what, "math_verify", tries)


# -- code --------------------------------------------------------------------------------------------------------------


def code(data: Path, sample: int | None) -> Iterator[Row]:
    from covey.config.schema import SandboxConfig
    from covey.rewards.code import code_reward
    from covey.rewards.function import reward
    from covey.sandbox import Sandbox

    sandbox = Sandbox.of(SandboxConfig(allow_weak=True, seconds=60.0))

    @reward(name="code")
    async def all_tests(final_answer: str, task: Task) -> float:
        return (await code_reward(final_answer, task, sandbox, all=True))["reward"]

    mbpp = lines(data / "code" / "mbpp.jsonl")
    clean = json.loads((data / "code" / "sanitized-mbpp.json").read_text())
    human = lines(data / "code" / "HumanEval.jsonl.gz")
    for name, rows, tries in (
        ("MBPP", mbpp, _mbpp),
        ("MBPP sanitized", clean, _mbpp),
        ("HumanEval", human, _humaneval),
    ):
        some = rows[:: _stride(rows, sample)]
        yield judge(name, "reference solutions pass", all_tests, [tries(row, False) for row in some], 2)
        yield judge(
            name, "they fail once an expected literal differs", all_tests, [tries(row, True) for row in some], 2
        )


def _mbpp(row: Mapping[str, Any], wrong: bool) -> Try:
    tests = [wrong_test(row["test_list"][0]), *row["test_list"][1:]] if wrong else row["test_list"]
    columns = {
        "test_list": tests,
        "test_setup_code": row.get("test_setup_code", ""),
        "test_imports": row.get("test_imports", []),
    }
    return attempt(f"MBPP {row['task_id']}", None, f"```python\n{row['code']}\n```", float(not wrong), **columns)


def _humaneval(row: Mapping[str, Any], wrong: bool) -> Try:
    test = wrong_test(row["test"]) if wrong else row["test"]
    columns = {"test": test, "entry_point": row["entry_point"], "prompt": row["prompt"]}
    return attempt(row["task_id"], None, row["canonical_solution"], float(not wrong), **columns)


# -- function calling --------------------------------------------------------------------------------------------------


def bfcl(data: Path, sample: int | None) -> Iterator[Row]:
    folder = data / "tools" / "bfcl"
    for category in (*AST, *LIVE):
        golds = {
            row["id"]: row["ground_truth"] for row in lines(folder / "possible_answer" / f"BFCL_v4_{category}.json")
        }
        rows = lines(folder / f"BFCL_v4_{category}.json")
        right, wrong = [], []
        for row in rows[:: _stride(rows, sample)]:
            good, bad = _calls(row, golds[row["id"]], category)
            right.append(good)
            wrong += bad
        yield judge(f"BFCL {category}", "ground-truth calls match", "bfcl", right)
        yield judge(f"BFCL {category}", "perturbed calls do not", "bfcl", wrong)
    for category in ("irrelevance", "live_irrelevance", "live_relevance"):
        tries = []
        for row in lines(folder / f"BFCL_v4_{category}.json"):
            columns = {"function": row["function"], "category": category}
            no_call = float("irrelevance" in category)
            call = tagged([(row["function"][0]["name"] if row["function"] else "f", {})])
            tries += [attempt(row["id"], None, "None of these functions will do.", no_call, **columns)]
            tries += [attempt(row["id"], None, call, 1 - no_call, **columns)]
        yield judge(f"BFCL {category}", "prose, and a call", "bfcl", tries)


def _calls(row: Mapping[str, Any], gold: Any, category: str) -> tuple[Try, list[Try]]:
    schemas = {one["name"]: one["parameters"] for one in row["function"]}
    columns = {"function": row["function"], "category": category, "ground_truth": gold}
    pairs = [next(iter(one.items())) for one in gold]
    calls = [(name, gold_arguments(values, schemas[name])) for name, values in pairs]
    name, values = pairs[0]
    bad = [
        attempt(f"{row['id']}, {how}", None, tagged(other), 0, **columns)
        for how, other in wrong_calls(calls, schemas[name], values)
    ]
    return attempt(row["id"], None, tagged(calls), 1, **columns), bad


def tagged(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>{one}</tool_call>" for one in written) or "No function is needed."


def rlla(data: Path, sample: int | None) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    rows = parquet.read_table(data / "tools" / "rlla_4k.test.parquet").to_pylist()
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    most = [4.0 if "<tool_call>" in gold else 1.0 for gold in golds]
    right = [attempt(f"rlla {i}", gold, gold, best) for i, (gold, best) in enumerate(zip(golds, most, strict=True))]
    yield judge("rlla", "gold answers get the most there is (4, or 1 without calls)", "rlla", right)
    wrong = [
        attempt(f"rlla {i}", gold, gold.replace("<tool_call>", "<tool>"), -3)
        for i, gold in enumerate(golds)
        if "<tool_call>" in gold
    ]
    yield judge("rlla", "without their opening tag: −3", "rlla", wrong)


# -- instructions ------------------------------------------------------------------------------------------------------


def ifeval(data: Path, sample: int | None) -> Iterator[Row]:
    sys.path.insert(0, str(ROOT))
    from tests.rewards.ifeval_cases import CASES

    for kind in sorted({case[0] for case in CASES}):
        tries = []
        for _, settings, right, wrong in (case for case in CASES if case[0] == kind):
            columns = {"instruction_id_list": [kind], "kwargs": [settings]}
            tries += [attempt(kind, None, reply, 1, **columns) for reply in right]
            tries += [attempt(kind, None, reply, 0, **columns) for reply in wrong]
        followed = sum(one.wanted for one in tries)
        yield judge(
            f"IFEval {kind}", f"by hand ({followed:g} follow, {len(tries) - followed:g} do not)", "ifeval", tries
        )


def oracles(data: Path, sample: int | None) -> Iterator[Row]:
    from kit.scorers import agreement

    yield from agreement(data, sample)


def _stride(rows: Sequence[Any], sample: int | None) -> int:
    return 1 if sample is None else max(1, len(rows) // sample)


CHECKS: dict[str, Callable[[Path, int | None], Iterator[Row]]] = {
    "gsm8k": gsm8k,
    "math": maths,
    "code": code,
    "bfcl": bfcl,
    "rlla": rlla,
    "ifeval": ifeval,
    "oracles": oracles,
}
