"""What ruff cannot know of this project; `make lint` runs it.

No test or bench has a tolerance of its own, README stays short, and files that pages name exist.
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


def own_tolerances(source: str) -> Iterator[str]:
    """Comparisons with a tolerance that is a number, or the library's."""
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


def complaints() -> Iterator[str]:
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")):
        for found in own_tolerances(path.read_text()):
            yield f"{path.relative_to(ROOT)}, {found}: name it in tests/tolerances.py, with why"
    if (lines := len(README.read_text().splitlines())) > 120:
        yield f"README.md has {lines} lines, expected 120 at most: move something to docs/"
    for page in PAGES:
        for name in re.findall(r"`([\w./-]+)`", page.read_text()):
            if "/" in name and name.partition("/")[0] in FOLDERS and not (ROOT / name).exists():
                yield f"{page.relative_to(ROOT)} names {name}, which does not exist"


if __name__ == "__main__":
    found = list(complaints())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
