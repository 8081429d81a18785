"""Answers of noise to many schemas, each checked by another library.

A folder of schemas, each a JSON file or an entry `schema` in one, is tested beside the shipped:

    VLLM_DLLM_SCHEMAS=FOLDER .venv/bin/pytest tests/unit/grammar/test_validity.py -s

A schema counts if it compiles and its shortest known answer has at most `LONGEST` tokens.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from tests.unit.grammar.canvases import SCHEMAS, answer, of_schema, text_of
from vllm_dllm.grammar.compiler import GrammarError
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.patterns import mend_patterns

FOLDER = os.environ.get("VLLM_DLLM_SCHEMAS")
LONGEST = 300


def folder_schemas(folder: str) -> Iterator[tuple[str, dict]]:
    for path in sorted(Path(folder).glob("**/*.json")):
        found = json.loads(path.read_text())
        yield path.stem, found.get("schema", found)


def answer_to(schema: dict, seed: int) -> str | None:
    """What became of an answer to the schema; None: it is valid."""
    try:
        state = of_schema(mend_patterns(schema))
    except GrammarError:
        return "not compiled"
    needed = find_completion(state, LONGEST)
    if needed is None:
        return "too long"
    rng = np.random.default_rng(seed)
    length = int(rng.choice([16, 32, 64]))
    budget = len(needed) + int(rng.choice([0, 1, 5, length, 3 * length]))
    tokens = answer(state, rng, length, budget, scale=float(rng.choice([1.0, 4.0, 12.0])))
    text = text_of(tokens)
    try:
        assert len(tokens) <= budget
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (AssertionError, ValueError, jsonschema.ValidationError) as error:
        return f"INVALID: {text!r}: {str(error).splitlines()[0]}"
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_shipped_schemas(name: str) -> None:
    for seed in range(2):
        assert answer_to(SCHEMAS[name], seed) is None


@pytest.mark.schemas
@pytest.mark.slow
def test_schemas_of_a_folder() -> None:
    assert FOLDER is not None
    found: Counter[str] = Counter()
    invalid = {}
    for seed, (name, schema) in enumerate(folder_schemas(FOLDER)):
        outcome = answer_to(schema, seed)
        found[(outcome or "valid").partition(":")[0]] += 1
        if outcome and outcome.startswith("INVALID"):
            invalid[name] = outcome
            print(name, outcome[:600])
    print(dict(found))
    assert found["valid"] > 0 and invalid == {}
