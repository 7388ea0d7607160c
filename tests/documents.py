"""The pages of this repository as their checks see them: blocks, links, headings and command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>.*)$")
_HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


@dataclass(frozen=True)
class Block:
    """A fenced block. `marker` is what follows the language, a reason to run it elsewhere; `line` counts from 1."""

    page: Path
    line: int
    language: str
    marker: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that is ours, README first."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(found, key=lambda page: (page.name != "README.md" or page.parent != ROOT, str(page)))


def page_id(page: Path) -> str:
    """How a test calls it."""
    return str(page.relative_to(ROOT))


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page, in their order."""
    found, opened, lines = [], None, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence is not None:
            opened, lines = (number, fence), []
        elif opened is not None and fence is not None and len(fence["fence"]) >= len(opened[1]["fence"]):
            language, _, marker = opened[1]["info"].strip().partition(" ")
            found.append(Block(page, opened[0], language, marker.strip(), "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[1]["indent"]))
    assert opened is None, f"{page_id(page)}:{opened and opened[0]} opens a block that does not end"
    return tuple(found)


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in pages() for block in blocks(page) if block.language in languages]


@cache
def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    lines = page.read_text().splitlines()
    inside: set[int] = set()
    for block in blocks(page):
        inside.update(range(block.line - 1, block.line + block.text.count("\n") + 1))
    return "\n".join(line for number, line in enumerate(lines) if number not in inside)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What may stand behind `#` in a link to the page: its headings, spelled as GitHub does."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        base = slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return frozenset(found)


def links(page: Path) -> list[str]:
    """The targets of its links and pictures."""
    text = re.sub(r"`[^`]*`", "", prose(page))  # code in the text of a link stands before the target, and is no link itself
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)


def command_lines(text: str) -> Iterator[str]:
    """The commands of a shell block, one after the other: continued lines and here-documents are of one command."""
    lines = iter(text.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command += "\n" + next(lines)
        here = _HERE.search(command)
        while here is not None and not command.endswith(f"\n{here[1]}"):
            command += "\n" + next(lines)
        if command.strip():
            yield command


def calls_of(command: str, program: str) -> Iterator[list[str]]:
    """The arguments of each call of a program in a shell command, without assignments before it and comments behind it."""
    if _HERE.search(command):
        command = command.partition("\n")[0]
    tokens = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    tokens.commenters, tokens.whitespace_split = "#", True
    words: list[str] = []
    redirected = False
    for word in [*tokens, ";"]:
        if redirected:
            redirected = False
        elif word and set(word) <= set("<>&") and set(word) & set("<>"):
            redirected = True
            if words and words[-1].isdigit():  # 2> is one thing to a shell
                words.pop()
        elif word and set(word) <= set("();|&"):
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words and words[0] == program:
                yield words[1:]
            words = []
        else:
            words.append(word)


def comment_of(command: str) -> str:
    """The comment at the end of a command, or the whole of it if that is all there is."""
    found = re.search(r"(?:^|\s)#\s*(.*)$", command.rpartition("\n")[2])
    return found[1] if found else ""
