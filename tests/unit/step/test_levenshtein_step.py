"""Blocks that delete and insert, step by step as the published loop does it, of a model that is
made up: what it says of a block is a function of the tokens that it finds there."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.levenshtein import LevenshteinReference
from tests.engine.masked import Rule, Step
from tests.engine.masked_requests import MOVING_RULES, params_of
from tests.unit.step.worker import MASK, V, Worker, noise, sure
from vllm_dllm.denoise import noise as numbers
from vllm_dllm.step.masked import levenshtein_step
from vllm_dllm.step.masked.levenshtein_step import LevenshteinStep

pytestmark = pytest.mark.slow
GetWorker = Callable[..., Worker]
DELETE, SPLIT = 501, 502
NUM_BLOCKS = {4: 67, 32: 7}  # of each of three requests, by their length


def says(block: list[int]) -> torch.Tensor:
    """[C, V] fp32. It likes what it finds, at times another token, and now and then to delete or to
    insert; it says the mask itself, too."""
    keys = numbers.keys_from_seeds(torch.tensor(block)[None] + 7 * torch.arange(len(block)))
    seed = int(numbers.keys_from_seeds(keys.sum()[None] * 3)[0]) % 2**31
    logits = noise(len(block), seed, scale=2.0)
    logits[range(len(block)), block] += 12.0
    logits[[token == MASK for token in block], MASK] -= 12.0
    logits[:, [DELETE, SPLIT]] += 3.5
    return logits


class Loop(LevenshteinReference):
    """The published loop around that model."""

    def __init__(self, block_length: int) -> None:
        self.block_length, self.mask_id = block_length, MASK
        self.delete, self.split = DELETE, SPLIT
        self.happened = Counter()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        known = torch.zeros(len(tokens) - self.block_length, V)
        return torch.cat((known, says(tokens[-self.block_length :])))


@pytest.fixture
def moving(worker: GetWorker) -> GetWorker:
    def make(block_length: int, **options: Any) -> Worker:
        ids = {"delete_token_id": DELETE, "split_token_id": SPLIT}
        return worker(
            LevenshteinStep,
            "LLaDA2MoeModelLM",
            canvas_length=block_length,
            context=8192,
            says=ids,
            **options,
        )

    return make


def admit(one: Worker, name: str, prompt: int, rule: Rule, seed: int, num_tokens: int) -> None:
    asked = params_of(rule, num_tokens, seed).extra_args or {}
    one.admit(
        name, prompt=prompt, temperature=rule.temperature, seed=seed, max_tokens=num_tokens, **asked
    )
    one.requests[name].computed = prompt // one.stepping.canvas_length * one.stepping.canvas_length


def rows_of(one: Worker, name: str, block_length: int) -> torch.Tensor:
    """What the model says of its known tokens, and of the block that it is at."""
    request = one.requests[name]
    first = len(request.tokens) % block_length
    known = request.tokens[len(request.tokens) - first :]
    block = known + one.canvas(name)[: block_length - first]
    before = len(request.tokens) - first - request.computed
    return torch.cat((torch.zeros(before, V), says(block)))


def follow(one: Worker, names: list[str], block_length: int) -> dict[str, list[Step]]:
    """The steps of these requests, together, until each has its blocks."""
    steps: dict[str, list[Step]] = {name: [] for name in names}
    running = list(names)
    while running:
        found = one.step({name: rows_of(one, name, block_length) for name in running})
        for name in list(running):
            request = one.requests[name]
            if block := found.emitted[name]:
                steps[name].append(Step(block, [1] * len(block), block, True))
            else:
                width = block_length - len(request.tokens) % block_length
                canvas = one.canvas(name)[:width]
                revealed = [int(token != MASK) for token in canvas]
                steps[name].append(Step(canvas, revealed, canvas, False))
            if len(one.answer(name)) >= (request.params.max_tokens or 0):
                running.remove(name)
    return steps


@pytest.mark.parametrize("block_length", [4, 32])
@pytest.mark.parametrize("name", MOVING_RULES)
def test_blocks_move_as_in_the_published_loop(
    moving: GetWorker, name: str, block_length: int
) -> None:
    """More than 200 blocks, alone and in company, one of which shares its block with the prompt."""
    rule = MOVING_RULES[name]
    loop = Loop(block_length)
    num_tokens = NUM_BLOCKS[block_length] * block_length
    prompts = {"a": block_length, "b": block_length + 3, "c": 2}
    expected = {
        each: loop.generate(list(range(10, 10 + prompt)), num_tokens, rule, seed).steps
        for seed, (each, prompt) in enumerate(prompts.items())
    }
    together = moving(block_length)
    for seed, (each, prompt) in enumerate(prompts.items()):
        admit(together, each, prompt, rule, seed, num_tokens)
    found = follow(together, list(prompts), block_length)
    for seed, (each, prompt) in enumerate(prompts.items()):
        alone = moving(block_length)
        admit(alone, each, prompt, rule, seed, num_tokens)
        assert follow(alone, [each], block_length) == {each: expected[each]}
        assert found[each] == expected[each]
    ends = [step for steps in expected.values() for step in steps if step.finished]
    assert len(ends) >= 3 * NUM_BLOCKS[block_length]
    often = ("escaped", "last") if block_length == 4 else ()
    assert min(loop.happened[event] for event in ("deleted", "inserted", *often)) > 0
    assert loop.happened["last"] < len(ends), "others end because nothing changes any more"


def test_a_block_ends_after_so_many_steps(
    moving: GetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that inserts for ever gets other tokens, one that says the mask is taken at its
    word."""
    monkeypatch.setattr(levenshtein_step, "MOST_STEPS", 9)
    for said, answer in ((SPLIT, 33), (MASK, MASK)):
        one = moving(4)
        one.admit("a", temperature=0.0, max_tokens=4, diffusion_edit_steps=16)
        rows = torch.maximum(sure([33] * 4, nats=10.0), sure([said] * 4))
        emitted = [one.step({"a": rows}).emitted["a"] for _ in range(9)]
        assert emitted == [[]] * 8 + [[answer] * 4]


def test_what_is_taken_back_leaves_nothing(moving: GetWorker) -> None:
    rule, loop = MOVING_RULES["published"], Loop(4)
    expected = loop.generate(list(range(10, 14)), 80, rule, 0).steps
    one, found = moving(4), []
    admit(one, "a", 4, rule, 0, 80)
    while len(one.answer("a")) < 80:
        assert one.step({"a": noise(3, seed=len(found))}).emitted == {"a": []}
        if block := one.step({"a": rows_of(one, "a", 4)}).emitted["a"]:
            found.append(block)
    assert found == [step.tokens for step in expected if step.finished]
    assert loop.happened["deleted"] and loop.happened["inserted"]
