"""Finds the commands of README and docs: the blocks that hold them, the files that blocks stand
for, and what is said not to run.

A block is fenced, or indented by four spaces behind an empty line. One with a title is a file.
`<!-- not run: REASON -->` before a block says why its commands are checked but not run.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PROGRAMS = (
    "contaccum", "torchrun", "accelerate", "python", "bash", "pytest", "pip", "mkdocs", "source",
    "deepspeed", "pre-commit", "docker",
)  # fmt: skip
_REASON = re.compile(r"<!-- not run: (.+?) -->")
_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?")
LEFT_OUT = ("...", "…")
"""What stands for arguments that a command leaves to its reader."""


@dataclass
class Block:
    page: Path
    line: int
    lines: list[str]
    language: str = ""
    title: str | None = None
    reason: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass
class Command:
    page: Path
    line: int
    text: str
    reason: str | None = None
    of_earlier_commit: bool = False
    """Whether the block first checks out the last commit with a script."""
    words: list[str] = field(default_factory=list)
    """The words of the command, without variables set before it."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"

    @property
    def launcher(self) -> list[str]:
        """What stands before ``-m contaccum``."""
        return (
            self.words[: self.words.index("contaccum") - 1] if self.words[0] != "contaccum" else []
        )

    @property
    def arguments(self) -> list[str] | None:
        """What is given to contaccum, without dots that stand for more; None where another program
        is called."""
        if self.words[0] == "contaccum" or ("-m", "contaccum") in zip(
            self.words, self.words[1:], strict=False
        ):
            behind = self.words[self.words.index("contaccum") + 1 :]
            return [word for word in behind if word not in LEFT_OUT]
        return None

    @property
    def abbreviated(self) -> bool:
        return any(word in LEFT_OUT for word in self.words)


def blocks(page: Path) -> list[Block]:
    """The fenced and the indented blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    reason, place = None, 0
    while place < len(lines):
        line = lines[place]
        if match := _REASON.search(line):
            reason = match[1]
        elif match := _FENCE.match(line):
            end = next(n for n in range(place + 1, len(lines)) if lines[n].strip() == "```")
            inside = [text.removeprefix(match[1]) for text in lines[place + 1 : end]]
            found.append(Block(page, place + 2, inside, match[2], match[3], reason))
            reason, place = None, end
        elif (
            line.startswith("    ")
            and (place == 0 or not lines[place - 1].strip())
            and not _in_list(lines, place)
        ):
            end = place
            while end < len(lines) and (
                lines[end].startswith("    ") or (not lines[end].strip() and _goes_on(lines, end))
            ):
                end += 1
            found.append(
                Block(page, place + 1, [text[4:] for text in lines[place:end]], reason=reason)
            )
            reason, place = None, end - 1
        elif line.strip():
            reason = None
        place += 1
    return found


def _in_list(lines: list[str], place: int) -> bool:
    """Whether an indented line goes on with a list's entry, or with what mkdocstrings is told."""
    before = next((text for text in reversed(lines[:place]) if text.strip()), "")
    return bool(re.match(r"^\s*([-*]|\d+\.|:::) ", before))


def _goes_on(lines: list[str], place: int) -> bool:
    return place + 1 < len(lines) and lines[place + 1].startswith("    ")


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block; none where it begins with no program that the docs call."""
    if block.title or block.language not in ("", "bash", "sh", "shell", "console"):
        return
    text, start = "", 0
    for number, line in enumerate(block.lines):
        if not text:
            start = number
        text += line.removesuffix("\\") if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        command = _command(block, start, " ".join(text.split()))
        text = ""
        if command is not None:
            yield command


def _command(block: Block, start: int, text: str) -> Command | None:
    first = text.split(" ", 1)[0]
    if first.rsplit("/", 1)[-1] not in PROGRAMS and "=" not in first:
        return None
    words = shlex.split(text, comments=True)
    variables = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, variables[name] = words.pop(0).partition("=")
    if not words or words[0].rsplit("/", 1)[-1] not in PROGRAMS:
        return None
    earlier = block.lines[0].startswith("git checkout ")
    return Command(block.page, block.line + start, text, block.reason, earlier, words, variables)
