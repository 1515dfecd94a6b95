"""Search source and documentation for words that cost a reader a translation, as part of `make check`.

    python tools/plain_words.py [FILE or FOLDER ...]     default: src, docs, examples, tools and the pages of the root

Prints file:line, the phrase, and what to write instead. A space in a pattern also matches a line break, with the
indentation or comment sign of the next line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = ("src", "docs", "examples", "tools", "README.md", "CONTRIBUTING.md", "SECURITY.md")
KINDS = {".py", ".pyi", ".md", ".js", ".html", ".yaml", ".toml", ".ipynb"}

# "who" is for people: these words may precede it
PEOPLE = r"anyone|authors?|developers?|engineers?|everyone|maintainers?|people|persons?|readers?|someone|those|users?"
ACTS = "asks?|begins?|came|comes?|enters?|finishes|finished|gets?|goes|has|holds?|is|leaves?|may|needs?|reads?|sits?"
ACTS += "|stops?|tries|waits?|wants?|was|were|writes?"

# phrase (without regard to case) → what to write
ADVICE = {
    r"the (?:house|road)\b": "architecture; data flow, pipeline",
    r"rooms\b|(?:this|that|other|each|every|which) room\b": "packages",
    r"bunch(?:es)?\b": "prompt group, batch",
    r"flat groups?\b": "zero-variance groups",
    r"teach(?:es)? (?:nothing|something)\b": "have (no) signal",
    r"(?<!in.)\bflights?\b": "decode run (several steps launched at once)",
    r"teams? of (?:devices|GPUs|processes|ranks|workers)\b": "tensor-parallel group",
    r"joined layers?\b": "fused layers",
    r"offenders?\b": "non-finite updates; the name of what is wrong",
    r"walls\b|the wall\b(?![-\s](?:time|clock))|walled\b": "isolation",
    r"(?<!by.)\bhand(?:s|ed|ing)? (?:over|on)\b": "submit, pass",
    r"let(?:s|ting)? go of\b": "release",
    r"under way\b": "in progress, pending",
    r"on (?:its|their) way\b": "in transit, pending",
    r"by turns\b": "alternately, synchronously",
    r"speaks? against\b": "prevents, is a reason against",
    r"a place that listens\b": "a listener",
    r"last words\b": "the end of its output",
    r"(?<!there.)\b(?:is|are|was|were) (?-i:none)\b(?= of|[.,;:)]| and| but|$)": "is not a …; has no …",
    r"(?:is|are|was|were|be) left out\b": "is skipped, omitted, excluded",
    r"(?:is|are|was|were|be) told\b": "is reported; receives",
    r"(?:is|are|was|what is) said of\b": "is documented, described",
    r"goes on (?:from|with)\b": "continues",
    r"of the moment\b": "current",
    r"(?:can|could|cannot) be had\b": "is (not) available",
    r"so many\b(?! (?:[a-z]+ )?that\b)": "N; a number of",
    r"as many (?:as|of them as) (?:there )?(?:are|is|were)\b": "N; one per …",
    r"has not an?\b|have not an?\b": "has no",
    r"nobody(?:'s\b| (?:asks|asked|hears|heard|listens|reads|waits|wants)\b)": "is not asked, not read, …",
    rf"(?!(?:{PEOPLE})\b)[a-z]+,? who (?:{ACTS})\b(?![^.]*\?)": "which, that; name the request, process, caller",
    rf"(?:^|[.;:#\"]\s*)who (?:{ACTS})\b(?![^.]*\?)": "name the request, process, caller; a user who …",
    r"_(?:asked|given|said|say|tell|told|wanted)\b(?=\s?[(=:])": "a result, a message, a setting, a request",
}
BARE = ("(?<!", "(?:^", "_")  # patterns that start elsewhere than at a word
RULES = [
    (re.compile(pattern if pattern.startswith(BARE) else rf"\b(?:{pattern})", re.IGNORECASE), advice)
    for pattern, advice in ((key.replace(" ", r"[\s#]+"), advice) for key, advice in ADVICE.items())
]


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and advice of every match, in the order of the rules."""
    for pattern, advice in RULES:
        for match in pattern.finditer(text):
            start = match.start() + len(match[0]) - len(match[0].lstrip("\n "))
            yield text.count("\n", 0, start) + 1, re.sub(r"[\s#]+", " ", match[0]).strip(), advice


def files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in candidates if file.suffix in KINDS and file != Path(__file__))


def main(arguments: list[str]) -> int:
    count = 0
    for file in files(Path(argument).resolve() for argument in arguments or [str(ROOT / path) for path in PATHS]):
        for line, phrase, advice in sorted(findings(file.read_text())):
            place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            print(f"{place}:{line}: {phrase!r}  write: {advice}")
            count += 1
    print(f"plain words: {count} phrases to rewrite" if count else "plain words: none to rewrite")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
