"""Canvases for the tests of grammars: a tokenizer of 512 tokens, logits of noise, of a right
answer, or of one with the faults of a model that is half done; and what the fast versions are
measured against, in plain Python."""

import json
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

import interegular
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tests.paths import CHECKPOINTS
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.compiler import GrammarCompiler
from vllm_dllm.grammar.masks import Exclusions, unpack_mask
from vllm_dllm.grammar.state import GrammarState
from vllm_dllm.grammar.vocabulary import GrammarVocabulary
from vllm_dllm.grammar.walk import MORE_TOKENS, CanvasRows


class Automaton(Protocol):
    start: Hashable

    def following(self, state: Hashable) -> Mapping[int | None, Hashable]:
        """Token -> the state after it, for every token that may still lead to an end."""


ENDED = "ended"
"""The state after a stop token. Every row behind it is free and costs nothing."""


def plain_walk(
    state: GrammarState,  # moved
    logprobs: np.ndarray,  # [L, V] fp32
) -> list[int]:
    """The most probable legal token of each row in turn, to the one that ends the answer. Without
    the bound on whitespace."""
    tokens: list[int] = []
    for row in logprobs:
        if state.has_ended:
            break
        is_legal = unpack_mask(state.compute_mask(), state.vocabulary.size)
        tokens.append(int(np.where(is_legal, row, -np.inf).argmax()))
        assert state.consume_token(tokens[-1])
    return tokens


def best_path(
    automaton: Automaton,
    logprobs: np.ndarray,  # [L, V] fp32
) -> tuple[list[int], float]:
    """Tokens and cost in nats, as in `rows.LegalPath`, of the cheapest path of all."""
    best: dict[Hashable, tuple[float, list[int]]] = {automaton.start: (0.0, [])}
    for row in logprobs:
        costs = row.max() - row
        reached: dict[Hashable, tuple[float, list[int]]] = {}
        for state, (cost, tokens) in best.items():
            options = {None: ENDED} if state == ENDED else automaton.following(state)
            for token, after in options.items():
                total = cost if token is None else cost + float(costs[token])
                if after not in reached or total < reached[after][0]:
                    reached[after] = (total, tokens if token is None else [*tokens, token])
        best = reached
    cost, tokens = min(best.values(), key=lambda found: found[0])
    return tokens, cost


V, K = 512, 32
EOS, QUOTE = 1, 8
ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    },
}
SCHEMAS: dict[str, dict] = json.loads((Path(__file__).parent / "schemas.json").read_text())
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
"""Tokens that the shipped tokenizer lacks: of Gemma 4's tool calls and channels, and of DeepSeek's
reasoning. They take the places of unused ones."""
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
    """The shipped one, with these tokens."""
    text = (CHECKPOINTS / "diffusiongemma-tiny" / "tokenizer.json").read_text()
    return LLTokenizer(_with_tokens(text), n_vocab=V, eos_token=EOS)


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


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(tokenizer()))


def start(
    grammar: str, stops: frozenset[int] = frozenset(), exclusions: Exclusions | None = None
) -> GrammarState:
    return grammars().start_state(grammar, stops, exclusions)


def of_schema(schema: dict, exclusions: Exclusions | None = None) -> GrammarState:
    return start(LLMatcher.grammar_from_json_schema(schema), exclusions=exclusions)


def text_of(tokens: list[int]) -> str:
    return tokenizer().decode_bytes([token for token in tokens if token != EOS]).decode()


def rows_of(logprobs: np.ndarray, k: int = K) -> CanvasRows:
    """`logprobs` [L, V] fp32."""
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]

    def best_legal(row: int, mask: np.ndarray) -> tuple[int, float]:
        token = int(np.where(unpack_mask(mask, V), logprobs[row], -np.inf).argmax())
        return token, float(logprobs[row, token])

    def more(row: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.argsort(-logprobs[row], kind="stable")[:MORE_TOKENS]
        return tokens, logprobs[row, tokens]

    return CanvasRows(order, np.take_along_axis(logprobs, order, axis=1), best_legal, more)


def noise(rng: np.random.Generator, length: int, scale: float) -> np.ndarray:
    """[length, V] fp32 log-probabilities, the flatter the smaller `scale`."""
    return normalised(rng.normal(size=(length, V)) * scale)


def drafted(
    rng: np.random.Generator, text: str, length: int, faults: int, sure: float = 10.0
) -> np.ndarray:
    """[length, V] fp32: the model means `text`, but for `faults` rows: with a quotation mark, any
    other token or nothing in particular in its place."""
    tokens = [*tokenizer().tokenize_str(text), *[EOS] * length][:length]
    logits = rng.normal(size=(length, V))
    for row, token in enumerate(tokens):
        logits[row, token] += sure + rng.uniform(-3, 3)
    for row in rng.integers(0, min(length, len(tokenizer().tokenize_str(text))), size=faults):
        kind = rng.integers(0, 3)
        if kind == 2:
            logits[row] = 2 * rng.normal(size=V)
        else:
            logits[row, QUOTE if kind == 0 else rng.integers(7, 490)] += sure + 2
    return normalised(logits)


def normalised(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)


def answer(
    state: GrammarState,  # not moved
    rng: np.random.Generator,
    length: int,  # of a canvas
    max_tokens: int,
    scale: float,
) -> list[int]:
    """An answer of as many canvases as it takes, from noise alone."""
    return answer_of(state, lambda: noise(rng, length, scale), max_tokens)


def answer_of(
    state: GrammarState,  # not moved
    draw_logprobs: Callable[[], np.ndarray],  # of the next canvas
    max_tokens: int,
) -> list[int]:
    """An answer of as many canvases as it takes."""
    state, tokens = state.copy(), []
    while len(tokens) < max_tokens and not state.has_ended:
        rows = rows_of(draw_logprobs())
        found = constrain_canvas(state, rows, max_tokens - len(tokens), EOS)
        for token in found.path.tokens:
            assert state.consume_token(token)
        tokens += found.path.tokens
    return tokens


class RegexAutomaton:
    """Of a regex of ASCII characters, over the tokens, independent of llguidance."""

    def __init__(self, regex: str) -> None:
        self._fsm = interegular.parse_pattern(regex).to_fsm()
        self.start = self._fsm.initial
        self._following: dict[int, Mapping[int | None, object]] = {}

    def following(self, state: int) -> Mapping[int | None, object]:
        if state not in self._following:
            found: dict[int | None, object] = {}
            for token, text in enumerate(grammars().vocabulary.token_bytes):
                after = self._after(state, text)
                if after is not None and self._fsm.islive(after):
                    found[token] = after
            if state in self._fsm.finals:
                found[EOS] = ENDED
            self._following[state] = found
        return self._following[state]

    def _after(self, state: int, text: bytes) -> int | None:
        if not text or not text.isascii():
            return None
        at: int | None = state
        for character in text.decode():
            symbol = self._fsm.alphabet[character]
            at = self._fsm.map.get(at, {}).get(symbol)
            if at is None:
                return None
        return at
