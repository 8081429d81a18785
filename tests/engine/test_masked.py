"""Masked models decode as their published loop does, step by step, whatever shares the engine."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests import tolerances
from tests.engine.conftest import Engine, GetEngine, tokens_of
from tests.engine.levenshtein import LevenshteinReference
from tests.engine.masked import Reference, Rule, Trajectory
from tests.engine.masked_requests import (
    AT_ONCE,
    FAMILIES,
    MOVING_RULES,
    RULES,
    VOCABULARY,
    GetMade,
    assert_scores,
    count_forwards,
    each,
    generate,
    params_of,
    prompts_of,
    served,
)
from tests.engine.nemotron import FirstTokenReference
from tests.engine.one_step import random_ids
from tests.engine.parting import first_parting
from tests.engine.rounding import assert_same, decided, noisy_model
from vllm_dllm.compat.logprobs import RevealedLogprob

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize(
    ("family", "block_length", "rule"),
    [
        pytest.param(name, B, rule, marks=() if (B, rule) in family.often else pytest.mark.thorough)
        for name, family in FAMILIES.items()
        for B, rule in itertools.product((4, 32), family.rules)
    ],
)
def test_decisions(
    engine: GetEngine, made: GetMade, family: str, block_length: int, rule: str
) -> None:
    """200 blocks or more, or 40 of 32 tokens where that is tried by every run: canvas, revealed
    positions, last steps, answers."""
    (checkpoint, decode), kind = made(family, block_length), FAMILIES[family]
    chosen, max_tokens = kind.rules[rule], 160 if block_length == 4 else 250
    num_seeds = 1 if block_length == 4 or (block_length, rule) in kind.often else 6
    prompts = [
        [(token + 7 * seed) % VOCABULARY for token in prompt]
        for seed in range(num_seeds)
        for prompt in prompts_of(block_length)
    ]
    params = [params_of(chosen, max_tokens, seed) for seed in range(len(prompts))]
    knows_first_token = isinstance(decode, FirstTokenReference)
    found = generate(engine(checkpoint, block_size=32), prompts, params)
    same = total = 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):

        def theirs(prompt: list[int] = prompt, seed: int = seed) -> Any:
            return decode.generate(prompt, max_tokens, chosen, seed)

        if knows_first_token:
            expected = theirs()
            same += expected.decided_steps(ours, chosen.temperature)
            total += len(expected.steps)
        else:
            same += blocks_decided_alike(ours, theirs, decode)
            total += sum(step.finished for step in ours.steps)
    print(f"{same} of {total}")
    if isinstance(decode, LevenshteinReference):
        assert decode.happened["deleted"] and decode.happened["inserted"]
    assert same >= total * (1 / 3 if knows_first_token else tolerances.DECIDED)


def blocks_decided_alike(
    ours: Trajectory, generate_theirs: Callable[[], Trajectory], decode: Reference
) -> int:
    """All, or those before a step that rounding decides: there the reference itself decides
    otherwise when its weights are off by several roundings."""
    theirs = generate_theirs()
    parting = first_parting(ours.steps, theirs.steps)
    if parting is None:
        assert ours.tokens == theirs.tokens
        return sum(step.finished for step in theirs.steps)
    for seed in range(tolerances.NOISES_AT_A_TIE):
        with noisy_model(decode.model, seed):
            noisy = generate_theirs()
        if first_parting(noisy.steps, theirs.steps) == parting:
            return sum(step.finished for step in theirs.steps[:parting])
    raise AssertionError(f"another decision in step {parting}")


@pytest.mark.parametrize(
    ("family", "rule"),
    [("SDAR", "warm"), ("LLaDA2", "edited"), ("Nemotron", "dynamic"), ("Fast-dLLM", "dynamic")],
)
def test_masks_in_a_prompt_are_data(
    engine: GetEngine, made: GetMade, family: str, rule: str
) -> None:
    """In whole blocks, and in the last one, which the answer shares: nothing reveals or edits them,
    and what comes next has seen masks there."""
    (checkpoint, decode), chosen = made(family, 4), FAMILIES[family].rules[rule]
    mask, mixed = decode.mask_id, random_ids(11, VOCABULARY, 5)
    for place in (1, 6, 8, 10):
        mixed[place] = mask
    prompts = [[mask] * 3, [mask] * 4, [7, mask, 8, mask, mask, 9], mixed]
    params = [params_of(chosen, 30, seed) for seed in range(len(prompts))]
    found = generate(engine(checkpoint, block_size=32), prompts, params)
    num_decided = 0
    for seed, (prompt, ours) in enumerate(zip(prompts, found, strict=True)):
        theirs = partial(decode.generate, prompt, 30, chosen, seed)
        if isinstance(decode, FirstTokenReference):
            num_decided += theirs().decided_steps(ours, chosen.temperature)
        else:
            num_decided += blocks_decided_alike(ours, theirs, decode)
    num_blocks = 8 * len(prompts)
    assert num_decided >= tolerances.DECIDED * num_blocks


@each("Nemotron", thorough=("SDAR", "LLaDA2", "Fast-dLLM", "MoE"))
def test_two_processes_answer_as_one(
    engine: GetEngine, made: GetMade, two_processes: dict[str, int], family: str
) -> None:
    """Seeded and not, with edits and without, with a grammar and without."""
    path, prompts = made(family, 4).checkpoint, prompts_of(4) * 2
    rules = (RULES["warm"], RULES["dynamic"], RULES["edited"], RULES["dynamic"])
    # Two processes round otherwise: by up to 1e-6 of a cumulative probability. Of SDAR and LLaDA2,
    # no draw of these seeds that an answer without a grammar depends on is within 1e-4 of one.
    seeds = range(40, 40 + len(prompts))
    params = [params_of(rules[i % 4], 30 + i, seed) for i, seed in enumerate(seeds)]
    for some in params[1::3]:
        some.ignore_eos = False
        some.structured_outputs = StructuredOutputsParams(regex="[a-z]{3}( [a-z]{2})*")

    def answers(served: Engine) -> list[list[int]]:
        return [found.tokens for found in generate(served, prompts, params)]

    one = engine(path, block_size=32)
    alone = decided(one.llm, lambda: answers(one))
    apart = family in ("MoE", "LLaDA2")
    two = engine(path, block_size=32, enable_expert_parallel=apart, **two_processes)
    assert_same(answers(two), alone)


def test_prefix_cache_holds_whole_blocks(engine: GetEngine, made: GetMade) -> None:
    """A prompt that ends inside a block leaves nothing of it: what follows may differ."""
    checkpoint, decode = made("SDAR", 32)
    model = engine(checkpoint, block_size=32)
    prompt, rule = random_ids(100, VOCABULARY, 1), RULES["dynamic"]
    (first,) = generate(model, [prompt], [params_of(rule, 60, 0)])
    for longer in (prompt + random_ids(40, VOCABULARY, 2), prompt + first.tokens[:50]):
        (output,) = model.ask([longer], params_of(rule, 40, 0))
        assert output.num_cached_tokens >= 96
        assert tokens_of(output) == decode.generate(longer, 40, rule).tokens


SETTLED = Rule("dynamic", threshold=0.4, edit=0.6)  # its blocks end when nothing changes any more


@pytest.mark.parametrize(
    ("family", "rule", "length", "more"),
    [
        pytest.param("SDAR", RULES["dynamic"], 3, 5, id="by prefills"),
        pytest.param("SDAR", RULES["warm"], 40, 5, id="by prefills of what was drawn"),
        pytest.param("LLaDA2", RULES["edited"], 40, 5, id="by prefills of edits"),
        pytest.param("LLaDA2", SETTLED, 40, 5, id="by last steps"),
        pytest.param("LLaDA2.2", MOVING_RULES["published"], 40, 5, id="by blocks that moved"),
        ("Nemotron", RULES["dynamic"], 3, 5),
        ("Nemotron", RULES["dynamic"], 40, 5),
        ("Fast-dLLM", RULES["dynamic"], 3, 5),
        ("Fast-dLLM", RULES["dynamic"], 40, 5),
        ("Fast-dLLM", RULES["dynamic"], 64, 32),
    ],
)
def test_committed_keys_are_a_prefill_s(
    engine: GetEngine, made: GetMade, family: str, rule: Rule, length: int, more: int
) -> None:
    """The next turn of a chat, of `more` tokens, finds all blocks but the last, which is not
    committed."""
    checkpoint, decode = made(family, 32)
    model = engine(checkpoint, block_size=32)
    prompt = random_ids(length, VOCABULARY, length)
    (first,) = generate(model, [prompt], [params_of(rule, 128 - length % 32, 0)])
    if family == "LLaDA2":
        unchanged, changed = ends_of_edits(first)
        assert unchanged == 3 if rule == SETTLED else changed > 0
    turn, count = prompt + first.tokens + random_ids(more, VOCABULARY, 9), 32 - more % 32
    at_once = params_of(AT_ONCE, count, 0, logprobs=20)
    if isinstance(decode, LevenshteinReference):  # a second step finds that nothing changes
        at_once = params_of(AT_ONCE._replace(edit=1.0), count, 0, logprobs=20)
        at_once.logit_bias = {decode.delete: -100.0, decode.split: -100.0}
    for cached in (length // 32 * 32 + 96, 0):
        (output,) = model.ask([turn], at_once)
        assert output.num_cached_tokens == cached
        scores, others = output.outputs[0].logprobs, 0
        if isinstance(decode, LevenshteinReference):
            expected = decode.logits(turn + tokens_of(output))[len(turn) :].log_softmax(-1)
        else:
            placed = decode.generate(turn, count, AT_ONCE).placed[:count]
            expected = torch.stack([each.logprobs for each in placed])
            others = int(family == "Nemotron")  # its first token has those of the block's step
        assert_scores(expected[others:], scores[others:])
        assert model.llm.reset_prefix_cache()


@pytest.mark.parametrize(
    ("family", "rule", "is_ahead"),
    [
        ("SDAR", "warm", True),
        ("LLaDA2", "edited", True),
        ("Nemotron", "warm", False),
        ("Fast-dLLM", "dynamic", False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("SDAR", "warm", False),
                ("LLaDA2", "edited", False),
                ("Nemotron", "warm", True),
                ("Fast-dLLM", "dynamic", True),
            )
        ),
    ],
)
def test_log_probabilities_at_the_moment_of_unmasking(
    engine: GetEngine, made: GetMade, asynchronous: None, family: str, rule: str, is_ahead: bool
) -> None:
    """Of the step that put a token where it is, and which one that was; beside requests that ask
    for those of a block's last step, or for none."""
    (checkpoint, decode), chosen = made(family, 4), FAMILIES[family].rules[rule]
    model = engine(checkpoint, block_size=32, max_num_batched_tokens=23, async_scheduling=is_ahead)
    prompts = prompts_of(4) * 2
    params = [params_of(chosen, 30 + seed, seed, logprobs=3) for seed in range(len(prompts))]
    for some in params:
        some.extra_args = {**(some.extra_args or {}), "diffusion_logprobs": "unmask"}
    others = [params_of(chosen, 40, 50, logprobs=2), params_of(chosen, 40, 51)]
    model.trace.write_text("")
    outputs = model.ask([*prompts, *prompts[:2]], [*params, *others])
    plain = outputs[-2].outputs[0].logprobs
    assert not any(isinstance(each, RevealedLogprob) for row in plain for each in row.values())
    num_same, steps = 0, set()
    found = served(model, outputs)
    for seed, (prompt, ours, output) in enumerate(zip(prompts, found, outputs, strict=False)):
        theirs = decode.generate(prompt, 30 + seed, chosen, seed)
        num_steps = len(theirs.steps)  # behind them, one may be on its way
        if ours.tokens != theirs.tokens or (
            first_parting(ours.steps[:num_steps], theirs.steps) is not None
        ):
            continue
        num_same += 1
        expected = theirs.placed[: len(ours.tokens)]
        scores = output.outputs[0].logprobs
        assert_scores(torch.stack([placed.logprobs for placed in expected]), scores)
        of_tokens = [row[token] for row, token in zip(scores, ours.tokens, strict=True)]
        assert [each.step for each in of_tokens] == [placed.step for placed in expected]
        assert all(each.rank is not None and 1 <= each.rank < VOCABULARY * 2 for each in of_tokens)
        steps |= {each.step for each in of_tokens}
    assert num_same >= tolerances.DECIDED * len(prompts)
    assert steps >= ({1, 2} if family in ("SDAR", "LLaDA2") else {0, 1, 2})


