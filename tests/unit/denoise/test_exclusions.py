"""What excludes tokens holds, whatever else a request asks for."""

import math
from itertools import product

import pytest
import torch

from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.impossible import TRUNCATED_LOGIT
from vllm_dllm.denoise.logit_rules import CanvasRules, LogitRules, Penalties, exclude_below_min_p_
from vllm_dllm.denoise.row_stats import RowStats, row_stats, sample_by_inversion
from vllm_dllm.denoise.vocab_stream import join_blocks, read_blocks

C, V, START = 6, 40, 100
GUESS = torch.tensor([3, 7, 3, 3, 5, 7])
ALLOWED = [3, 9, 17]
EARLY = torch.tensor([9, 20])  # as stop tokens: never before position START + 4

DENORMAL, TINY, HUGE = 1e-320, 1e-6, 1e6
LOGITS = {
    "capped": 30 * torch.randn(C, V, generator=torch.Generator().manual_seed(0)).tanh(),
    "zero": torch.zeros(C, V),
    "uncapped": 1e4 * torch.randn(C, V, generator=torch.Generator().manual_seed(1)),
    "against": torch.full((C, V), 30.0).index_fill_(1, torch.tensor(ALLOWED), -30.0),
}
PENALTIES = [
    {"repetition": repetition, "presence": penalty, "frequency": penalty}
    for repetition, penalty in product([DENORMAL, TINY, 1.0, HUGE, 3e38], [-2.0, 0.0, 2.0])
]
# From below the lowest that a server and a request can agree on to above the highest.
TEMPERATURES = [1e-11, 0.4, 1e6]
BIASES = {"none": None, "towards": 100.0, "away": -100.0, "infinite": -math.inf}


def make(bias: float | None, **penalties: float) -> LogitRules:
    counts = torch.zeros(V).index_fill_(0, torch.tensor([0, 9, 30]), 1e6)
    rules = LogitRules(
        penalties=Penalties(**penalties, counts=counts, in_prompt=torch.arange(V) % 2 == 1),
        excluded=torch.ones(V, dtype=torch.bool).index_fill_(0, torch.tensor(ALLOWED), False),
        early_stops=EARLY,
        stops_from=START + 4,
        bad_words=BadWords([[3, 3], [17, 17]]),
    )
    if bias is not None:  # for what is excluded, and against what is not
        rules.bias = torch.full((V,), bias).index_fill_(0, torch.tensor(ALLOWED), -bias)
    return rules


def streamed(logits: torch.Tensor, uniform: torch.Tensor) -> RowStats:
    blocks, _ = read_blocks(logits, uniform, 0)
    return join_blocks(blocks, uniform)


def violations(tokens: list[int]) -> list[int]:
    """Positions at which the rules of `make` are broken."""
    return [
        i
        for i, token in enumerate(tokens)
        if token not in ALLOWED
        or (i < 4 and token in EARLY)
        or (i and (tokens[i - 1], token) in {(3, 3), (17, 17)})
    ]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", LOGITS)
def test_nothing_brings_a_token_back(name: str, bias: str) -> None:
    uniform = torch.linspace(0, 1 - 2**-53, C, dtype=torch.float64)
    for penalties, temperature, min_p in product(PENALTIES, TEMPERATURES, [0.0, DENORMAL, 1.0]):
        logits = LOGITS[name].clone()
        rules = make(BIASES[bias], **penalties)
        CanvasRules(rules, torch.tensor(START), GUESS, torch.tensor([-1])).apply_(logits)
        scaled = logits / temperature
        exclude_below_min_p_(scaled, torch.full((C, 1), min_p))
        scaled = scaled.clamp(min=TRUNCATED_LOGIT)
        found, probs = row_stats(scaled, uniform)
        for stats in (found, streamed(scaled, uniform)):
            case = f"{penalties}, temperature {temperature}, min_p {min_p}: {stats}"
            assert violations(stats.best_guess.tolist()) == [], case
            assert set(stats.candidate.tolist()) <= set(ALLOWED), case
            assert stats.entropy_nats.isfinite().all() and (stats.best_logprob <= 0).all(), case
        assert probs.sum(dim=-1).isfinite().all()
        assert not probs[:, rules.excluded].any() and not probs[:4, EARLY].any()


def spelled(words: list[list[int]], before: list[int], kept: list[int], seed: int) -> list[int]:
    logits = torch.randn(len(kept), 8, generator=torch.Generator().manual_seed(seed))
    rules = LogitRules(bad_words=BadWords(words))
    guess = torch.full((len(kept),), -1)
    canvas = CanvasRules(
        rules, torch.tensor(START), guess, torch.tensor(before), torch.tensor(kept)
    )
    first, rest = logits[:5].clone(), logits[5:].clone()  # rows come in pieces
    for part in (first, rest):
        canvas.apply_(part)
    best = torch.cat((first, rest)).argmax(-1).tolist()
    return [k if k >= 0 else b for k, b in zip(kept, best, strict=True)]


