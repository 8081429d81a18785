"""SDAR and LLaDA2 verify their drafts in a second copy of the block: the answer is that of blocks
of one token, whatever was drafted."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from tests import tolerances
from tests.engine.conftest import GetEngine
from tests.engine.drafts import DraftingReference, decided
from tests.engine.masked import Reference, Rule, Trajectory
from tests.engine.masked_requests import (
    VOCABULARY,
    GetMade,
    assert_scores,
    generate,
    params_of,
    prompts_of,
)
from tests.engine.test_grammars import EOS, of
from tests.engine.test_masked import blocks_decided_alike
from tests.engine.test_verified import rules_of

pytestmark = pytest.mark.numerics

ROOM = {"blocks_in_flight": 2}
FEW = [7, 40, 41, 300]  # of which some drafts stand
MANY = [5, 7, 40, 41, 95, 180, 300, 365, 455]  # so that penalties do not even out
GREEDY, WARM = Rule("verified"), Rule("verified", temperature=0.5)


def as_decided(found: Trajectory, mask_id: int) -> Trajectory:
    return Trajectory(decided(found.steps, mask_id), found.tokens)


@pytest.mark.parametrize(
    ("family", "block_length", "rule", "allowed"),
    [
        pytest.param("SDAR", 4, GREEDY, FEW, id="SDAR"),
        pytest.param("SDAR", 4, WARM, None, id="SDAR, warm"),
        pytest.param("SDAR", 32, WARM, FEW, id="SDAR, long blocks"),
        pytest.param("MoE", 4, WARM, FEW, id="MoE", marks=pytest.mark.thorough),
        pytest.param("LLaDA2", 4, WARM, FEW, id="LLaDA2"),
        pytest.param("LLaDA2", 32, GREEDY, FEW, id="LLaDA2, long blocks"),
    ],
)
def test_decisions(
    engine: GetEngine,
    made: GetMade,
    family: str,
    block_length: int,
    rule: Rule,
    allowed: list[int] | None,
) -> None:
    """200 blocks of four tokens, or 40 of 32: drafts, what is revealed, answers."""
    checkpoint, plain = made(family, block_length)
    decode, max_tokens = DraftingReference(plain, allowed), 160 if block_length == 4 else 250
    prompts = prompts_of(block_length)
    options: dict[str, Any] = {} if allowed is None else {"allowed_token_ids": allowed}
    params = [params_of(rule, max_tokens, seed, **options) for seed in range(len(prompts))]
    found = generate(engine(checkpoint, ROOM, block_size=32), prompts, params)
    same = total = num_steps = 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        theirs = partial(decode.generate, prompt, max_tokens, rule, seed)
        same += blocks_decided_alike(as_decided(ours, decode.mask_id), theirs, decode)
        total += sum(step.finished for step in ours.steps)
        num_steps += len(ours.steps)
    print(f"{same} of {total} blocks, {num_steps} steps")
    assert same >= total * tolerances.DECIDED
    if allowed is not None:
        assert max_tokens * len(prompts) > 1.2 * num_steps / 2, "some drafts stand"


@pytest.mark.parametrize("family", ["SDAR", "LLaDA2"])
def test_answers_are_those_of_blocks_of_one_token(
    engine: GetEngine, made: GetMade, family: str
) -> None:
    """Decoded one by one over the reference. A server's default of edits does not matter."""
    checkpoint, plain = made(family, 4)
    settings = ROOM | {"defaults": {"diffusion_edit_probability": 0.3}}
    decode, prompts = DraftingReference(plain, FEW), prompts_of(4)
    params = [params_of(GREEDY, 61, 0, allowed_token_ids=FEW) for _ in prompts]
    found = generate(engine(checkpoint, settings, block_size=32), prompts, params)
    for prompt, ours in zip(prompts, found, strict=True):
        assert ours.tokens == decode.one_by_one(prompt, 61, GREEDY, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"presence_penalty": 1.0, "repetition_penalty": 1.3}, [], id="penalties"),
        pytest.param({}, [FEW[:2], FEW[1:], [FEW[2], FEW[2]]], id="bad words"),
    ],
)
def test_rules_see_every_token_before(
    engine: GetEngine, made: GetMade, options: dict[str, float], words: list[list[int]]
) -> None:
    """Those that the same step reveals, too."""
    checkpoint, plain = made("SDAR", 4)
    model, tokens = engine(checkpoint, ROOM, block_size=32), FEW if words else MANY
    tokenizer = model.llm.get_tokenizer()
    decode = DraftingReference(plain, tokens)
    prompts = prompts_of(4)
    asked = options | {"bad_words": [tokenizer.decode(word) for word in words]}
    params = params_of(GREEDY, 61, 0, allowed_token_ids=tokens, **asked)
    found = generate(model, prompts, [params] * len(prompts))
    assert sum(len(ours.steps) for ours in found) < 2 * 0.9 * 61 * len(prompts), "drafts stand"
    for prompt, ours in zip(prompts, found, strict=True):
        rules, answer = rules_of(options, prompt, words), list[int]()
        while len(answer) < 61:
            answer.append(int(rules(decode.next_logits(prompt + answer), answer).argmax()))
        assert ours.tokens == answer


