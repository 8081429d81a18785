"""No command of the documentation is untested, and none that is tested has gone from it."""

import re
import shlex
from pathlib import Path

import pytest

from tests import documented
from tests.documents import LANGUAGES, Block, blocks, canonical, commands, pages, programs
from tests.documents import split_commands as split
from tests.paths import ROOT

BARE = {"curl", "docker", "make", "python3"}
"""Programs that are on everybody's PATH; others are named with their folder."""


def table() -> dict[str, str]:
    """Command -> where the table of tested commands has it."""
    kinds = {
        "TOOLS": documented.TOOLS,
        "SERVERS": documented.SERVERS,
        "MAKE": documented.MAKE,
        "CLIENTS": documented.CLIENTS,
        "ELSEWHERE": documented.ELSEWHERE,
    }
    return {canonical(command): kind for kind, listed in kinds.items() for command in listed}


def test_every_command_is_tested_or_marked() -> None:
    tested = table()
    untested = [
        f"{command.place}: {command.text}"
        for command in commands()
        if command.needs is None and canonical(command.text) not in tested
        if command.text != "make test"  # which runs this
    ]
    assert not untested, (
        "expected each command in the table of tests/documented.py, or a comment '# needs a GPU' "
        "or '# needs a network' before it; these have neither:\n" + "\n".join(untested)
    )


def test_the_table_has_no_more() -> None:
    shown = {canonical(command.text) for command in commands()}
    shown |= {canonical(command) for command in documented.MAKE.values()}
    assert not table().keys() - shown, "no page shows these any more"


def test_every_program_is_tested() -> None:
    first_lines = {program.text.partition("\n")[0] for program in programs()}
    assert first_lines == documented.PROGRAMS.keys()


def test_programs_are_on_the_path_or_named_with_their_folder() -> None:
    unknown = [
        f"{command.place}: {program}"
        for command in commands()
        if "/" not in (program := shlex.split(command.text)[0]) and program not in BARE
    ]
    assert not unknown, "a shell finds none of these; write .venv/bin/ before them"


def test_commands_stand_in_fenced_blocks() -> None:
    """An indented one would be read by nobody."""
    command = re.compile(r"( {4}|\t)\s*(curl|docker|make|pip|python3?|(\S*/bin/)?vllm(-dllm)?) ")
    fenced = {line for page in pages() for block in blocks(page) for line in block.lines}
    lines = {line for page in pages() for line in page.read_text().splitlines()}
    assert [line for line in lines - fenced if command.match(line)] == []


@pytest.mark.parametrize(
    "test", sorted({*documented.ELSEWHERE.values(), *documented.PROGRAMS.values()})
)
def test_tests_named_in_the_table_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_blocks_name_a_known_language() -> None:
    """Or a command in a block without one would be read by nobody."""
    unknown = [
        f"{block.place}: '{block.language}'"
        for page in pages()
        for block in blocks(page)
        if block.language not in LANGUAGES
    ]
    assert not unknown, f"expected one of {sorted(LANGUAGES)} after ```, got {unknown}"


# --- the reading itself --------------------------------------------------------------------------

PAGE = """
Text, and a list:

1. `vllm serve` is no command here

```bash
# a comment
make serve PORT=1 \\
  CHECKPOINT=x   # another
curl URL -d '{
  "a": 1
}'
# needs a GPU
vllm serve big
make test
```

```python
from x import y
```
"""


def test_commands_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.documents.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = list(blocks(page))
    assert [block.language for block in found] == ["bash", "python"]
    shell = list(split(found[0]))
    assert [(canonical(c.text), c.needs) for c in shell] == [
        ("make serve PORT=1 CHECKPOINT=x", None),
        ("curl URL -d '{ \"a\": 1 }'", None),
        ("vllm serve big", "GPU"),
        ("make test", None),
    ]


def test_a_mark_without_a_command_is_an_error() -> None:
    with pytest.raises(AssertionError, match="has no command after it"):
        list(split(Block("page.md:1", "bash", ["make test", "# needs a GPU"])))
