"""Exact match over the whole held-out set, served, next to transformers' `generate`."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.paths import CHECKPOINTS
from tests.server.conftest import CHECKPOINT, SHORT_CANVASES, Server, serving


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As users start it."""
    folder = tmp_path_factory.mktemp("compiled")
    with serving(CHECKPOINT, folder, *SHORT_CANVASES, "--max-num-seqs", "32") as it:
        yield it


def test_served_answers_are_as_often_right_as_the_references(compiled: Server) -> None:
    rows = [json.loads(line) for line in (CHECKPOINTS / "held_out.jsonl").read_text().splitlines()]
    # Of transformers' generate: `python -m vllm_dllm.tools.pretrain.exact_match` wrote it.
    reference = json.loads((CHECKPOINT / "evaluation.json").read_text())["summary"]["all"]
    assert reference["rows"] == len(rows) >= 500
    assert reference["exact_match"] >= 0.95

    def is_right(numbered_row: tuple[int, dict]) -> bool:
        number, row = numbered_row
        answer = compiled.client.chat.completions.create(
            model=compiled.model, messages=row["messages"], max_tokens=256, seed=number
        )
        return answer.choices[0].message.content == row["answer"]

    with ThreadPoolExecutor(32) as pool:
        right = list(pool.map(is_right, enumerate(rows)))
    exact_match = sum(right) / len(right)
    print(f"exact match served {exact_match:.4f}, transformers {reference['exact_match']:.4f}")
    assert abs(exact_match - reference["exact_match"]) <= 0.01
