"""Nemotron-Labs-Diffusion token by token, and in drafts that the same weights verify: both write
what the autoregressive model does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from tests import tolerances
from tests.engine.conftest import GetEngine, tokens_of
from tests.engine.masked import Rule
from tests.engine.masked_requests import (
    KINDS,
    VOCABULARY,
    GetMade,
    assert_scores,
    count_forwards,
    prompts_of,
)
from tests.engine.one_step import random_ids
from tests.engine.test_grammars import is_person, of, text_of
from tests.engine.verified import Rules, VerifiedReference
from tests.unit.grammar.canvases import SCHEMAS

pytestmark = pytest.mark.numerics

MODES = ("autoregressive", "self_speculation")
FEW = [7, 40, 41, 300]


def asking(mode: str, max_tokens: int, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": max_tokens, "ignore_eos": True, "seed": seed, "temperature": 0.0}
        | options,
        extra_args={"diffusion_mode": mode},
    )


@pytest.fixture(scope="module")
def decode(made: GetMade) -> Callable[..., VerifiedReference]:
    def get(block_length: int, allowed: list[int] | None = None) -> VerifiedReference:
        plain = made("Nemotron", block_length).reference
        found = VerifiedReference(plain.model, block_length, plain.mask_id)
        found.allowed = allowed
        return found

    return get


CASES = {  # block length, temperature, tokens that there are
    "all tokens": (4, 0.0, None),
    "few tokens": (4, 0.0, FEW),
    "long blocks": (32, 0.0, FEW),
    "warm": (4, 0.8, None),
    "warm, of few": (32, 2.0, FEW),
}


@pytest.mark.parametrize("case", CASES)
def test_decisions(
    engine: GetEngine, made: GetMade, decode: Callable[..., VerifiedReference], case: str
) -> None:
    """Answers and drafts, 400 tokens in each mode. A mode's requests are each other's
    neighbours."""
    B, temperature, allowed = CASES[case]
    model, reference = engine(made("Nemotron", B).checkpoint, block_size=32), decode(B, allowed)
    rule, max_tokens, prompts = Rule(temperature=temperature), 41, prompts_of(B) * 2
    options = {"temperature": temperature, "allowed_token_ids": allowed}
    outputs = {
        mode: model.ask(
            prompts, [asking(mode, max_tokens, i, **options) for i in range(len(prompts))]
        )
        for mode in MODES
    }
    same = same_drafts = num_drafts = num_accepted = 0
    for i, prompt in enumerate(prompts):
        written = reference.autoregressive(prompt, max_tokens, rule, i)
        one_by_one, drafted = (tokens_of(outputs[mode][i]) for mode in MODES)
        decided = written.decided_tokens(one_by_one, temperature)
        assert written.decided_tokens(drafted, temperature) == decided or drafted == one_by_one
        same += decided
        if decided < max_tokens:
            continue
        found = reference.self_speculation(prompt, max_tokens, rule, i)
        assert found.tokens == drafted
        steps = model.steps(outputs["self_speculation"][i].request_id)
        shown = [token for step in steps if step["finished"] for token in step["tokens"]]
        assert shown[:max_tokens] == drafted
        drafts = [step["tokens"] for step in steps if step["step"] == 1]
        same_drafts += found.decided_drafts(drafts, temperature)
        num_drafts += len(found.drafts)
        num_accepted += sum(found.accepted)
    print(f"{same} of {max_tokens * len(prompts)}, {num_accepted} tokens of {num_drafts} drafts")
    assert same >= max_tokens * len(prompts) * tolerances.DECIDED
    assert same_drafts >= num_drafts / 3
    if allowed is not None:
        assert num_accepted > 1.2 * num_drafts, "some drafts stand"


@pytest.mark.parametrize("mode", MODES)
def test_forwards(
    engine: GetEngine,
    made: GetMade,
    decode: Callable[..., VerifiedReference],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """As many as the published loop's, which needs none for a last token: one for the prompt and
    each other token, or two for each draft. A draft that stands to its end shows the next one's
    first token one forward later."""
    model, reference = engine(made("Nemotron", 4).checkpoint, block_size=32), decode(4, FEW)
    forwards = count_forwards(model, monkeypatch)
    for seed, prompt in enumerate(prompts_of(4)):
        for max_tokens in (2, 9, 30):
            forwards.clear()
            (output,) = model.ask([prompt], [asking(mode, max_tokens, allowed_token_ids=FEW)])
            assert len(output.outputs[0].token_ids) == max_tokens
            found = reference.self_speculation(prompt, max_tokens, Rule(), seed)
            stood = found.accepted[-1] == 4 and 1 + sum(found.accepted) == max_tokens
            expected = max_tokens if mode == MODES[0] else 1 + 2 * len(found.drafts) + stood
            assert len(forwards) == expected


def rules_of(options: dict[str, Any], prompt: list[int], words: list[list[int]]) -> Rules:
    """What any autoregressive model makes of them."""

    def apply(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        logits = logits.clone()
        if "repetition_penalty" in options:
            seen = sorted({*prompt, *answer})
            off = options["repetition_penalty"]
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / off, logits[seen] * off)
            logits[sorted(set(answer))] -= options["presence_penalty"]
        if len(answer) < options.get("min_tokens", 0):
            logits[options["stop_token_ids"]] = float("-inf")
        for *before, last in words:
            if not before or answer[-len(before) :] == before:
                logits[last] = float("-inf")
        return logits

    return apply


@pytest.mark.parametrize(
    "kind", range(len(KINDS)), ids=lambda kind: "-".join(KINDS[kind]) or "plain"
)
def test_rules(
    engine: GetEngine, made: GetMade, decode: Callable[..., VerifiedReference], kind: int
) -> None:
    """Penalties see every token before, and words are bad by what comes before, as with any
    autoregressive model. Of few tokens drafts stand, so that rules apply within them."""
    model, options = engine(made("Nemotron", 4).checkpoint, block_size=32), dict(KINDS[kind])
    if "bad_words" in options:  # words of FEW
        words = [[FEW[0], FEW[1]], [FEW[1], FEW[2], FEW[3]], [FEW[2], FEW[2]], [FEW[3]]]
        tokenizer = model.llm.get_tokenizer()
        options["bad_words"] = [tokenizer.decode(word) for word in words]
        encoded = [tokenizer.encode(w, add_special_tokens=False) for w in options["bad_words"]]
        assert encoded == words
    else:
        words = []
    prompts = prompts_of(4)
    for temperature in (0.0, 0.8):
        found = {}
        for mode in MODES:  # not together: vLLM's top_k and top_p come after the rules
            few = {"temperature": temperature, "allowed_token_ids": FEW, **options}
            params = [asking(mode, 50, i, **few) for i in range(len(prompts))]
            found[mode] = list(map(tokens_of, model.ask(prompts, params)))
        assert found[MODES[0]] == found[MODES[1]]
        if temperature and "top_k" in options:
            continue
        stops = frozenset(options.get("stop_token_ids", ()))
        for i, prompt in enumerate(prompts):
            rules = rules_of(options, prompt, words)
            written = decode(4, FEW).autoregressive(
                prompt, 50, Rule(temperature=temperature), i, stops, rules
            )
            written.decided_tokens(found[MODES[0]][i], temperature)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities(
    engine: GetEngine,
    made: GetMade,
    decode: Callable[..., VerifiedReference],
    mode: str,
    temperature: float,
) -> None:
    """The model's own, before the temperature; of the prompt, too."""
    model, reference = engine(made("Nemotron", 4).checkpoint, block_size=32), decode(4)
    prompts = prompts_of(4)
    options = {"logprobs": 20, "prompt_logprobs": 5, "temperature": temperature}
    params = [asking(mode, 20, i, allowed_token_ids=FEW, **options) for i in range(len(prompts))]
    for prompt, output in zip(prompts, model.ask(prompts, params), strict=True):
        tokens = list(output.outputs[0].token_ids)
        causal = reference.seeded_logits(prompt + tokens, []).log_softmax(-1)
        assert_scores(causal[len(prompt) - 1 : -1], output.outputs[0].logprobs)
        assert_scores(causal[: len(prompt) - 1], output.prompt_logprobs[1:])