def holds(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens) - len(word) + 1))


def test_no_bad_word_is_spelled_whatever_was_revealed() -> None:
    """Few tokens and many words: what takes a bad word's place often completes another."""
    generator = torch.Generator().manual_seed(0)

    def draw(n: int, low: int = 0) -> list[int]:
        return torch.randint(low, 8, (n,), generator=generator).tolist()

    revealed = 0
    for seed in range(300):
        words = [draw(2 + seed % 3) for _ in range(5)]
        before = draw(4)
        # As a server reveals: some of a canvas without bad words, then some more.
        kept = [-1] * 20
        for step in range(3):
            tokens = spelled(words, before, kept, seed + 1000 * step)
            assert not any(holds(tokens, word) for word in words), (words, kept)
            for word in words:  # across the boundary
                assert not holds(before[1 - len(word) :] + tokens[: len(word) - 1], word)
            shown = torch.rand(20, generator=generator) < 0.3
            kept = [t if s or k >= 0 else -1 for t, s, k in zip(tokens, shown, kept, strict=True)]
            revealed += int(shown.sum())
    assert revealed > 1000


def test_drawn_tokens_and_edits_spell_no_bad_word() -> None:
    """Tokens are drawn, some are revealed, and revealed ones are replaced by others."""
    generator = torch.Generator().manual_seed(0)
    edited = kept_back = 0
    for _ in range(100):
        words = [torch.randint(0, 8, (2 + i % 2,), generator=generator).tolist() for i in range(5)]
        bad_words, before = BadWords(words), torch.randint(0, 8, (4,), generator=generator).tolist()
        kept = [-1] * 20
        for _step in range(4):
            logits = torch.randn(20, 8, generator=generator)
            uniform = torch.rand(20, dtype=torch.float64, generator=generator)

            def draw(rows: torch.Tensor, first: int) -> torch.Tensor:
                drawn_by = uniform[first : first + len(rows)]  # noqa: B023
                return sample_by_inversion(rows.softmax(dim=-1), drawn_by)

            spelled = bad_words.exclude_(logits, before, kept, draw)
            drawn = draw(logits, 0).tolist()
            tokens = [k if k >= 0 else d for k, d in zip(kept, drawn, strict=True)]
            assert spelled == before + tokens, "what is excluded is what is drawn behind"
            changes = {
                row: int(torch.randint(0, 8, (), generator=generator))
                for row, token in enumerate(kept)
                if token >= 0
            }
            stay = bad_words.spelling_changes(before, tokens, changes)
            for row in changes.keys() - stay:
                tokens[row] = changes[row]
            answer = before[-2:] + tokens
            for word in words:
                places = range(len(answer) - len(word) + 1)
                found = [i for i in places if answer[i : i + len(word)] == word]
                assert all(i + len(word) <= 2 for i in found), (word, answer)
            edited, kept_back = edited + len(changes) - len(stay), kept_back + len(stay)
            shown = torch.rand(20, generator=generator) < 0.3
            kept = [t if s or k >= 0 else -1 for t, s, k in zip(tokens, shown, kept, strict=True)]
    assert edited > 300 and kept_back > 100


def test_a_chain_of_substitutes() -> None:
    """Each token's substitute makes the next one complete a word: as many repairs as positions."""
    words = [[9, 0], [1, 2], [3, 0]]
    logits = torch.full((30, 10), -100.0)
    logits[0::2, [0, 1]] = torch.tensor([2.0, 1.0])  # the best guess is 0 2 0 2 ..., after a 9
    logits[1::2, [2, 3]] = torch.tensor([2.0, 1.0])
    found = BadWords(words).exclude_(logits, [9], [-1] * 30)
    assert found == [9, *[1, 3] * 15]
    assert logits.argmax(-1).tolist() == found[1:]


def test_where_every_allowed_token_completes_a_word_the_answer_stays_allowed() -> None:
    excluded = torch.ones(V, dtype=torch.bool).index_fill_(0, torch.tensor([3, 9]), False)
    words = BadWords([[3, 3], [3, 9], [9, 3], [9, 9]])
    logits = LOGITS["capped"].clone()
    rules = LogitRules(excluded=excluded, bad_words=words)
    CanvasRules(rules, torch.tensor(START), GUESS, torch.tensor([-1])).apply_(logits)
    assert set(logits.argmax(-1).tolist()) <= {3, 9}
