"""Hooks of the documentation site (mkdocs.yml): the navigation, and links that leave docs/.

docs/README.md is the only list of pages. Its headings and links become the site's navigation. A link from a page to a
file outside docs/ works in a checkout and on GitHub as it is written; the site has no such file, so it points to the
repository there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BRANCH = "main"
LINE = re.compile(r"(?P<heading>##+) (?P<title>.+)|- \[(?P<name>[^\]]+)\]\((?P<page>[^)#]+\.md)\)")
CITATIONS = re.compile(r"(\[\d+\]) (?=\[\d+\])")  # with the space, Markdown reads [4] [14] as one link
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)([^)\s]*\))")


def on_config(config: Any) -> Any:
    config.nav = [{"Home": "README.md"}, *navigation((DOCS / "README.md").read_text())]
    return config


def navigation(index: str) -> list[dict[str, Any]]:
    """Headings of the second level are tabs, those of the third are sections, list items are pages."""
    tabs: list[dict[str, Any]] = []
    pages: list[Any] = []
    for match in filter(None, map(LINE.match, index.splitlines())):
        if match["page"]:
            pages.append({match["name"]: match["page"]})
            continue
        pages = []
        section = {match["title"]: pages}
        if match["heading"] == "##":
            tabs.append(section)
        else:
            next(iter(tabs[-1].values())).append(section)
    return tabs


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    markdown = CITATIONS.sub(r"\1&nbsp;", markdown)
    return repository_links(markdown, DOCS / page.file.src_path, config.repo_url)


def repository_links(markdown: str, path: Path, repository: str) -> str:
    """The text of a page, with links to files outside docs/ made absolute."""

    def absolute(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return match[0]  # mkdocs checks those
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{repository}/{kind}/{BRANCH}/{target.relative_to(ROOT)}{match[3]}"

    return LINK.sub(absolute, markdown)
