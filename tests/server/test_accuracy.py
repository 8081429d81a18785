"""Exact match on held-out prompts, served, next to transformers' `generate`."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoints.recipes.exact_match import read_rows
from tests.paths import CHECKPOINTS
from tests.server.conftest import CHECKPOINT, SHORT_CANVASES, Server, serving


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As users start it."""
    folder = tmp_path_factory.mktemp("compiled")
    with serving(CHECKPOINT, folder, *SHORT_CANVASES, "--max-num-seqs", "32") as it:
        yield it


def held_out() -> list[dict]:
    return read_rows(CHECKPOINTS / "held_out.jsonl")


def exact_match(server: Server, rows: list[dict]) -> float:
    def is_right(numbered_row: tuple[int, dict]) -> bool:
        number, row = numbered_row
        answer = server.client.chat.completions.create(
            model=server.model, messages=row["messages"], max_tokens=256, seed=number
        )
        return answer.choices[0].message.content == row["answer"]

    with ThreadPoolExecutor(32) as pool:
        return sum(pool.map(is_right, enumerate(rows))) / len(rows)


def test_served_answers_are_right(server: Server) -> None:
    rows = held_out()[::8]
    assert len(rows) >= 60
    assert exact_match(server, rows) >= 0.95


@pytest.mark.thorough
def test_served_answers_are_as_often_right_as_the_references(compiled: Server) -> None:
    rows = held_out()
    # Of transformers' generate: `python -m checkpoints.recipes.exact_match` wrote it.
    reference = json.loads((CHECKPOINT / "evaluation.json").read_text())["summary"]["all"]
    assert reference["rows"] == len(rows) >= 500
    assert reference["exact_match"] >= 0.95

    served = exact_match(compiled, rows)
    print(f"exact match served {served:.4f}, transformers {reference['exact_match']:.4f}")
    assert abs(served - reference["exact_match"]) <= 0.01
