"""What fuzzing has found, each as the smallest input that showed it."""

from __future__ import annotations

import asyncio
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from covey.agents.tools import mcp_connection
from covey.agents.tools.mcp import McpTool, _check_schema
from covey.agents.tools.mcp_connection import Connection, Server
from covey.agents.tools.tool import ToolFailure
from covey.algorithms import ALGORITHMS as CATALOGUE
from covey.algorithms import schema
from covey.config import compose, expand_sweep
from covey.config.read import read_env_file, read_yaml
from covey.errors import InputError
from covey.gateway.openai_api import RequestRefused, read_messages, read_rewards
from covey.models.loading import pick_device, pick_dtype
from covey.rewards import REWARDS, resolve_rewards
from covey.rewards.bfcl import CallParseError, parse_calls
from covey.rewards.ifeval import count_sentences
from covey.rewards.judge import read_mark
from covey.rewards.rewardset import find_conditions
from covey.sandbox.hidden_tests import hidden_tests, solution_names
from covey.tasks import reading
from covey.tasks.check import check_files
from covey.tasks.files import find_files, read_tasks
from covey.telemetry.history import read_run
from covey.telemetry.key_metrics import ABSENT, format_duration
from covey.training.folder import find_unfinished
from covey.workers.handle import LENGTH, MAX_FRAME, FrameReader, InvalidFrame
from tests.faults.fuzzing import bounded
from tests.rewards.replies import score, task_of

ALGORITHMS: dict[str, type] = {name: schema(name) for name in CATALOGUE}
LONG = 100_000  # characters: quadratic time on so many takes minutes, and linear time milliseconds

# -- data files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ('{"question": ' + "[" * 5000 + "]" * 5000 + "}", "nested more than 64 levels deep"),
        ('{"question": "?", "answer": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 levels deep"),
        ('{"question": "?", "answer": ' + "9" * 5000 + "}", "a number has too many digits at column 29"),
        ('{"question": "?", "answer": "\\ud800"}', "half of a surrogate pair at column 30"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_that_nothing_after_it_can_take_is_told_with_its_line(
    tmp_path: Path, line: str, output: str, suffix: str
) -> None:
    path = tmp_path / f"d{suffix}"
    path.write_text('{"question": "1", "answer": 1}\n' + line if suffix == ".jsonl" else f"\n{line}")
    with pytest.raises(InputError, match=rf"d{suffix}, line [12]: not JSON") as error:
        read_tasks("data.train_files", str(path))
    assert output.rpartition(" at column")[0] in str(error.value) and len(str(error.value)) < 1000
    if suffix == ".jsonl":
        assert output in str(error.value)


def test_a_whole_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "\\ud83d\\ude00", "answer": 1}')
    assert read_tasks("x", str(path))[0].messages[0]["content"] == "😀"


def test_a_small_gzip_file_that_holds_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_UNPACKED", 1 << 20)
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(InputError, match="unpacks to more than 1 MiB"):
        read_tasks("x", str(path))
    rows = b'{"question": "1+1", "answer": 2}\n'
    path.write_bytes(gzip.compress(rows))
    assert len(read_tasks("x", str(path))) == 1


def test_a_long_cell_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text(f"question,answer\n{'x' * 200_000},1\n")
    assert len(read_tasks("x", str(path))[0].messages[0]["content"]) == 200_000


@pytest.mark.parametrize("messages", ['["x"]', "[5]", "[null]", '[["role", "assistant"]]'])
def test_checking_messages_of_wrong_shapes(tmp_path: Path, messages: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f'{{"messages": {messages}}}')
    (mistake,) = check_files([str(path)]).mistakes
    assert "messages[0] must be an object" in str(mistake)


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/x.jsonl", "a\x00b"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(InputError, match=r"data\.train_files"):
        find_files("data.train_files", name)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        *("learner.lr=" + "9" * 5000, "learner.beta1=1" + "0" * 400, "model.name=\udce9"),
        "data.options=" + "{a:" * 2000 + "1" + "}" * 2000,
        *(
            f"{key}=[]"
            for key in ("mode.name", "algorithm.name", "algorithm.loss", "agent", "rollout.name", "data.name")
        ),
    ],
)
def test_words_of_a_command_line_that_cannot_be_settings(word: str) -> None:
    with pytest.raises(InputError) as error:
        compose([word], algorithms=ALGORITHMS)
    str(error.value).encode()


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("a: &a [*a]", "more than 20,000 values"),
        ("reward.options: &o {x: *o}", "more than 20,000 values"),
        ("[" * 3000, "more than 20,000 values"),
        ("? [a, b]\n: 1", "line 1: a key must be a word"),
        ("learner.lr: 2020-99-99", "line 1: 2020-99-99 cannot be read"),
        ('model.name: "\\uD800"', "line 1: half of a surrogate pair"),
    ],
)
def test_files_of_settings_that_are_no_settings(tmp_path: Path, text: str, output: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"my\.yaml") as error:
        compose([], algorithms=ALGORITHMS, config_path=path)
    assert output in str(error.value)


