"""The commands and programs that README.md and the pages of `docs/` show a reader.

Fenced blocks of `bash` hold commands, those of `python` whole programs. A comment `# needs a GPU`
or `# needs a network` marks the command after it as one that not every machine can run.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

MARK = re.compile(r"# needs a (GPU|network)$")
LANGUAGES = {"bash", "json", "python", "text", "yaml"}


@dataclass(frozen=True)
class Snippet:
    """A command or a program, where it stands, and what it needs, if it says so."""

    place: str
    text: str
    needs: str | None = None


@dataclass(frozen=True)
class Block:
    place: str
    language: str
    lines: list[str]


def pages() -> list[Path]:
    """Those for users; `docs/upstream` holds reports of defects in vLLM."""
    docs = ROOT / "docs"
    ours = (page for page in docs.rglob("*.md") if docs / "upstream" not in page.parents)
    return [ROOT / "README.md", *sorted(ours)]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    block: Block | None = None
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        fence = re.fullmatch(r"\s*```(\w*).*", line)
        if block is None and fence:
            block = Block(f"{page.relative_to(ROOT)}:{number}", fence[1], [])
        elif block is not None and fence:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)
    assert block is None, f"{page}: a block does not end"


def split_commands(block: Block) -> Iterator[Snippet]:
    """A command ends with its line, unless the line ends in a backslash or inside quotes."""
    pending, needs = "", None
    for line in block.lines:
        if not pending and (mark := MARK.match(line.strip())):
            needs = mark[1]
            continue
        pending += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # quotes that go on in the next line
            continue
        if words:
            yield Snippet(block.place, pending.strip(), needs)
            needs = None
        pending = ""
    assert not pending, f"{block.place}: unbalanced quotes in {pending}"
    assert needs is None, f"{block.place}: 'needs a {needs}' has no command after it"


def commands() -> list[Snippet]:
    """Every command of every page."""
    shell = (block for page in pages() for block in blocks(page) if block.language == "bash")
    return [command for block in shell for command in split_commands(block)]


def programs() -> list[Snippet]:
    """Every Python program of every page."""
    python = (block for page in pages() for block in blocks(page) if block.language == "python")
    return [Snippet(block.place, "\n".join(block.lines)) for block in python]


def canonical(command: str) -> str:
    """One way to write a command: without comments, line breaks and needless quotes."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    return shlex.join(" ".join(word.split()) for word in words)
