"""What a grammar costs a canvas in one step, on the host alone: the walk, the masks, the closing.

    python -m bench.grammar

Canvases of 64 with the shipped vocabulary of 512, and of 256 with one of 262,144 tokens that is
made here. A canvas is a right answer of JSON, as a model has it when it is nearly done, one with
three faults, or noise; "tight" is noise where the answer hardly fits its `max_tokens`. Refuses to
report when the tests of `tests/unit/grammar` are red. The last line is JSON, which also lands in
bench/results/<machine>/. Times are the process' own: it waits for nothing, and what else the
machine does counts little.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from bench import harness
from tests.paths import CHECKPOINTS
from tests.unit.grammar import canvases
from vllm_dllm.grammar.canvas import constrain_canvas
from vllm_dllm.grammar.compiler import GrammarCompiler
from vllm_dllm.grammar.completion import find_completion
from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.vocabulary import GrammarVocabulary
from vllm_dllm.grammar.walk import CanvasRows

K, EOS = 32, 1
GOAL_MS = {(64, 512): 1.0, (256, 262_144): 3.0}
KINDS = {"right": 0, "3 faults": 3, "noise": None, "tight": None}
TIGHT = 8  # tokens more than the shortest answer has
SCHEMA = canvases.SCHEMAS["order"]
LINE = '{"item": "red lamp", "count": 7}'


def large_tokenizer(size: int) -> LLTokenizer:
    """The shipped one with words of four letters behind."""
    text = (CHECKPOINTS / "diffusiongemma-tiny" / "tokenizer.json").read_text()
    found = json.loads(text)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    vocabulary = found["model"]["vocab"]
    number = 0
    while len(vocabulary) < size:
        word, rest = "", number
        for _ in range(4):
            word, rest = word + letters[rest % 26], rest // 26
        vocabulary.append([word, -2.0])
        number += 1
    return LLTokenizer(json.dumps(found), n_vocab=size, eos_token=EOS)


class Case:
    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self.vocab_size = length, vocab_size
        tokenizer = canvases.tokenizer() if vocab_size == 512 else large_tokenizer(vocab_size)
        grammars = GrammarCompiler(GrammarVocabulary(tokenizer))
        self.start = grammars.start_state(LLMatcher.grammar_from_json_schema(SCHEMA), frozenset())
        shortest = find_completion(self.start, length)
        assert shortest is not None
        self.shortest = len(shortest)
        lines = ", ".join([LINE] * 3)
        text = f'{{"id": 31, "lines": [{lines}], "paid": true}}'
        self.tokens = [*tokenizer.tokenize_str(text), *[EOS] * length][:length]

    def canvas(self, rng: np.random.Generator, faults: int | None) -> CanvasRows:
        """The top K of rows over the whole vocabulary."""
        L, V = self.length, self.vocab_size
        if faults is None:
            tokens = rng.integers(7, V, size=(L, K))
            logprobs = np.sort(rng.uniform(-9, -2, size=(L, K)).astype(np.float32))[:, ::-1].copy()
        else:
            tokens = rng.integers(7, min(V, 490), size=(L, K))
            tokens[:, 0] = self.tokens
            # One row in eight is undecided.
            sure = np.where(rng.random(L) < 0.125, -0.5, -1e-3).astype(np.float32)
            logprobs = np.tile(np.linspace(-8, -14, K, dtype=np.float32), (L, 1))
            logprobs[:, 0] = sure
            for row in rng.integers(0, L // 2, size=faults):
                tokens[row, :2] = canvases.QUOTE, self.tokens[row]
                logprobs[row, :2] = -0.2, -1.8

        def best_legal(row: int, mask: np.ndarray) -> tuple[int, float]:
            return int(unpack_mask(mask, V).argmax()), -12.0

        def more(row: int) -> tuple[np.ndarray, np.ndarray]:
            return tokens[row], logprobs[row]

        return CanvasRows(tokens, logprobs, best_legal, more)


def times_ms(run: Callable[[CanvasRows], object], rows: list[CanvasRows]) -> list[float]:
    found = []
    for one in rows:
        begin = time.process_time()
        run(one)
        found.append(1e3 * (time.process_time() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--canvases", type=int, default=100, help="of each kind")
    count = parser.parse_args().canvases
    harness.require_green("unit/grammar")
    report: dict[str, object] = {**harness.machine(), "canvases": count}
    print(
        f"{'canvas':>7} {'vocabulary':>10}  {'kind':9} {'median':>7} {'p90':>7} {'most':>7}  goal"
    )
    for (length, vocab_size), goal in GOAL_MS.items():
        case = Case(length, vocab_size)
        for kind, faults in KINDS.items():
            rng = np.random.default_rng(0)
            rows = [case.canvas(rng, faults) for _ in range(count)]
            most = case.shortest + TIGHT if kind == "tight" else 4 * length

            def run(one: CanvasRows, case: Case = case, most: int = most) -> object:
                return constrain_canvas(case.start, one, most, EOS)

            times_ms(run, rows[:5])
            found = sorted(times_ms(run, rows))
            p90 = found[int(0.9 * len(found))]
            median = statistics.median(found)
            print(
                f"{length:7} {vocab_size:10,}  {kind:9} {median:7.2f} {p90:7.2f} {found[-1]:7.2f}"
                f"  {goal:g} ms"
            )
            report[f"{length}/{vocab_size}/{kind}"] = {
                **{f"{name}_ms": value for name, value in harness.spread(found).items()},
                "p90_ms": p90,
                "goal_ms": goal,
            }
    harness.publish(report, harness.results_folder() / "grammar.json")


if __name__ == "__main__":
    main()
