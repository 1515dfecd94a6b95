"""Checks of the dependencies, as part of `make check`.

Always: every module that src imports is declared in pyproject.toml, the installed packages are compatible, and their
versions are those of constraints.txt. If a vulnerability service can be reached within PATIENCE: pip-audit; otherwise
the output says that no audit was made. tools/audit.toml lists accepted exceptions, with the reason.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PATIENCE = 20.0  # seconds
COMMAND = (sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--format", "json", "--timeout", "5")
Accepted = Mapping[str, Mapping[str, str]]


def plain(name: str) -> str:
    """The normalised name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- Without a network -------------------------------------------------------------------------------------------------


def imported(source: Path) -> dict[str, str]:
    """Third-party modules that the source imports, each with one file that imports it."""
    found: dict[str, str] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += _required(node)
            for root in {name.partition(".")[0] for name in names} - {"covey"}:
                if root not in sys.stdlib_module_names:
                    found.setdefault(root, str(path.relative_to(source)))
    return found


def _required(node: ast.AST) -> list[str]:
    """The module of `covey.imports.require("module", ...)`."""
    match node:
        case ast.Call(func=ast.Name(id="require"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
    return []


def declared(project: Mapping[str, Any]) -> set[str]:
    extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})
    requirements = [*project["dependencies"]]
    requirements += [requirement for name, extra in extras.items() if name != "dev" for requirement in extra]
    return {plain(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]) for requirement in requirements}


def undeclared(modules: Mapping[str, str], names: set[str], accepted: Accepted) -> list[str]:
    """A module is declared if a package that provides it is, or a package of its own name (not necessarily
    installed)."""
    homes = importlib.metadata.packages_distributions()
    faults = []
    for module, place in modules.items():
        packages = {plain(package) for package in homes.get(module, [])} | {plain(module)}
        if not packages & names and module not in accepted["undeclared"]:
            faults.append(f"{place} imports {module}, which no dependency or extra of pyproject.toml installs")
    stale = set(accepted["undeclared"]) - set(modules)
    return faults + [f"tools/audit.toml: nothing imports {module} any more" for module in sorted(stale)]


def unmet(output: str, accepted: Accepted) -> list[str]:
    """Lines of `pip check` that are not accepted."""
    lines = [line for line in output.splitlines() if " requires " in line or " has requirement " in line]
    return [line for line in lines if plain(line.split()[0]) not in map(plain, accepted["unmet"])]


def differing(constraints: str) -> list[str]:
    """Installed versions that differ from the pinned ones. A local version label (+cpu) is ignored."""
    faults = []
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)", constraints, re.MULTILINE):
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not every environment has all packages
        if here != version and here.partition("+")[0] != version:
            faults.append(f"{name} {here} is installed, constraints.txt pins {version}")
    return faults


# -- With a vulnerability service --------------------------------------------------------------------------------------


def ask(command: Sequence[str] = COMMAND, patience: float = PATIENCE) -> tuple[str, str]:
    """The JSON output of pip-audit, or the reason why there was no audit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {patience:g} s"
    start = done.stdout.find('{"dependencies"')
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (done.stdout[start:], "") if start >= 0 else ("", last)


def judge(answer: str, why: str, accepted: Accepted) -> tuple[str, list[str]]:
    """A summary and the faults. Packages that the service does not know count as not audited."""
    if not answer:
        return f"NO AUDIT WAS MADE: {why}", []
    packages = json.loads(answer)["dependencies"]
    asked = [package for package in packages if "skip_reason" not in package]
    if not asked:
        return f"NO AUDIT WAS MADE: the service knows none of {len(packages)} packages (no connection?)", []
    found = {one["id"]: package for package in asked for one in package["vulns"]}
    known = accepted["vulnerabilities"]
    faults = [
        f"{package['name']} {package['version']}: {ident} (upgrade it, or accept it in tools/audit.toml with a reason)"
        for ident, package in found.items()
        if ident not in known
    ]
    faults += [f"tools/audit.toml: {ident} is not found any more" for ident in known if ident not in found]
    left = len(packages) - len(asked)
    return f"audited: {len(asked)} packages" + (f"; NOT audited: {left}" if left else ""), faults


def main() -> int:
    accepted: Accepted = tomllib.loads((ROOT / "tools" / "audit.toml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    faults = undeclared(imported(ROOT / "src" / "covey"), declared(project), accepted)
    faults += unmet(check.stdout, accepted) + differing((ROOT / "constraints.txt").read_text())
    summary, found = judge(*ask(), accepted)
    for line in [*faults, *found]:
        print(f"audit: {line}", file=sys.stderr)
    print(f"dependencies: {summary}; declared, compatible and pinned: {'no' if faults else 'yes'}")
    return int(bool(faults or found))


if __name__ == "__main__":
    sys.exit(main())