@pytest.mark.parametrize("max_model_len", [108, 110, 112])
def test_the_context_ends(
    engine: GetEngine, made: GetMade, max_model_len: int, is_ahead: bool
) -> None:
    """Its last block has no room for a copy, and is decoded token by token."""
    checkpoint, plain = made("SDAR", 8)
    model = engine(
        checkpoint, ROOM, max_model_len=max_model_len, block_size=32, async_scheduling=is_ahead
    )
    decode, prompts = DraftingReference(plain, FEW), prompts_of(8)[:4]
    params = [params_of(WARM, 500, i, allowed_token_ids=FEW) for i in range(len(prompts))]
    for seed, ours in enumerate(generate(model, prompts, params)):
        most = max_model_len - len(prompts[seed])
        theirs = decode.generate(prompts[seed], most, WARM, seed, max_model_len=max_model_len)
        assert ours.tokens == theirs.tokens and len(ours.tokens) == most
        if not is_ahead:
            assert as_decided(ours, decode.mask_id).steps == theirs.steps


@pytest.mark.parametrize("family", ["SDAR", "LLaDA2"])
def test_stop_tokens(engine: GetEngine, made: GetMade, family: str) -> None:
    """A block is finished when nothing is hidden before one, and the answer ends there."""
    checkpoint, plain = made(family, 32)
    decode, prompts = DraftingReference(plain), prompts_of(32)
    answer = decode.generate(prompts[0], 64, GREEDY).tokens
    stop = next(token for token in answer[34:] if token not in answer[:34])
    params = params_of(GREEDY, 100, 0, stop_token_ids=[stop])
    found = generate(engine(checkpoint, ROOM, block_size=32), prompts, [params] * len(prompts))
    for prompt, ours in zip(prompts, found, strict=True):
        theirs = decode.generate(prompt, 100, GREEDY, stops=frozenset([stop]))
        assert ours.tokens == theirs.tokens
        assert as_decided(ours, decode.mask_id).steps == theirs.steps
    assert any(0 in ours.steps[-1].revealed for ours in found), "one was finished early"


def test_the_next_turn_finds_finished_blocks(
    engine: GetEngine, made: GetMade, is_ahead: bool
) -> None:
    """Nothing of a draft or of its copy stays in the cache."""
    checkpoint, plain = made("SDAR", 32)
    model = engine(checkpoint, ROOM, block_size=32, async_scheduling=is_ahead)
    decode, prompt = DraftingReference(plain), prompts_of(32)[3]
    (first,) = generate(model, [prompt], [params_of(GREEDY, 128 - len(prompt) % 32, 0)])
    turn = prompt + first.tokens + [7, 8, 9]
    expected = decode.generate(turn, 40, GREEDY).tokens
    for cached in (128, 0):
        output = model.ask([turn], params_of(GREEDY, 40, 0))[0]
        assert output.num_cached_tokens == cached
        assert list(output.outputs[0].token_ids) == expected
        assert model.llm.reset_prefix_cache()


