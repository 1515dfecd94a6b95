"""`.env`: read as a shell would read it, and never over the shell's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import covey
from covey.cli.main import main
from covey.config.read import export, read_env_file
from covey.errors import InputError

SOURCE = str(Path(covey.__file__).parents[1])
FILE = """\
# keys

WANDB_API_KEY=abc123
export HF_TOKEN="hf token"   # with a comment
  export SERPER_API_KEY='it is $HOME'
HF_HOME=$BASE/hub
DATA_DIR="${BASE}/my data"
CKPT_DIR=${DATA_DIR}#1
PLAIN=a#b # not part of it
ESCAPED="a \\"b\\" \\$BASE"
EMPTY=
QUOTED_EMPTY=""
SPACED = two words
"""
MEANT = {
    "WANDB_API_KEY": "abc123",
    "HF_TOKEN": "hf token",
    "SERPER_API_KEY": "it is $HOME",
    "HF_HOME": "/base/hub",
    "DATA_DIR": "/base/my data",
    "CKPT_DIR": "/base/my data#1",
    "PLAIN": "a#b",
    "ESCAPED": 'a "b" $BASE',
    "SPACED": "two words",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"BASE": "/base", "PATH": os.environ["PATH"]})


def test_the_lines_of_a_file() -> None:
    Path(".env").write_text(FILE)
    assert read_env_file(Path(".env")) == MEANT


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell to compare with")
def test_a_shell_reads_the_same() -> None:
    """But for spaces around =, which a shell refuses."""
    Path("for_sh").write_text("\n".join(line for line in FILE.splitlines() if not line.startswith("SPACED")))
    named = [name for name in MEANT if name != "SPACED"]
    script = "set -a; . ./for_sh; " + "; ".join(f'printf "%s\\n" "${name}"' for name in named)
    result = subprocess.run(["sh", "-c", script], env=dict(os.environ), capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [MEANT[name] for name in named]


def test_no_file_sets_nothing() -> None:
    assert read_env_file(Path(".env")) == {}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("HF_TOKEN", ".env, line 2: not a variable"),
        ("1KEY=a", ".env, line 2: not a variable"),
        ("HF_TOKEN='open", ".env, line 2: the value of HF_TOKEN cannot be read"),
        ('HF_TOKEN="a" b', ".env, line 2: the value of HF_TOKEN cannot be read"),
    ],
)
def test_a_line_that_is_no_variable(line: str, text: str) -> None:
    Path(".env").write_text(f"# first\n{line}\n")
    with pytest.raises(InputError, match=f"^{text}"):
        read_env_file(Path(".env"))


NEVER_ENDING = """
from pathlib import Path
from covey.config.read import InputError, read_env_file
for value in ('"' + "a" * 5000, '"' + "a\\\\n" * 5000, "'" + "a" * 5000, "a " * 5000 + "'", "a" + " " * 5000 + "'"):
    Path(".env").write_text(f"KEY={value}\\n")
    try:
        read_env_file(Path(".env"))
    except InputError:
        continue
    raise AssertionError(value[:10])
print("read")
"""


def test_a_quote_without_an_end_is_looked_at_once() -> None:
    """A pattern such as "(?:[^"]+|x)*" tries 2^5000 ways to divide what stands before the missing quote. It would never
    come back, and holds the interpreter meanwhile: so in a process of its own, which is killed then."""
    words = [sys.executable, "-c", NEVER_ENDING]
    child = subprocess.run(words, env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True, timeout=60)
    assert (child.stdout, child.stderr) == ("read\n", "")


def test_the_shell_wins() -> None:
    os.environ["HF_HOME"] = "/mine"
    export({"HF_HOME": "/theirs", "HF_TOKEN": "t"})
    assert (os.environ["HF_HOME"], os.environ["HF_TOKEN"]) == ("/mine", "t")


def test_the_shell_wins_inside_a_value_too() -> None:
    """A file that sets BASE and then uses it means the BASE that will be in force: the shell's, which is never
    replaced. Only a name that the shell has not is the file's own."""
    Path(".env").write_text(
        'BASE=/of_the_file\nHF_HOME=$BASE/hub\nOWN=/own\nDATA_DIR="${OWN}/data:${BASE}"\nNONE=a$MISSING\n'
    )
    found = read_env_file(Path(".env"))
    assert (found["HF_HOME"], found["DATA_DIR"], found["NONE"]) == ("/base/hub", "/own/data:/base", "a")
    export(found)
    assert os.environ["HF_HOME"] == f"{os.environ['BASE']}/hub"


def test_every_command_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path(".env").write_text("export CKPT_DIR=elsewhere\n")
    assert main(["config"]) == 0
    assert "output_dir: elsewhere" in capsys.readouterr().out
    Path(".env").write_text("nonsense\n")
    assert main(["config"]) == 2
    assert ".env, line 1: not a variable" in capsys.readouterr().err


def test_the_example_is_read_and_names_every_variable() -> None:
    example = Path(__file__).parents[2] / ".env.example"
    assert read_env_file(example) == {}
    Path("filled.env").write_text(example.read_text().replace("# export", "export"))
    names = {"WANDB_API_KEY", "HF_TOKEN", "HF_HOME", "DATA_DIR", "CKPT_DIR", "SERPER_API_KEY"}
    assert set(read_env_file(Path("filled.env"))) == names


def test_the_place_of_runs(run) -> None:
    assert run().config.logging.output_dir == "outputs"
    assert run(file="env: {CKPT_DIR: from_file}").config.logging.output_dir == "from_file"
    os.environ["CKPT_DIR"] = "from_shell"
    composed = run(file="env: {CKPT_DIR: from_file}")
    assert composed.config.logging.output_dir == "from_shell"
    assert "logging.output_dir=from_shell" in composed.overrides
    assert run("trainer.default_local_dir=said").config.logging.output_dir == "said"
    assert run(file="logging: {output_dir: said}").config.logging.output_dir == "said"
