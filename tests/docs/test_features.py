"""docs/features.md: every row is complete, every cell has its source, and Covey's cells are true.

What it says about other projects is checked by tools/check_features.py in copies of them, which are not part of this
repository; the rules of that tool are tested below."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from covey.algorithms import ALGORITHMS
from covey.cli.main import main
from tests.docs.pages import ROOT

PAGE = ROOT / "docs/features.md"
TEXT = PAGE.read_text()
PEERS = ("verl", "TRL", "prime-rl", "SkyRL")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_features", ROOT / "tools/check_features.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_features"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
ROWS: list[list[str]] = list(tool.rows(TEXT))
OURS = {row[0]: row[1] for row in ROWS}
LABELS: dict[str, tuple[str, str]] = {
    label: (repository, path) for label, repository, path in tool.DEFINITION.findall(TEXT)
}
CODE = {code for cell in OURS.values() for code in re.findall(r"`([^`]+)`", cell)}
COMMANDS = sorted({code for code in CODE if code.startswith("covey train ")})
SETTINGS = sorted({code.partition("=")[0] for code in CODE if re.fullmatch(r"[a-z]+(\.\w+)+(=\w+)?", code)})


def test_every_row_has_a_feature_and_five_cells() -> None:
    assert TEXT.count("| feature | Covey | verl | TRL | prime-rl | SkyRL |") == len(
        re.findall("^\\| feature", TEXT, re.M)
    )
    assert len(ROWS) > 100
    assert [row[0] for row in ROWS if len(row) != 6 or not all(row)] == []
    assert len(OURS) == len(ROWS), "a feature has one row"


@pytest.mark.parametrize("column", range(len(PEERS)), ids=PEERS)
def test_every_cell_of_another_project_has_a_source(column: int) -> None:
    for row in ROWS:
        cell = row[2 + column]
        paths = [code for code in tool.code_of(cell) if tool.PATH.match(code)]
        assert tool.links_of(cell, LABELS) or paths or re.match("not found: `", cell), (row[0], cell)


def test_labels_are_defined_used_and_lead_to_the_commits_of_the_page() -> None:
    cells = [cell for row in ROWS for cell in row[2:]]
    used = {label for cell in cells for label in re.findall(r"\[([^]]+)](?![(:])", cell)}
    assert used == LABELS.keys()
    commits = set(re.findall(r"^\[[^]]+]: https://github\.com/([^/]+/[^/]+)/blob/([0-9a-f]{40})/", TEXT, re.MULTILINE))
    assert len({repository for repository, _ in commits}) == len(commits) == 5
    assert all(f"`{commit[:7]}`" in TEXT for _, commit in commits)


def test_the_algorithms_are_those_of_the_catalogue() -> None:
    named = {
        cell: name for cell in OURS.values() if (name := re.fullmatch(r"\[`(\w+)`]\(algorithms/(\w+)\.md\)", cell))
    }
    assert all(match[1] == match[2] for match in named.values())
    assert sorted(match[1] for match in named.values()) == sorted(ALGORITHMS)


def test_a_cell_of_covey_names_a_page_or_a_command() -> None:
    """That linked pages and headings exist: tests/test_docs.py."""
    for feature, cell in OURS.items():
        assert re.search(r"]\([\w./#-]+\)", cell) or "`covey " in cell or cell.startswith("no: "), feature


@pytest.mark.parametrize("name", ALGORITHMS)
def test_covey_algorithms_explains_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_what_its_cell_says(command: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused, and the message says what there is instead."""
    assert all(cell.startswith("no: ") for cell in OURS.values() if command in cell)
    assert main(command.split()[1:]) == 2
    told = capsys.readouterr()
    assert re.search("known: |use rollout=|did you mean", told.out + told.err)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_that_it_names_exist(setting: str) -> None:
    assert main(["config", "explain", setting]) == 0


def test_what_is_missing_is_in_the_last_section() -> None:
    """One word of each row whose answer is no, so that a reader of the section misses none of them."""
    section = TEXT.partition("## What Covey does not have")[2].lower()
    words = {
        "Algorithms of the others": "rae",
        "Offline preferences, reward models: DPO, KTO, …": "kto",
        "Forward KL, Jensen–Shannon": "jensen",
        "Several teachers": "several teachers",
        "A teacher with another tokenizer": "another tokenizer",
        "Self-play against past checkpoints": "past checkpoints",
        "vLLM, vision-language models": "vision-language models in vllm",
        "Sampling in FP8": "fp8 sampling",
        "TorchTitan, VeOmni, Automodel": "torchtitan",
        "Sequence or context parallelism": "sequence",
        "Training in FP8": "fp8 training",
        "Optimisers other than AdamW": "adamw",
        "Prefill and decode on separate devices": "prefill",
        "AMD GPUs, NPUs": "npus",
        "Replay of the engine's routing (R3)": "replay of the routing",
        "Load-balancing loss": "load-balancing",
        "Recurrent layers, latent attention, sinks (Qwen3.5, DeepSeek-V3, gpt-oss)": "gpt-oss",
        "Several adapters in one run (Tinker API)": "several adapters",
        "Images from URLs": "urls",
        "OpenReward, NeMo Gym, TextArena": "textarena",
        "Ready harnesses: Claude Code, Codex, mini-swe-agent": "harnesses",
    }
    for feature, cell in OURS.items():
        if cell.startswith("no"):
            assert words.get(feature, feature.lower().removesuffix(" parallelism")) in section, feature
    assert words.keys() <= OURS.keys()


# -- the tool ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> object:
    """A released package, whose algorithm was renamed since the checkout."""
    files = {
        "wheel/verl/core.py": "NAMES = ['grpo', 'luspo2']  # Sequence Packing",
        "checkout/verl/core.py": "NAMES = ['grpo', 'gpg']",
        "checkout/docs/page.md": "how to use `grpo`",
        "checkout/tests/test.py": "mcp",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tool.Project("verl", [tmp_path / "wheel", tmp_path / "checkout"])


@pytest.mark.parametrize(
    ("cell", "wrong"),
    [
        ("`grpo` [core.py], as [page.md] says", []),
        ("`gpg` [core.py]", ["gpg is in none of verl/core.py"]),  # no longer in the package
        ("`luspo2` `verl/core.py`", []),  # the package alone
        ("`gpg` `verl/core.py`", ["gpg is in none of verl/core.py"]),
        ("`grpo`", ["grpo is in none of no files"]),
        ("[gone.py]", ["no file verl/gone.py"]),
        ("`verl/nothing.py`", ["no file verl/nothing.py"]),
        ("not found: `luspo`, `mcp`", []),  # whole words; tests are not searched
        ("not found: `sequence packing`", ["sequence packing is found: "]),
        ("not found: `luspo`; the page has `grpo` [page.md]", []),
        ("not found: `luspo`; the page has `dapo` [page.md]", ["dapo is in none of docs/page.md"]),
    ],
)
def test_the_tool_finds_what_is_wrong(project: object, cell: str, wrong: list[str]) -> None:
    labels = {
        "core.py": ("owner/verl", "verl/core.py"),
        "page.md": ("owner/verl", "docs/page.md"),
        "gone.py": ("owner/verl", "verl/gone.py"),
    }
    found = list(tool.violations(cell, project, labels, []))
    assert len(found) == len(wrong) and all(
        message.startswith(start) for message, start in zip(found, wrong, strict=True)
    )


def test_the_tool_asks_for_every_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["verl=somewhere"]) == 2
    assert "no folder for: trl, prime-rl, skyrl" in capsys.readouterr().out
