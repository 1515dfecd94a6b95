"""The command that a message prints for a missing package, by how Covey was installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import covey
from covey.imports import install, install_extra
from covey.models.builtin import WHEEL
from tests.conftest import ROOT

PIP = [sys.executable, "-m", "pip", "install"]
SOURCE = ROOT / "src/covey"
SYSTEM = [Path(folder) for folder in ("/usr/local/bin", "/usr/bin", "/bin")]


def installed(site: Path, origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covey in a folder of installed packages, with the metadata that pip writes (PEP 610)."""
    metadata = site / "covey-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: covey\nVersion: 0.1.0\n")
    if origin is not None:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(covey, "__file__", str(site / "covey/__init__.py"))


def test_a_clone_is_installed_again_with_the_extra() -> None:
    """This very checkout: by its path, so that the line works in any directory, and with this interpreter's pip."""
    assert shlex.split(install_extra("lora")) == [*PIP, "-e", f"{ROOT}[lora]"]
    assert shlex.split(install_extra("vllm", upgrade=True)) == [*PIP, "-U", "-e", f"{ROOT}[vllm]"]


def test_a_package_of_an_index_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "site", None, monkeypatch)
    assert shlex.split(install_extra("lora")) == [*PIP, "covey[lora]"]
    assert install_extra("lora").endswith(" -m pip install 'covey[lora]'")  # some shells take [lora] for a pattern


def test_a_copy_of_a_folder_is_installed_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my clone"
    folder.mkdir()
    installed(tmp_path / "site", {"url": folder.as_uri(), "dir_info": {}}, monkeypatch)
    assert shlex.split(install_extra("math")) == [*PIP, f"{folder}[math]"]
    folder.rmdir()  # it is gone: the name is all that is left
    assert shlex.split(install_extra("math")) == [*PIP, "covey[math]"]


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        (
            {"url": "https://git.example/covey.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}},
            "git+https://git.example/covey.git@0123abc",
        ),
        ({"url": "file:///wheels/covey-0.1.0-py3-none-any.whl", "archive_info": {}}, None),
    ],
)
def test_a_repository_or_a_wheel_is_named_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any], url: str | None
) -> None:
    installed(tmp_path / "site", origin, monkeypatch)
    (*pip, requirement) = shlex.split(install_extra("ray"))
    found = Requirement(requirement)  # as pip reads it
    assert (pip, found.name, found.extras, found.url) == (PIP, "covey", {"ray"}, url or origin["url"])


def test_words_are_quoted_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's mine"
    folder.mkdir()
    installed(tmp_path / "site", {"url": folder.as_uri(), "dir_info": {}}, monkeypatch)
    assert shlex.split(install_extra("math"))[-1] == f"{folder}[math]"
    assert shlex.split(install("--no-deps", "a>=1")) == [*PIP, "--no-deps", "a>=1"]


@pytest.mark.parametrize("on_path", [False, True])
def test_the_demo_ends_with_the_line_that_puts_covey_on_the_path(tmp_path: Path, on_path: bool) -> None:
    """With a program in covey's place, and only where the shell does not find one."""
    binaries = tmp_path / "venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "covey").write_text("#!/bin/sh\necho trained with $*\n")
    (binaries / "covey").chmod(0o755)
    (tmp_path / "venv/run.stamp").touch()
    path = [str(binaries)] * on_path + [str(folder) for folder in SYSTEM if not (folder / "covey").exists()]
    command = ["make", "-s", "demo", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": os.pathsep.join(path)}, capture_output=True, text=True, check=True
    )
    trained, *rest = done.stdout.splitlines()
    assert trained == "trained with train --config-name demo"
    assert rest == ([] if on_path else [f"to use the command covey in this shell:  . {binaries}/activate"])


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    section = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(extras)
    assert WHEEL in section


def test_every_message_takes_its_command_from_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py") if path.name != "imports.py"}
    assert [path for path, text in texts.items() if "pip install" in text] == []
    calls = r"(?:install_extra\(|require\(\s*[\"'][\w.]+[\"'],)\s*[\"']([\w-]+)"
    named = {name for text in texts.values() for name in re.findall(calls, text)}
    assert len(named) > 8 and named <= set(extras)
    assert extras["demo"] == [WHEEL]
