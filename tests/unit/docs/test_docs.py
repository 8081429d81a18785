"""The documentation against the code: what it must name is named, and what it names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import draw_life
from tests.paths import ROOT

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