@pytest.mark.parametrize("mode", MODES)
def test_the_next_turn_finds_what_stood(
    engine: GetEngine, made: GetMade, decode: Callable[..., VerifiedReference], mode: str
) -> None:
    """Keys and values of a verification are a prefill's."""
    model, reference = engine(made("Nemotron", 4).checkpoint, block_size=32), decode(4)
    for length in (3, 40):
        prompt = random_ids(length, VOCABULARY, length)
        first = tokens_of(*model.ask([prompt], [asking(mode, 100, allowed_token_ids=FEW)]))
        turn = prompt + first + random_ids(5, VOCABULARY, 9)
        expected = reference.seeded_logits(turn, [])[-1:].log_softmax(-1)
        for cached in ((length + 95) // 32 * 32, 0):
            (output,) = model.ask([turn], [asking(mode, 1, logprobs=20)])
            assert output.num_cached_tokens == cached
            assert_scores(expected, output.outputs[0].logprobs)
            assert model.llm.reset_prefix_cache()


def test_forms(engine: GetEngine, made: GetMade) -> None:
    """Valid, and the same in both modes: the walk sees what stands, and no other draft."""
    model = engine(made("Nemotron", 4).checkpoint, block_size=32)
    forms = [of(json=SCHEMAS["person"]), of(regex="(ab|cd){3,9}"), of(choice=["lamp", "table"])]
    prompts = [random_ids(5 + i, VOCABULARY, i) for i in range(12)]

    def answers(mode: str, temperature: float) -> list[RequestOutput]:
        params = [
            asking(
                mode,
                60 + i,
                i,
                temperature=temperature,
                ignore_eos=i == 11,
                structured_outputs=forms[i % 3],
                presence_penalty=float(i % 2),
            )
            for i in range(12)
        ]
        return model.ask(prompts, params)

    for temperature in (0.0, 1.0):
        found = {mode: answers(mode, temperature) for mode in MODES}
        assert list(map(tokens_of, found[MODES[0]])) == list(map(tokens_of, found[MODES[1]]))
        for i, output in enumerate(found[MODES[1]]):
            if i % 3 == 0:
                is_person(text_of(model, output))
            if i % 3 == 2:
                assert text_of(model, output) in ("lamp", "table") or i == 11