def test_log_probabilities(engine: GetEngine, made: GetMade, is_ahead: bool) -> None:
    """Of the steps that verified the tokens, in blocks of one token."""
    checkpoint, plain = made("SDAR", 4)
    model = engine(checkpoint, ROOM, block_size=32, async_scheduling=is_ahead)
    decode, prompts = DraftingReference(plain), prompts_of(4)
    params = params_of(GREEDY, 40, 0, logprobs=3)
    params.extra_args["diffusion_logprobs"] = "unmask"
    outputs = model.ask(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs = decode.generate(prompt, 40, GREEDY)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == theirs.tokens
        scores = output.outputs[0].logprobs
        assert_scores(torch.stack([placed.logprobs for placed in theirs.placed]), scores)
        steps = [row[token].step for row, token in zip(scores, tokens, strict=True)]
        assert steps == [placed.step for placed in theirs.placed]


class Form(NamedTuple):
    whole: str  # regular expressions
    beginning: str


class FormReference(DraftingReference):
    """Draws each token among those that a form allows next, its end included."""

    def __init__(self, plain: Reference, form: Form, texts: list[str], num_prompt: int) -> None:
        super().__init__(plain)
        self.form, self.texts, self.num_prompt = form, texts, num_prompt

    def next_logits(self, known: list[int]) -> torch.Tensor:
        logits = super().next_logits(known)
        text = "".join(self.texts[token] for token in known[self.num_prompt :])
        legal = [
            bool(own) and re.fullmatch(self.form.beginning, text + own) is not None
            for own in self.texts
        ]
        legal[EOS] = re.fullmatch(self.form.whole, text) is not None
        return logits[: len(legal)].masked_fill(~torch.tensor(legal), -torch.inf)


FORMS = [
    Form("[a-z]{70}", "[a-z]{0,70}"),
    Form("(ab|cd){3,9}", "(ab|cd){0,9}|(ab|cd){0,8}[ac]"),
    Form("lamp|lap", "l|la|lam|lamp|lap"),
]


def closing_params(rule: Rule, i: int, max_tokens: int, form: str) -> SamplingParams:
    params = params_of(rule, max_tokens, i, structured_outputs=of(regex=form))
    params.ignore_eos = False
    return params


@pytest.mark.parametrize(("family", "block_length"), [("SDAR", 4), ("SDAR", 32), ("LLaDA2", 4)])
def test_forms(
    engine: GetEngine, made: GetMade, family: str, block_length: int, is_ahead: bool
) -> None:
    """The grammar sees the tokens that stand, not drafts: an answer is that of a loop that draws
    token by token among the legal ones, in any company."""
    checkpoint, plain = made(family, block_length)
    model = engine(checkpoint, ROOM, block_size=32, async_scheduling=is_ahead)
    prompts = prompts_of(block_length)[:6]
    tokenizer = model.llm.get_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    for rule in (GREEDY, WARM):
        params = [closing_params(rule, i, 90, FORMS[i % 3].whole) for i in range(len(prompts))]
        for i, found in enumerate(generate(model, prompts, params)):
            decode = FormReference(plain, FORMS[i % 3], texts, len(prompts[i]))
            expected = decode.one_by_one(prompts[i], 90, rule, i)
            length = expected.index(EOS) + 1
            print(len(found.steps), length, tokenizer.decode(found.tokens))
            assert found.tokens == expected[:length]


def test_forms_that_max_tokens_cuts_short_are_closed(
    engine: GetEngine, made: GetMade, is_ahead: bool
) -> None:
    """Beside requests without a form, and with another rule."""
    model = engine(made("SDAR", 4).checkpoint, ROOM, block_size=32, async_scheduling=is_ahead)
    prompts, form = prompts_of(4)[:5] * 3, "x[a-z]{0,300}y"
    params = [closing_params(WARM, i, 6 + i, form) for i in range(10)]
    params[5:] = [params_of(WARM, 30, i) for i in range(5)]
    params += [closing_params(Rule("dynamic", threshold=0.3), i, 12, form) for i in range(5)]
    found = generate(model, prompts, params)
    tokenizer = model.llm.get_tokenizer()
    for i, ours in enumerate(found):
        assert len(ours.tokens) <= params[i].max_tokens
        if params[i].structured_outputs is not None:
            text = tokenizer.decode([token for token in ours.tokens if token != EOS])
            assert re.fullmatch(form, text), text
    assert [len(ours.tokens) for ours in found[5:10]] == [30] * 5