FORWARDS_BESIDE_STEPS: dict[str, Callable[[bool], int]] = {  # of ten blocks, by whether the prompt
    # is whole blocks
    "SDAR": lambda is_whole: 0,  # prompts and commits share those of steps
    "Nemotron": lambda is_whole: 10,  # one for the prompt and for each block but the last
    "Fast-dLLM": lambda is_whole: 9 + is_whole,  # other prompts share that of the first step
}


@each(*FORWARDS_BESIDE_STEPS)
def test_forwards(
    engine: GetEngine, made: GetMade, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = engine(made(family, 4).checkpoint, block_size=32)
    forwards = count_forwards(model, monkeypatch)
    for prompt in prompts_of(4):
        forwards.clear()
        cut = 0 if family == "Nemotron" else len(prompt) % 4
        (found,) = generate(model, [prompt], [params_of(RULES["dynamic"], 40 - cut, 0)])
        beside = FORWARDS_BESIDE_STEPS[family](len(prompt) % 4 == 0)
        assert len(forwards) == len(found.steps) + beside


@pytest.mark.parametrize("family", ["SDAR", "LLaDA2"])
def test_an_unchanged_block_is_committed(
    engine: GetEngine, made: GetMade, monkeypatch: pytest.MonkeyPatch, family: str, is_ahead: bool
) -> None:
    """A step that changes nothing leaves a prefill's keys and values: only blocks that the last of
    their steps changed are computed again, next to the first step of the next one, or by a forward
    of their own."""
    options = {"enable_prefix_caching": False, "async_scheduling": is_ahead}
    model = engine(made(family, 4).checkpoint, **options)
    for prompt, rows, num_steps, num_changed in edited(model, monkeypatch):
        assert len(rows) == num_steps + (num_changed if is_ahead else 0)
        if not is_ahead:
            assert sum(rows) == len(prompt) // 4 * 4 + 4 * (num_steps + num_changed)


def edited(
    model: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[int], list[int], int, int]]:
    """Prompts, answered with edits: the rows of each forward, the denoise steps, and how many
    blocks the last of their steps changed."""
    rows = count_forwards(model, monkeypatch)
    for prompt in prompts_of(4):
        rows.clear()
        (found,) = generate(model, [prompt], [params_of(RULES["edited"], 40, 0)])
        unchanged, changed = ends_of_edits(found)
        assert unchanged and changed, "both happen"
        yield prompt, rows, len(found.steps), changed


