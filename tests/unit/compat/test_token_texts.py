"""A token's text is the same, however often it is asked for, and found once."""

import sys
from types import ModuleType

import pytest
from transformers import AutoTokenizer
from vllm.v1.engine import logprobs

from tests.paths import CHECKPOINTS
from vllm_dllm.compat.logprobs import find_token_texts_once


def test_texts_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, asked = logprobs.convert_ids_list_to_tokens, []

    def count(tokenizer: object, token_ids: list[int]) -> list[str]:
        asked.extend(token_ids)
        return stock(tokenizer, token_ids)

    monkeypatch.setattr(logprobs, "convert_ids_list_to_tokens", count)
    name = "vllm.entrypoints.launchers.launcher"
    monkeypatch.delitem(sys.modules, name, raising=False)  # other tests import it
    find_token_texts_once()
    assert logprobs.convert_ids_list_to_tokens is count  # no server
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    find_token_texts_once()
    find_token_texts_once()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "diffusiongemma-tiny")
    tokens = [*range(len(tokenizer)), 7, 7]
    for _ in range(2):
        assert logprobs.convert_ids_list_to_tokens(tokenizer, tokens) == stock(tokenizer, tokens)
    assert logprobs.convert_ids_list_to_tokens(tokenizer, []) == []
    assert asked == tokens[:-2]
