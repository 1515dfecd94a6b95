"""What Covey is built on, as part of `make check`.

Always: every module that src imports is declared in pyproject.toml, what is installed fits together, and the versions
in constraints.txt are those that are here. Where a vulnerability service can be reached: pip-audit. Where it cannot,
that is said, and nobody waits for longer than PATIENCE. tools/audit.toml lists what may pass, with the reason.
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
    """A package's name as packages are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- always ------------------------------------------------------------------------------------------------------------


def imported(source: Path) -> dict[str, str]:
    """Modules of others that are imported anywhere in the source, and one file that does."""
    found: dict[str, str] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            for root in {name.partition(".")[0] for name in names} - {"covey"}:
                if root not in sys.stdlib_module_names:
                    found.setdefault(root, str(path.relative_to(source)))
    return found


def declared(project: Mapping[str, Any]) -> set[str]:
    extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"], *(word for name, words in extras.items() if name != "dev" for word in words)]
    return {plain(re.split(r"[\s\[<>=!~;]", word, maxsplit=1)[0]) for word in wanted}


def undeclared(modules: Mapping[str, str], names: set[str], accepted: Accepted) -> list[str]:
    """A module counts as declared if a package that brings it is, or one of its own name (which may not be here)."""
    homes = importlib.metadata.packages_distributions()
    faults = []
    for module, place in modules.items():
        packages = {plain(package) for package in homes.get(module, [])} | {plain(module)}
        if not packages & names and module not in accepted["undeclared"]:
            faults.append(f"{place} imports {module}, which no dependency or extra of pyproject.toml installs")
    stale = set(accepted["undeclared"]) - set(modules)
    return faults + [f"tools/audit.toml: nothing imports {module} any more" for module in sorted(stale)]


def unmet(told: str, accepted: Accepted) -> list[str]:
    """Lines of `pip check` that nobody has accepted."""
    lines = [line for line in told.splitlines() if " requires " in line or " has requirement " in line]
    return [line for line in lines if plain(line.split()[0]) not in map(plain, accepted["unmet"])]


def differing(constraints: str) -> list[str]:
    """Versions here that are not the pinned ones. A build's own mark (+cpu) does not count."""
    faults = []
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)", constraints, re.MULTILINE):
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not every environment has all of them
        if here != version and here.partition("+")[0] != version:
            faults.append(f"{name} {here} is installed, constraints.txt pins {version}")
    return faults


# -- where the service can be reached ----------------------------------------------------------------------------------


def ask(command: Sequence[str] = COMMAND, patience: float = PATIENCE) -> tuple[str, str]:
    """What pip-audit found, as JSON, and otherwise why there was no audit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {patience:g} s"
    start = done.stdout.find('{"dependencies"')
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (done.stdout[start:], "") if start >= 0 else ("", last)


def judge(answer: str, why: str, accepted: Accepted) -> tuple[str, list[str]]:
    """What to say, and the faults. Packages that the service does not know were not audited, whatever it calls that."""
    if not answer:
        return f"NO AUDIT WAS MADE: {why}", []
    packages = json.loads(answer)["dependencies"]
    asked = [package for package in packages if "skip_reason" not in package]
    if not asked:
        return f"NO AUDIT WAS MADE: the service knows none of {len(packages)} packages (no connection?)", []
    found = {one["id"]: package for package in asked for one in package["vulns"]}
    known = accepted["vulnerabilities"]
    faults = [
        f"{package['name']} {package['version']}: {ident} (upgrade it, or say in tools/audit.toml why it may stay)"
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
    said, found = judge(*ask(), accepted)
    for line in [*faults, *found]:
        print(f"audit: {line}", file=sys.stderr)
    print(f"dependencies: {said}; declared, fitting and pinned as they should be: {'no' if faults else 'yes'}")
    return int(bool(faults or found))


if __name__ == "__main__":
    sys.exit(main())
