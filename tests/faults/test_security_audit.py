"""The dependency audit finds problems, works without a network, and never reports unchecked packages as clean."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


def load() -> Any:
    spec = importlib.util.spec_from_file_location("covey_audit", ROOT / "tools" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = load()
NOTHING: dict[str, dict[str, str]] = {"vulnerabilities": {}, "unmet": {}, "undeclared": {}}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ACCEPTED = tomllib.loads((ROOT / "tools" / "audit.toml").read_text())


def test_every_import_of_the_source_is_declared() -> None:
    found = audit.imported(ROOT / "src" / "covey")
    assert {"torch", "transformers", "yaml", "ray"} <= set(found)
    assert audit.undeclared(found, audit.declared(PROJECT), ACCEPTED) == []


def test_an_undeclared_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os, yaml\nfrom . import b\ndef f():\n    from strange.part import thing\n")
    found = audit.imported(tmp_path)
    assert found == {"strange": "a.py", "yaml": "a.py"}
    assert audit.undeclared(found, {"pyyaml"}, NOTHING) == [
        "a.py imports strange, which no dependency or extra of pyproject.toml installs"
    ]
    assert audit.undeclared(found, {"pyyaml"}, NOTHING | {"undeclared": {"strange": "x"}}) == []
    stale = NOTHING | {"undeclared": {"gone": "x"}}
    assert audit.undeclared({}, set(), stale) == ["tools/audit.toml: nothing imports gone any more"]


def test_declared_names() -> None:
    project = {"dependencies": ["torch>=2", "PyYAML"], "optional-dependencies": {"a": ["b_c[x]>=1"], "dev": ["pytest"]}}
    assert audit.declared(project) == {"torch", "pyyaml", "b-c"}


def test_installed_packages_must_be_compatible() -> None:
    output = "a 1 requires b, which is not installed.\nc 1 has requirement d>2, but you have d 1.\n"
    assert len(audit.unmet(output, NOTHING)) == 2
    assert audit.unmet(output, NOTHING | {"unmet": {"A": "x"}}) == ["c 1 has requirement d>2, but you have d 1."]
    assert audit.unmet("No broken requirements found.\n", NOTHING) == []


def test_pinned_versions_are_the_installed_ones() -> None:
    here = importlib.metadata.version("pytest")
    assert audit.differing(f"# x\npytest=={here}\nnot-installed-at-all==1\n") == []
    assert audit.differing("pytest==0.0.1\n") == [f"pytest {here} is installed, constraints.txt pins 0.0.1"]
    assert audit.differing((ROOT / "constraints.txt").read_text()) == []


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": list(packages), "fixes": []})


BAD = {"name": "a", "version": "1", "vulns": [{"id": "GHSA-1", "fix_versions": ["2"]}]}
GOOD = {"name": "b", "version": "1", "vulns": []}
SKIPPED = {"name": "c", "skip_reason": "not found"}


def test_a_finding_fails_unless_it_is_accepted_with_a_reason() -> None:
    fragments, faults = audit.judge(answer(BAD, GOOD), "", NOTHING)
    assert fragments == "audited: 2 packages" and len(faults) == 1 and "a 1: GHSA-1" in faults[0]
    accepted = NOTHING | {"vulnerabilities": {"GHSA-1": "we do not call it"}}
    assert audit.judge(answer(BAD, GOOD), "", accepted)[1] == []
    assert audit.judge(answer(GOOD), "", accepted)[1] == ["tools/audit.toml: GHSA-1 is not found any more"]


def test_unchecked_packages_are_not_reported_as_clean() -> None:
    """pip-audit itself reports `no known vulnerabilities` for packages that its service does not know."""
    assert audit.judge(answer(SKIPPED, SKIPPED), "", NOTHING)[0].startswith("NO AUDIT WAS MADE: the service knows none")
    assert audit.judge(answer(GOOD, SKIPPED), "", NOTHING) == ("audited: 1 packages; NOT audited: 1", [])
    assert audit.judge("", "no connection", NOTHING) == ("NO AUDIT WAS MADE: no connection", [])


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import time; time.sleep(60)", "no answer in 1 s"),
        ("import sys; sys.exit('No module named pip_audit')", "No module named pip_audit"),
        ("import sys; print('x'); sys.exit(1)", "exit code 1"),
    ],
)
def test_without_the_service_the_audit_does_not_hang(program: str, why: str) -> None:
    started = time.monotonic()
    assert audit.ask([sys.executable, "-c", program], patience=1.0 if "sleep" in program else 60.0) == ("", why)
    assert time.monotonic() - started < 50


def test_reasons_are_given() -> None:
    assert all(len(reason) > 20 for part in ACCEPTED.values() for reason in part.values())
    assert "$(BIN)/python tools/audit.py" in (ROOT / "Makefile").read_text()