def test_a_sweep_without_end() -> None:
    for words in (["learner.lr=range(0,1000000000)"], ["a=range(1000)", "b=range(1000)"]):
        with bounded(10), pytest.raises(InputError, match="makes more than 10,000 runs"):
            expand_sweep(words)
    assert len(expand_sweep(["a=range(100)", "b=range(100)"])) == 10_000


def test_an_error_does_not_repeat_a_book() -> None:
    with pytest.raises(InputError) as error:
        compose(["model.name=sort(1)" + "9" * 50_000], algorithms=ALGORITHMS)
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("device", ["1", "x", "cuda:x", "meta", "vulkan"])
def test_devices_that_are_none(device: str) -> None:
    with pytest.raises(InputError, match=r"model\.device="):
        pick_device(device)


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(InputError, match=r"unknown model\.dtype  bf16"):
        pick_dtype("bf16", torch.device("cpu"))


# -- scorers ---------------------------------------------------------------------------------------------------------


def test_replies_that_repeat_a_mark_are_scored_at_once() -> None:
    """Each took minutes, or seconds that grow with the square of the length."""
    with bounded(10):
        assert count_sentences(". " * (LONG // 2)) == 1
        assert count_sentences("A word. " + ". " * (LONG // 2)) == 2
        assert read_mark("9" * LONG + "x", 10) is None
        composite = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        assert score("ifeval_composite", "<think>" * (LONG // 7), None, **composite)["ifeval_composite"] == 0
        with pytest.raises(CallParseError):
            parse_calls("<tool_call>" * (LONG // 11))


def test_marks_of_a_judge_are_read_as_before() -> None:
    marks = {"7/10": 7, "Score: 7.5": 7.5, "-3": None, "10-7/10": None, "I say\n8": 8, "8 or 9": None, "12": None}
    assert {reply: read_mark(reply, 10) for reply in marks} == marks


def test_arguments_without_end_are_a_wrong_call_and_no_failure() -> None:
    task = task_of(None, tool_calls=[{"name": "f", "arguments": {}}])
    call = {"function": {"name": "f", "arguments": "[" * 9000}}
    from tests.rewards.replies import episode_of, scored

    assert scored("tool_call", task, episode_of(task, "", tool_calls=[call]))["tool_call"] == 0


@pytest.mark.parametrize(
    ("name", "answer", "columns"),
    [
        ("ifeval", None, {"instruction_id_list": None, "kwargs": []}),
        ("ifeval", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [7]}),
        ("bfcl", None, {"category": "simple", "function": "[" * 9000, "ground_truth": []}),
        ("bfcl", None, {"category": "simple", "function": [7], "ground_truth": [7]}),
        ("code_reward", None, {"test_list": None}),
    ],
)
def test_columns_that_a_reward_cannot_read_are_told_before_training(
    name: str, answer: Any, columns: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match="task t"):
        resolve_rewards(REWARDS[name], None, {}).check(task_of(answer, **columns))


@pytest.mark.parametrize("source", ["\x00", "\ud800", "(" * 5000, "-" * 100_000 + "1"])
def test_hidden_tests_that_are_no_python(source: str) -> None:
    with pytest.raises(InputError, match="a hidden test is not Python"):
        solution_names([source], "")


def test_hidden_tests_of_a_wrong_type() -> None:
    with pytest.raises(InputError, match="no tests in a row"):
        hidden_tests({"test_list": 7})


@pytest.mark.parametrize("bar", ["--", "1e", ".", "+-1"])
def test_a_bar_that_is_no_number(bar: str) -> None:
    with pytest.raises(InputError, match=r"reward\.only_if\.a"):
        find_conditions([], {"a": f"b>={bar}"}, ["a", "b"])


def test_replies_do_not_write_to_the_console() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_calls("[1if 2else 3]") == []
        assert score("countdown", "3(7)+25", None, numbers=[3, 7, 25], target=46)["countdown"] == 0


# -- run folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[]", "{}", "7", '{"project": "p"}', "[" * 5000])
def test_resuming_beside_a_damaged_run(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "2026-01-01" / "10-00-00"
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "run.json").write_text(text)
    output: list[str] = []
    assert find_unfinished(tmp_path, "p", "e", "f", output.append) is None
    assert len(output) == 1 and "is damaged" in output[0] and output[0].endswith("that run is not resumed")


def test_a_name_that_no_run_can_have() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_run(Path("x" * 300))


def test_a_time_without_end() -> None:
    assert format_duration(float("inf")) == format_duration(float("nan")) == ABSENT


# -- other ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), "1", None])
def test_a_posted_reward_beyond_all_floats(value: Any) -> None:
    with pytest.raises(RequestRefused, match="finite number"):
        read_rewards({"reward": value})


@pytest.mark.parametrize("calls", [7, 1.5, "x", {"a": 1}])
def test_tool_calls_that_are_no_list(calls: Any) -> None:
    with pytest.raises(RequestRefused, match="must be a list"):
        read_messages([{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("length", [0, 1, MAX_FRAME + 1, 2**63, 2**64 - 1])
def test_a_length_that_nobody_would_send(length: int) -> None:
    with pytest.raises(InvalidFrame, match="a length of"):
        FrameReader().feed(LENGTH.pack(length))


def test_more_than_was_announced() -> None:
    with pytest.raises(InvalidFrame, match="3 bytes too many"):
        FrameReader().feed(LENGTH.pack(4) + b"1234567")


@pytest.mark.parametrize(
    "wrong", [{"type": 5}, {"properties": 7}, {"required": "x"}, {"type": "object", "x": "\ud800"}]
)
def test_a_tool_servers_schema_that_is_none(wrong: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(InputError, match=r"'t' of the server s: its inputSchema is not a JSON schema"):
        _check_schema(Server("s", command=("x",)), "t", wrong)


def test_schemas_may_be_true_and_references_may_lead_nowhere() -> None:
    pytest.importorskip("jsonschema")

    def made(schema: dict[str, Any]) -> McpTool:
        return McpTool("t", "", lambda: None, (), input_schema=schema)

    assert made({"type": "object", "properties": {"x": True}}).usage() == "expected: t(x: any (optional))"
    for reference in ("#/nowhere", "#"):
        with pytest.raises(ToolFailure, match="the schema of t"):
            made({"properties": {"x": {"$ref": reference}}, "allOf": [{"$ref": "#"}]}).check({"x": {}})


def test_a_list_of_tools_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Page:
        tools = (1,) * 300
        next_cursor = "more"

    class Client:
        async def list_tools(self, cursor: str | None) -> Page:
            return Page()

    async def use(self: Connection, what: str, listed: Any, seconds: float) -> Any:
        return await listed(Client())

    monkeypatch.setattr(Connection, "_use", use)
    with pytest.raises(ToolFailure, match=f"more than {mcp_connection.MAX_TOOLS} tools"):
        asyncio.run(Connection(Server("s", command=("x",))).tools())


def test_json_in_strings_of_a_message_may_be_anything() -> None:
    for arguments in ("[" * 9000, '{"a": ' * 500 + "1" + "}" * 500, '{"a": "\\ud800"}', '{"a": NaN}'):
        call = {"function": {"name": "f", "arguments": arguments}}
        (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
        json.dumps(message)


def test_a_parquet_file_with_text_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["abcdefgh"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abc\xff\xfefgh"))
    with pytest.raises(InputError, match=r"d.parquet: not a readable Parquet file \('utf-8' codec"):
        read_tasks("data.train_files", str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.csv", "x" * 100_000 + "\n1\n"),
        ("d.csv", "x" * 100_000 + "," + "x" * 100_000 + "\n1,2\n"),
        ("d.json", json.dumps({"x" * 100_000: 1})),
        ("d.jsonl", 2 * (json.dumps({"question": "?", "data_id": "x" * 100_000}) + "\n")),
        ("d.jsonl", json.dumps({f"column {n}": n for n in range(10_000)}) + "\n"),
    ],
)
def test_a_message_shows_no_name_of_any_length(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as refused:
        read_tasks("data.train_files", str(tmp_path / name))
    assert "…" in str(refused.value) and len(str(refused.value)) < 2000


def test_zero_bytes_in_an_env_file_and_in_a_files_name(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=1\nB=~\0\n")
    with pytest.raises(InputError, match=r"\.env, line 2: contains a zero byte"):
        read_env_file(tmp_path / ".env")
    with pytest.raises(InputError, match="cannot be read"):
        read_yaml("\0")


def test_a_reference_to_what_does_not_fit_is_told() -> None:
    algorithms = {name: schema(name) for name in CATALOGUE}
    with pytest.raises(InputError, match="could not be converted to Integer"):
        compose(["model=tiny-nowhere", "model.lora.rank=${model.name}"], algorithms=algorithms)
    with pytest.raises(InputError, match=r"agent.tool_options must be dict\[str, Any\], got 8"):
        compose(["rollout.group_size=8", "agent.tool_options=${rollout.group_size}"], algorithms=algorithms)
