"""Bad words of several tokens are in no answer of a masked model, whatever its steps draw, reveal
at once, edit, delete or insert."""

from itertools import pairwise

import pytest

from tests.engine.conftest import GetEngine
from tests.engine.masked import Rule
from tests.engine.masked_requests import GetMade, generate, params_of, prompts_of

OFTEN = [7, 40, 41, 95]
WORDS = [[40, 7], [40, 40], [40, 41], [41, 7], [41, 40], [41, 41]]
AT_ONCE = Rule("static", num_steps=1, temperature=1.0)
SOON = Rule("dynamic", threshold=0.05, temperature=1.0)
BY_ENTROPY = Rule("entropy", bound=5.0, temperature=1.0)
EDITED = [
    Rule("dynamic", threshold=0.05, edit=edit, temperature=temperature)
    for edit in (0.01, 0.3)
    for temperature in (0.0, 1.0)
]
VERIFIED = Rule("verified", temperature=1.0)
RULES = {
    "SDAR": [AT_ONCE, SOON, BY_ENTROPY, *EDITED, VERIFIED],
    "Fast-dLLM": [AT_ONCE, SOON, BY_ENTROPY, VERIFIED],
    "Nemotron": [AT_ONCE, SOON, *EDITED],
    "LLaDA2.2": [Rule(), AT_ONCE, SOON, *EDITED],
}


@pytest.mark.parametrize("family", RULES)
def test_bad_words_are_never_spelled(
    engine: GetEngine, made: GetMade, family: str, is_ahead: bool
) -> None:
    checkpoint, decode = made(family, 8)
    settings = {"blocks_in_flight": 2} if family == "SDAR" else {}
    model = engine(checkpoint, settings, block_size=32, async_scheduling=is_ahead)
    tokenizer = model.llm.get_tokenizer()
    bad_words = [tokenizer.decode(word) for word in WORDS]
    bias = dict.fromkeys(OFTEN, 12.0)
    if family == "LLaDA2.2":
        bias |= dict.fromkeys((decode.delete, decode.split), 8.0)
    params = [
        params_of(rule, 60, seed, bad_words=bad_words, logit_bias=bias)
        for rule in RULES[family]
        for seed in range(2)
    ]
    prompts = (prompts_of(8) * len(params))[: len(params)]
    for own, found in zip(params, generate(model, prompts, params), strict=True):
        assert len(set(found.tokens)) > 1
        assert not [pair for pair in pairwise(found.tokens) if list(pair) in WORDS], own
