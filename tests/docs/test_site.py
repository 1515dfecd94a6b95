"""The documentation as a whole: the index, the site's navigation, the API pages, the files beside them."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import covey
import covey.trl
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
SOURCE = ROOT / "src/covey"
INDEX = (DOCS / "README.md").read_text()
REPOSITORY = "https://github.com/owner/name"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools/docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(entry: Any) -> list[str]:
    """The pages below an entry of a navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for item in (entry if isinstance(entry, list) else entry.values()) for page in pages_of(item)]


def test_the_index_has_four_parts_and_every_page_once(site: ModuleType) -> None:
    assert re.findall(r"^## (.+)$", INDEX, re.MULTILINE) == ["Start", "Concepts", "How-to", "Reference"]
    listed = re.findall(r"^- \[[^]]+\]\((.+?)\)", INDEX, re.MULTILINE)
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(there)
    navigation = site.navigation(INDEX)
    assert [next(iter(tab)) for tab in navigation] == ["Start", "Concepts", "How-to", "Reference"]
    assert pages_of(navigation) == listed


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[x](../examples/train.py)", f"[x]({REPOSITORY}/blob/main/examples/train.py)"),
        ("[x](../src/covey/weights/)", f"[x]({REPOSITORY}/tree/main/src/covey/weights)"),
        ("[x](../README.md#install)", f"[x]({REPOSITORY}/blob/main/README.md#install)"),
        ("[x](data.md#raw)", "[x](data.md#raw)"),
        ("[x](#here)", "[x](#here)"),
        ("[x](https://arxiv.org/abs/2402.14740)", "[x](https://arxiv.org/abs/2402.14740)"),
        ("![x](images/demo.png)", "![x](images/demo.png)"),
    ],
)
def test_links_that_leave_the_pages_point_to_the_repository(site: ModuleType, link: str, shown: str) -> None:
    assert site.repository_links(link, DOCS / "concepts.md", REPOSITORY) == shown


def test_every_public_name_has_an_entry_in_the_api_pages() -> None:
    text = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    names = {f"covey.{name}" for name in covey.__all__ if name != "__version__"}
    names |= {f"covey.trl.{name}" for name in covey.trl.__all__}
    shown = {*re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE), *re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)}
    in_types = {f"covey.{name}" for name in ("Task", "Episode", "Group")}  # ::: covey.types
    assert names - shown == in_types and "covey.types" in shown
    assert shown - names == {"covey.types", "covey.protocols"}


def test_the_architecture_has_every_package_and_the_import_rules() -> None:
    page = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)/`\]\(\.\./src/covey/\1/\) \| .+ \| (.*) \|$", page, re.MULTILINE)
    assert sorted(package for package, _ in rows) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    for package, first in rows:
        assert all((SOURCE / package / name).is_file() for name in re.findall(r"`([\w.]+)`", first)), package
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    assert "\n".join(re.sub(r" [|:] ", "  ", layer).replace("covey.", "") for layer in layers) in page


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == covey.__version__
    assert covey.__version__ in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_forms_and_workflows_are_yaml_and_run_targets_that_exist(path: Path) -> None:
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\brun: make ([\w-]+)", text)) <= targets
