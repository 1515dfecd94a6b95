"""The fenced blocks of README, CONTRIBUTING, SECURITY and docs/, and the command lines in them.

Every command line and every Python block is run by the tests of this folder. One that cannot be run says why in a
comment above its block, which readers of the page do not see:

    <!-- not run: needs eight GPUs -->              the whole block
    <!-- not run, sbatch: needs a Slurm cluster --> lines that begin with these words; several comments may follow
                                                    each other
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*) *$")
EXCUSE = re.compile(r" *<!-- not run(?:, (?P<words>[^:]+))?: (?P<reason>.+) -->$")
PROGRAMS = ("covey", "make", "python", "pip", "tar", "sbatch", "ssh", "wandb", "pre-commit", "ray", "docker", "git")
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)}) ")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its fence
    language: str
    text: str
    excuses: dict[str, str] = field(default_factory=dict)  # beginnings of lines, "" for the whole block: why not run

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def excuse(self) -> str | None:
        return self.excuses.get("")

    def lines(self) -> list[str]:
        """With lines that go on joined."""
        return re.sub(r" *\\\n *", " ", self.text).splitlines()


@dataclass(frozen=True)
class Command:
    """One command line as it is printed. `shown` is what the page prints as its output, where it does."""

    block: Block
    number: int  # of the line within its block
    text: str
    shown: str = ""

    @property
    def place(self) -> str:
        return f"{self.block.place}+{self.number}"

    @property
    def excuse(self) -> str | None:
        found = [why for words, why in self.block.excuses.items() if self.text.startswith(words)]
        return found[0] if found else None

    @property
    def words(self) -> list[str]:
        """Without variables in front, remarks behind, and `...`, which stands for settings of the reader's own."""
        words = shlex.split(self.text, comments=True)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return [word for word in words if word != "..."]

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]


def read_blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    excuses: dict[str, str] = {}
    fence, start, text = None, 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = FENCE.match(line)
        if fence is not None:
            if match and match["ticks"] == fence["ticks"] and not match["language"]:
                body = textwrap.dedent("\n".join(text)) + "\n"
                found.append(Block(page, start, fence["language"], body, excuses))
                fence, excuses = None, {}
            else:
                text.append(line)
        elif match:
            fence, start, text = match, number, []
        elif excuse := EXCUSE.match(line):
            excuses = excuses | {excuse["words"] or "": excuse["reason"]}
        else:
            assert not excuses, f"{page}:{number}: a comment that says why is directly above its block"
    assert fence is None, f"{page}: a block is not closed"
    return found


def read_commands(block: Block) -> list[Command]:
    """Command lines: those after `$ ` where there are some (the rest is what they print), otherwise all that begin
    with a program's name."""
    lines = block.lines()
    sessions = any(line.startswith("$ ") for line in lines)
    found: list[Command] = []
    for number, line in enumerate(lines, 1):
        if COMMAND.match(line + " ") and line.startswith("$ ") == sessions:
            found.append(Command(block, number, line.removeprefix("$ ")))
        elif sessions and found:
            last = found.pop()
            found.append(Command(block, last.number, last.text, f"{last.shown}{line}\n"))
    return found


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
COMMANDS = [command for block in BLOCKS if block.language in ("", "sh") for command in read_commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
