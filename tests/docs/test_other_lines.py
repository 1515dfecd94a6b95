"""Every other command line of the pages: `covey eval`, `covey data`, ..., `make` and `pip`. Scripts are run in
test_scripts.py. None is left out unless its block says why."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.agents.formats.detect import FORMATS
from covey.cli.main import main
from covey.config import recipe_names
from tests.conftest import shared_folder
from tests.docs.pages import BLOCKS, COMMANDS, ROOT, Command, read_commands
from tests.docs.scaled import scaled
from tests.docs.workplace import put_models

COVEY = [c for c in COMMANDS if c.program == "covey" and (c.words[1] != "train" or c.shown) and c.excuse is None]
SERVERS = ("serve", "dash")
SCALED = {  # words that are added to a command
    "eval": ["rollout.max_tokens=4", "--limit", "2"],
    "sample": ["rollout.max_tokens=4", "model.context_length=4096"],
    "serve": ["rollout.max_tokens=4"],
}
FILES = {  # of a page whose commands read files of their own
    "covey data check train.jsonl": {
        "train.jsonl": '{"question": "1+1", "answer": "2"}\n{"question": oops}\n{"question": "2+2", "answer": ""}\n'
        '{"query": "x"}\n{"question": "1+1", "answer": "2"}\n'
    },
}


def test_every_command_line_is_run_or_says_why_not() -> None:
    """Others than these have no test that would run them."""
    left = [c.place for c in COMMANDS if c.program not in ("covey", "make", "python", "pip") and c.excuse is None]
    assert left == []


def test_a_shell_block_holds_commands_and_nothing_else() -> None:
    for block in BLOCKS:
        if block.language == "sh":
            lines = [line for line in block.lines() if line.strip() and not line.startswith("#")]
            assert len(lines) == len(read_commands(block)), block.place


def test_blocks_of_other_languages_are_known() -> None:
    """Formats of tool calls: tests/agents/test_pages.py. JSON, JSON lines and YAML must be that."""
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines()), block.place
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.excuse is None:
            assert block.language in ("", "sh", "python", *FORMATS), block.place


def test_whoever_says_why_not_is_there() -> None:
    for block in BLOCKS:
        texts = [command.text for command in read_commands(block)]
        for words in filter(None, block.excuses):
            assert any(text.startswith(words) for text in texts), f"{block.place}: no line begins with {words}"
        assert not block.excuse or texts or block.language in ("python", "sql"), f"{block.place}: needs no reason"


# -- covey -----------------------------------------------------------------------------------------------------------


def words_of(command: Command) -> list[str]:
    name, *rest = command.words[1:]
    if name == "sft":
        return [name, *scaled(rest)]
    more = SCALED.get(name, [])
    if "--limit" in rest:
        more = [word for word in more if word not in ("--limit", "2")]
    if any(word.startswith("rollout.max_tokens=") for word in rest):
        rest = [word for word in rest if not word.startswith("rollout.max_tokens=")]
    return [name, *rest, *more]


@pytest.mark.parametrize("command", [pytest.param(c, id=c.place) for c in COVEY])
def test_a_command_runs(
    command: Command,
    place: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare_for(command, place, tiny_model_folder, monkeypatch)
    capsys.readouterr()
    words = words_of(command)
    if words[0] in SERVERS:
        monkeypatch.setattr(sys, "stdout", EndsServers())
    code = main(words)
    told = capsys.readouterr()
    if not command.shown or words[0] in SCALED:  # figures of a real model are no page's promise
        assert code == (130 if words[0] == "dash" else 0), told.err
        return
    assert code == (2 if "nothing was started" in command.shown else code)
    shown, _, _ = command.shown.partition("…")
    printed = "\n".join(line.rstrip() for line in (told.out + told.err).splitlines())
    assert (printed if shown == command.shown else printed[: len(shown.strip())]) == shown.strip()


def prepare_for(command: Command, place: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a line finds: its models and files, the network where it has one, raw data sets where they are at hand."""
    names = command.words[2:3]
    put_models([*command.words, *(["--config-name", *names] if {*names} & {*recipe_names()} else [])], model)
    if "--adapter" in command.words:
        checkpoint = Path(command.words[2])
        small = ["model.lora.rank=2", f"model={model}", "data=sort", "loop.total_steps=1", "logging.output_dir=lora"]
        assert main(["train", *scaled(small), "loop.save_final=true"]) == 0
        shutil.rmtree(checkpoint)
        next(Path("lora").glob("*/*/checkpoints/step-*")).rename(checkpoint)
    for name, text in FILES.get(command.text, {}).items():
        Path(name).write_text(text)
    monkeypatch.setenv("DATA_DIR", "data")
    if "data prepare" in command.text and "--from" not in command.text:
        monkeypatch.setattr("urllib.request.urlopen", unreachable if command.shown else nearby)
    if "raw/" in command.text or command.text.startswith("covey data show gsm8k"):
        if not shared_folder().is_dir():
            pytest.skip("the folder of public data is not here")
        for name in ("code", "qa", "gsm8k"):
            shutil.rmtree(f"raw/{name}", ignore_errors=True)
            Path("raw", name).symlink_to(shared_folder() / "data" / name, target_is_directory=True)
    if command.text.startswith("covey data show gsm8k"):
        shutil.rmtree("data/gsm8k")
        assert main(["data", "prepare", "gsm8k", "--from", "raw/gsm8k"]) == 0


def unreachable(address: str, timeout: float) -> Any:
    raise urllib.error.URLError(OSError(-2, "Name or service not known"))


def nearby(address: str, timeout: float) -> Any:
    """The small files that lie in raw/, as if they came from a set's home."""
    reply: Any = io.BytesIO(Path("raw/gsm8k", address.rpartition("/")[2]).read_bytes())
    reply.headers = {"Content-Length": str(len(reply.getvalue()))}
    return reply


class EndsServers(io.StringIO):
    """A standard output that presses Ctrl-C as soon as a server says that this ends it."""

    def write(self, text: str) -> int:
        if "Ctrl-C ends it" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


# -- make, pip -------------------------------------------------------------------------------------------------------

MAKE = [c for c in COMMANDS if c.program == "make" and c.excuse is None]


@pytest.mark.parametrize("target", sorted({word for c in MAKE for word in c.words[1:]}))
def test_make_has_the_target(target: str) -> None:
    """Its commands are printed and not run. Those that are scripts of this project are there."""
    found = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout
    for script in re.findall(r"(?:benchmarks|tools)/\w+\.py", found.stdout):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize(
    "command", [pytest.param(c, id=c.place) for c in COMMANDS if c.program == "pip" and c.excuse is None]
)
def test_what_is_installed_is_an_extra_of_this_package(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"^pip install -e '\.\[([\w,-]+)\]'$", command.text)
    assert set(named.split(",")) <= set(extras)
