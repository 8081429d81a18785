"""The shipped tokenizer with tokens that it lacks: those of Gemma 4's tool calls and channels, and
of DeepSeek's reasoning. They take the places of unused ones."""

import json
from functools import cache
from pathlib import Path

from llguidance import LLTokenizer

from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import EOS, V
from vllm_dllm.grammar.compiler import GrammarCompiler
from vllm_dllm.grammar.vocabulary import GrammarVocabulary

IDS = {
    "<|tool_call>": 497,
    "<tool_call|>": 498,
    '<|"|>': 499,
    "<|channel>": 500,
    "<channel|>": 501,
    "<think>": 502,
    "</think>": 503,
    "<|tool_response>": 504,
}
NAMES = {token: name for name, token in IDS.items()}
THOUGHT_ENDS, CALL = IDS["</think>"], IDS["<|tool_call>"]
CHANNEL_BEGINS, CHANNEL_ENDS = IDS["<|channel>"], IDS["<channel|>"]


def add_tokens(folder: Path, names: dict[int, str] | None = None) -> Path:
    """To the tokenizer of a checkpoint in `folder`. `names`: of more tokens."""
    path = folder / "tokenizer.json"
    path.write_text(_with_tokens(path.read_text(), NAMES | (names or {})))
    return folder


def _with_tokens(tokenizer: str, names: dict[int, str] = NAMES) -> str:
    found = json.loads(tokenizer)
    for token in found["added_tokens"]:
        token["content"] = names.get(token["id"], token["content"])
    for token, name in names.items():
        found["model"]["vocab"][token][0] = name
    return json.dumps(found)


@cache
def tokenizer() -> LLTokenizer:
    text = (CHECKPOINTS / "diffusiongemma-tiny" / "tokenizer.json").read_text()
    return LLTokenizer(_with_tokens(text), n_vocab=V, eos_token=EOS)


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(tokenizer()))


def encode(text: str) -> list[int]:
    """The names of special tokens in it become those."""
    return tokenizer().tokenize_str(text)


def decode(tokens: list[int]) -> str:
    """With the names of special tokens, without what ends an answer."""
    parts, text = [], []
    for token in [*tokens, EOS]:
        if token in NAMES or token == EOS:
            parts += [tokenizer().decode_bytes(text).decode(), NAMES.get(token, "")]
            text = []
        else:
            text.append(token)
    return "".join(parts)
