"""SECURITY.md names a test for each promise: it is there."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_every_promise_has_its_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    promises = page.split("| promise | test |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(promises) > 8
    for line in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line.split("|")[2])
        assert named, line
        for path, test in named:
            text = (ROOT / path).read_text()
            assert not test or f"def {test}(" in text, f"{path}::{test}"


def test_the_page_can_be_found_and_its_links_lead_somewhere() -> None:
    for page in ("README.md", "docs/sandbox.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(), page
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / "SECURITY.md").read_text()):
        assert (ROOT / link).exists(), link