def ends_of_edits(found: Trajectory) -> tuple[int, int]:
    """Blocks before the last one that ended with a step that changed nothing, and the others."""
    ends = [i for i, step in enumerate(found.steps) if step.finished][:-1]
    unchanged = sum(
        0 not in found.steps[i - 1].revealed and found.steps[i - 1].canvas == found.steps[i].canvas
        for i in ends
    )
    return unchanged, len(ends) - unchanged


def test_published_weights_are_in_bf16(engine: GetEngine, made: GetMade) -> None:
    """Requests of every other length leave first, so that the others' slots lie apart. The first
    steps are of prompts alone, which ended processes with AMX."""
    model = engine(made("SDAR", 4).checkpoint, dtype="bfloat16", max_num_batched_tokens=24)
    prompts = prompts_of(4)
    lengths = [40, 8, 40, 8, 40]
    params = [params_of(RULES["dynamic"], most, seed) for seed, most in enumerate(lengths)]
    assert [len(found.tokens) for found in generate(model, prompts, params)] == lengths


@each("SDAR", "Nemotron", "Fast-dLLM")
def test_the_context_cuts_the_last_canvas(engine: GetEngine, made: GetMade, family: str) -> None:
    model = engine(made(family, 32).checkpoint, max_model_len=110, block_size=32)
    (found,) = generate(model, [random_ids(40, VOCABULARY, 4)], [params_of(Rule(), 500, 0)])
    assert len(found.tokens) == 70
