"""The pages of `docs/` say what is so, and each of their commands is tested."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Ge, Gt, Le

from scripts import draw_life
from tests import documented
from tests.documents import LANGUAGES, Block, blocks, canonical, commands, pages, programs
from tests.documents import split_commands as split
from tests.paths import ROOT
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.denoise import MOST_NATS, MOST_STEPS
from vllm_dllm.config.drafter import DrafterConfig
from vllm_dllm.config.extension import ExtensionConfig, RequestLimits
from vllm_dllm.requests.options import KEYS, PREFIX, RequestOptions

DOCS = ROOT / "docs"
ANYTHING = "…"  # in an error that a page quotes: a name or a number


def test_links_of_the_top_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):  # mkdocs checks the others
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("https://") or (ROOT / target).exists(), target


# --- the life of a request ------------------------------------------------------------------


def test_figure_is_what_the_script_draws(tmp_path: Path) -> None:
    draw_life.draw(tmp_path / "life.svg")
    assert (tmp_path / "life.svg").read_text() == (DOCS / "life.svg").read_text()


@pytest.mark.parametrize("box", draw_life.BOXES)
def test_figure_names_what_exists(box: str) -> None:
    for line in draw_life.BOXES[box].code:
        files, _, names = line.partition(": ")
        for file in files.split(", "):
            source = (ROOT / "vllm_dllm" / file).read_text()
            for name in names.split(", "):
                assert re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE), line


# --- errors ---------------------------------------------------------------------------------

# What can end a start, beside what vLLM says itself.
CHECKED_AT_START = (
    *("serving_config/*.py", "config/*.py", "compat/version.py", "models/*.py"),
    *("quantization/schemes.py", "quantization/config.py", "quantization/weight_files.py"),
    *("cpu/attention/canvases.py", "startup/model_folder.py"),
    *(f"drafters/{name}.py" for name in ("layout", "dflash", "blockpilot", "passes")),
)
ERRORS = re.compile(r"(Error|Mismatch|_refusal)$")


def literal(node: ast.expr) -> str:
    """A string; what an f-string fills in is `ANYTHING`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else ANYTHING for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def literals(source: Path) -> list[str]:
    nodes = ast.walk(ast.parse(source.read_text()))
    return [text for node in nodes if isinstance(node, ast.expr) and (text := literal(node))]


def errors(source: Path) -> Iterator[str]:
    """The texts of the errors that a module makes; those of one variable alone left out."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            text = next(filter(None, map(literal, node.args)), "")
            if ERRORS.search(node.func.id) and text.strip(ANYTHING):
                yield text


@pytest.fixture(scope="module")
def quoted() -> dict[str, re.Pattern[str]]:
    """The errors that the page quotes, and what matches them in the code."""
    page = (DOCS / "troubleshooting.md").read_text()
    found = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(found) > 50
    return {error: re.compile(".*".join(map(re.escape, error.split(ANYTHING)))) for error in found}


def test_errors_that_troubleshooting_quotes_are_in_the_code(
    quoted: dict[str, re.Pattern[str]],
) -> None:
    sources = [*ROOT.glob("vllm_dllm/**/*.py"), *ROOT.glob("attention_kernels/*.py")]
    code = "\n".join(text for source in sources for text in literals(source))
    assert [error for error, pattern in quoted.items() if not pattern.search(code)] == []


@pytest.mark.parametrize("files", CHECKED_AT_START)
def test_troubleshooting_quotes_every_error_of_a_start(
    files: str, quoted: dict[str, re.Pattern[str]]
) -> None:
    sources = list((ROOT / "vllm_dllm").glob(files))
    assert sources
    found = [error for source in sources for error in errors(source)]
    assert [e for e in found if not any(p.search(e) for p in quoted.values())] == []


TYPES = get_type_hints(RequestOptions, include_extras=True)
SAID = {  # in an error, and in a row
    "a boolean (or 0/1)": "0 or 1",
    "a list of token ids": "token ids",
    "a list of canvas positions": "canvas positions",
    "a text or a list of token ids": "text or token ids",
}


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each table's row by the first name in backticks, of which a row has one."""
    found = {}
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and (name := re.fullmatch(r"`([^`]+)`", cells[0])):
            found.setdefault(name[1], cells)
    return found


def values(kind: Any, bounds: tuple[Any, ...] = ()) -> str:
    """What a row says of the values of a type."""
    if get_origin(kind) is Literal:
        *names, last = (f"`{name}`" for name in get_args(kind))
        return f"{', '.join(names)} or {last}" if names else last
    if get_origin(kind) is Annotated:
        said = [text for text in kind.__metadata__ if isinstance(text, str)]
        return SAID[said[0]] if said else values(get_args(kind)[0], (*kind.__metadata__, *bounds))
    if type(None) in get_args(kind):
        return values(next(one for one in get_args(kind) if one is not type(None)), bounds)
    word = {int: "int", float: "number"}[kind]
    above = next((bound.gt for bound in bounds if isinstance(bound, Gt)), None)
    least = next((bound.ge for bound in bounds if isinstance(bound, Ge)), above)
    most = next(bound.le for bound in bounds if isinstance(bound, Le))
    if most in (MOST_STEPS, MOST_NATS):
        return f"{word} {'≥' if above is None else '>'} {least:g}"
    return f"{word} in {'[' if above is None else '('}{least:g}, {most:,g}]"


@pytest.mark.parametrize("key", KEYS)
def test_the_row_of_a_key_says_what_its_declaration_says(key: str) -> None:
    name, asked = key.removeprefix(PREFIX), KEYS[key]
    _, value, by_server, meaning = rows("requests.md")[key]
    assert value.startswith(values(TYPES[name])), value
    default = next(field.default for field in fields(RequestOptions) if field.name == name)
    if default not in (None, False, MISSING):
        shown = f"`{default}`" if isinstance(default, str) else f"{default:g}"
        assert f"default {shown}" in value
    assert by_server == ("yes" if asked.by_server else "")
    assert asked.uniform or "masked.md" in meaning
    assert not asked.masked or f"`{key}`" in (ROOT / "docs" / "masked.md").read_text()


@pytest.mark.parametrize(
    ("page", "declared", "place"),
    [
        ("serving.md", ExtensionConfig, ""),
        ("serving.md", RequestLimits, "limits."),
        ("drafters.md", DrafterConfig, ""),
    ],
    ids=["extension", "limits", "drafter"],
)
def test_the_row_of_a_setting_has_its_default(page: str, declared: type, place: str) -> None:
    found = rows(page)
    for field in fields(declared):
        _, shown, *_ = found[f"{place}{field.name}"]
        default = field.default
        if default in (None, (), MISSING):
            continue  # which is said in words
        if isinstance(default, bool):
            default = str(default).lower()
        assert shown == (f"`{default}`" if isinstance(default, str) else f"{default:,g}"), field


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_row_of_a_family_says_what_its_declaration_says(architecture: str) -> None:
    family = FAMILIES[architecture]
    config = resolve_name(f"vllm_dllm.models.masked_configs:{family.config}")()
    page = (ROOT / "docs" / "masked.md").read_text()
    (row,) = (line for line in page.splitlines() if f"| `{architecture}` |" in line)
    _, _, block, mask, threshold = (cell.strip() for cell in row.strip("|").split("|"))
    assert block.startswith(f"`{family.block_key}`")
    assert block.endswith(f"else {config.canvas_length}")
    assert mask == f"`mask_token_id`, else {config.mask_token_id}"
    assert threshold.startswith(f"{family.threshold:g}")


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
