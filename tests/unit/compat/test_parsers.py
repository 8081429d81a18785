"""Which tokens end reasoning, as vLLM's parsers have it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.config import StructuredOutputsConfig

from tests.paths import CHECKPOINTS
from tests.unit.grammar.special_tokens import (
    CALL,
    CHANNEL_BEGINS,
    CHANNEL_ENDS,
    THOUGHT_ENDS,
    add_tokens,
)
from vllm_dllm.compat.parsers import find_reasoning_ends, make_reasoning_parser


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "diffusiongemma-tiny" / name, folder)
    return AutoTokenizer.from_pretrained(add_tokens(Path(folder)))


ENDS = {
    "gemma4": (
        frozenset({CHANNEL_ENDS, CALL}),
        frozenset({CALL}),
        frozenset({CHANNEL_BEGINS}),
        True,
    ),
    "deepseek_r1": (frozenset({THOUGHT_ENDS}), frozenset(), frozenset(), True),
    "deepseek_v3": None,  # unless the request asks it to think
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(tokenizer: Any, name: str) -> None:
    parser = make_reasoning_parser(StructuredOutputsConfig(reasoning_parser=name), tokenizer)
    assert parser is not None and find_reasoning_ends(parser) == ENDS[name]


def test_a_request_can_ask_to_think(tokenizer: Any) -> None:
    config = StructuredOutputsConfig(reasoning_parser="deepseek_v3")
    parser = make_reasoning_parser(config, tokenizer, {"chat_template_kwargs": {"thinking": True}})
    assert parser is not None and find_reasoning_ends(parser) == ENDS["deepseek_r1"]


def test_none() -> None:
    assert make_reasoning_parser(StructuredOutputsConfig(), None) is None
    everywhere = StructuredOutputsConfig(reasoning_parser="gemma4", enable_in_reasoning=True)
    assert make_reasoning_parser(everywhere, None) is None
