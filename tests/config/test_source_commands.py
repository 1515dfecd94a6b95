"""Every training command of the five source documents, with only its entry point replaced by `covey train`.

Nothing is started (`--validate-only`): what a machine lacks, and what Covey cannot do yet, is a warning there. The
documents lie beside the repository.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from covey.app import compose as words
from covey.cli.main import main
from covey.models import loading
from tests.conftest import shared_folder

DOCUMENTS = {
    "gvpo guide": "000",
    "minimal script": "001",
    "agent guide": "002",
    "gdpo guide": "003",
    "grpo guide": "004",
}
VARIABLE = r"[A-Z][A-Z0-9_]*=(?:\"[^\"]*\"|\S+)"
ENTRY = re.compile(
    rf"\s*(?P<variables>(?:{VARIABLE} +)*)"
    r"(?:python -m agentfly\.cli train|python (?:\S*/)?(?P<python>train_gvpo|grpo-sync|grpo-async)\.py"
    r"|bash train_deepscaler_(?P<shell>\S+)\.sh|sbatch \S*/grpo-(?P<slurm>sync|async)-multi-node\.sbatch)(?P<rest> .*)?"
)
EXPORT = re.compile(rf"\s*export (?P<variable>{VARIABLE})")
SETTINGS = re.compile(r"\s*[a-z_]+(?:\.[A-Za-z_]+)+=\S+(?: [a-z_]+(?:\.[A-Za-z_]+)+=\S+)*")
SCRIPTS = {  # a script without arguments is a recipe
    "gdpo_deepseek-r1-1.5b": "gdpo_deepscaler_1.5b",
    "gdpo_deepseek-r1-7b": "gdpo_deepscaler_7b",
    "gdpo_qwen3-4b": "gdpo_deepscaler_qwen3_4b",
    "dgdo_deepseek-r1-1.5b": "dgdo_deepscaler_1.5b",
    "dgdo_deepseek-r1-7b": "dgdo_deepscaler_7b",
    "gdpo_b200": "gdpo_deepscaler_1.5b_b200",
}


@dataclass(frozen=True)
class Command:
    text: str  # as the document writes it
    words: list[str]  # for `covey train`
    variables: dict[str, str] = field(default_factory=dict)


def read(document: str) -> str:
    """With the lines that go on joined."""
    (path,) = (shared_folder() / "seeds").glob(f"{DOCUMENTS[document]}_*.txt")
    return re.sub(r"\s*\\\n\s*", " ", path.read_text())


def find_commands(document: str) -> Iterator[Command]:
    """Fences are not looked at: one of the documents leaves one open."""
    exported: dict[str, str] = {}
    for line in read(document).splitlines():
        if found := EXPORT.fullmatch(line):
            name, _, value = found["variable"].partition("=")
            exported[name] = value.strip('"')
        elif not (found := ENTRY.fullmatch(line)):
            exported = exported if line.strip() else {}  # an empty line ends what goes together
        elif "[OPTIONS]" not in line:
            given = dict(word.split("=", 1) for word in shlex.split(found["variables"]))
            yield Command(
                line.strip(), entry(found) + shlex.split(found["rest"] or "", comments=True), exported | given
            )


def entry(found: re.Match[str]) -> list[str]:
    """What stands for the entry point, besides `covey train`."""
    if found["shell"]:
        return ["--config-name", SCRIPTS[found["shell"]]]
    if found["slurm"]:
        return ["--config-name", "grpo_gsm8k", f"mode={found['slurm']}"]  # in the script that `covey slurm` writes
    return []


def find_files(document: str) -> list[str]:
    """YAML: whole files, and the paragraphs of pieces that the document tells people to put into theirs."""
    found = []
    for block in re.findall(r"^```yaml\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE):
        found += [block] if "python_args:" in block else re.split(r"\n\s*\n", block.strip())
    return found


def listed(find: object) -> list[object]:
    if not (shared_folder() / "seeds").is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the source documents are not here"))]
    return [pytest.param(item, id=f"{document}-{i}") for document in DOCUMENTS for i, item in enumerate(find(document))]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, without the hub. Schemas and the built-in model do not change between commands."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(words, "algorithm_schemas", _schemas)
    monkeypatch.setattr(loading, "open_source", _open_source)
    monkeypatch.setattr(words, "export", lambda variables: None)
    monkeypatch.setattr("covey.tasks.load.GENERATED_TRAIN", 64)
    monkeypatch.setattr("covey.tasks.load.GENERATED_VALIDATION", 8)
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "HF_TOKEN", "SERPER_API_KEY", "DATA_DIR", "CKPT_DIR", "VERBOSITY"):
        monkeypatch.delenv(name, raising=False)


_schemas = functools.cache(words.algorithm_schemas)
_open_source = functools.cache(loading.open_source)


def test_all_of_them_are_found(shared: Path) -> None:
    counts = {document: len(list(find_commands(document))) for document in DOCUMENTS}
    assert counts == {"gvpo guide": 9, "minimal script": 1, "agent guide": 3, "gdpo guide": 8, "grpo guide": 9}
    assert len(find_files("gvpo guide")) == 22
    custom = [c.variables for c in find_commands("gdpo guide") if c.variables]
    assert custom == [{"DATA_DIR": "/custom/path/to/data", "CKPT_DIR": "/custom/path/to/checkpoints"}]


@pytest.mark.parametrize("command", listed(find_commands))
def test_a_command_of_the_documents_is_valid(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    if "--config" in command.words:  # the file that the document asks to write
        (text,) = (text for text in find_files("gvpo guide") if "python_args:" in text)
        Path("my_config.yaml").write_text(text)
    assert main(["train", *command.words, "--validate-only"]) == 0, capsys.readouterr().err
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(("valid: ", "the settings are valid, but "))
    assert not Path("outputs").exists() and not Path("multirun").exists()


@pytest.mark.parametrize("command", listed(lambda d: (c for c in find_commands(d) if "grpo-" in c.text)))
def test_a_command_for_the_grpo_scripts_is_valid_on_their_own_default(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """They start from their configuration for GSM8K, where nothing else is said."""
    recipe = [] if "--config-name" in command.words else ["--config-name", "grpo_gsm8k"]
    assert main(["train", *recipe, *command.words, "--validate-only"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "algorithm  grpo" in out
    assert "does not go with" not in out


@pytest.mark.parametrize("text", listed(find_files))
def test_a_file_of_the_documents_is_valid(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_config.yaml").write_text(text)
    assert main(["train", "--config", "my_config.yaml", "--validate-only"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", listed(lambda d: filter(SETTINGS.fullmatch, read(d).splitlines())))
def test_a_line_of_settings_is_valid(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *shlex.split(line), "--validate-only"]) == 0, capsys.readouterr().err
