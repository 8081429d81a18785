"""Tolerances stand in one table: no test or bench has a number of its own."""

import ast
from pathlib import Path

import pytest

from tests.paths import ROOT

FILES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/*.py")]
ALLOWED = {"atol", "rtol", "abs", "rel"}  # keywords that allow for an error
COMPARES = {"assert_close", "approx", "allclose", "isclose"}


def own_numbers(source: str) -> list[str]:
    """Comparisons with a tolerance that is a number, or the library's."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Compare):
            found += [
                f"line {call.lineno}: {ast.unparse(call)}"
                for side in call.comparators
                if isinstance(side, ast.Constant) and isinstance(side.value, float)
                if 0 < side.value < 0.01
            ]
        name = getattr(getattr(call, "func", None), "attr", "")
        if not isinstance(call, ast.Call) or name not in COMPARES:
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        numbers = [
            value
            for keyword, value in given.items()
            if keyword in ALLOWED and isinstance(value, ast.Constant) and value.value != 0
        ]
        has_none = name != "approx" and not (ALLOWED | {None}) & given.keys()
        if numbers or has_none:
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_tolerance_elsewhere(path: Path) -> None:
    assert own_numbers(path.read_text()) == [], "name it in tests/tolerances.py, with its reason"


def test_finds_numbers() -> None:
    for wrong in (
        "torch.testing.assert_close(a, b, atol=1e-5, rtol=0)",
        "torch.testing.assert_close(a, b)",
        "assert torch.allclose(a, b)",
        "assert a == pytest.approx(b, abs=1e-3)",
    ):
        assert own_numbers(wrong)
    for right in (
        "torch.testing.assert_close(a, b, **tolerances.short_formula())",
        "torch.testing.assert_close(a, b, rtol=0, atol=tolerances.LOGIT)",
        "assert a == pytest.approx(b)",
    ):
        assert not own_numbers(right)
