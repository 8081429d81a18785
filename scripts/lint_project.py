"""Checks that ruff cannot make; `make lint` runs them.

No test or bench has a tolerance of its own, docstrings are sentences, files and README stay short,
and files that pages name exist.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FOLDERS = {
    *("attention_kernels", "bench", "checkpoints", "docker", "docs", "requirements"),
    *("scripts", "tests", "vllm_dllm"),
}
ALLOWED = {"atol", "rtol", "abs", "rel"}  # keywords that allow for an error
COMPARES = {"assert_close", "approx", "allclose", "isclose"}
MOST_LINES = 300  # of a file of the package that is no kernel
# Words that a docstring does not begin with: what follows is no sentence.
FRAGMENT = re.compile(
    r"(Of|In|On|By|For|From|To|At|With|Without|As|After|Before|Between|Beside|Those|That|Which"
    r"|Until|While|Under|Over|Into|Behind|Beyond|Through|Than)\b"
)


def find_own_tolerances(source: str) -> Iterator[str]:
    """Yields comparisons with a tolerance that is a number, or the library's default."""
    for node in ast.walk(ast.parse(source)):
        sides = node.comparators if isinstance(node, ast.Compare) else []
        values = [side.value for side in sides if isinstance(side, ast.Constant)]
        if any(isinstance(value, float) and 0 < value < 0.01 for value in values):
            yield f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", "")
        if name not in COMPARES:
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        numbers = [
            value.value
            for key, value in given.items()
            if key in ALLOWED and isinstance(value, ast.Constant)
        ]
        has_none = name != "approx" and not (ALLOWED | {None}) & given.keys()
        if any(numbers) or has_none:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def find_fragments(source: str) -> Iterator[str]:
    """Yields docstrings of functions and classes that are not sentences."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield f"line {node.lineno}: {text.splitlines()[0]}"


def find_complaints() -> Iterator[str]:
    """Yields all complaints about this project, one line each."""
    for path in (*ROOT.glob("vllm_dllm/**/*.py"), *ROOT.glob("attention_kernels/**/*.py")):
        name, source = path.relative_to(ROOT), path.read_text()
        for found in find_fragments(source):
            yield f"{name}, {found}: say it in a sentence"
        lines = len(source.splitlines())
        if lines > MOST_LINES and "triton" not in path.stem:
            yield f"{name} has {lines} lines, expected {MOST_LINES} at most: part it"
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")):
        for found in find_own_tolerances(path.read_text()):
            yield f"{path.relative_to(ROOT)}, {found}: name it in tests/tolerances.py, with why"
    if (lines := len(README.read_text().splitlines())) > 120:
        yield f"README.md has {lines} lines, expected 120 at most: move something to docs/"
    for page in PAGES:
        for name in re.findall(r"`([\w./-]+)`", page.read_text()):
            if "/" in name and name.partition("/")[0] in FOLDERS and not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)} names {name}, which does not exist"


if __name__ == "__main__":
    found = list(find_complaints())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
