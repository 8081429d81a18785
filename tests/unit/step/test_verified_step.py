"""Drafts that the same weights verify, and blocks that delete and insert, step by step as the
published loop does it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.levenshtein import LevenshteinReference
from tests.engine.masked import Rule, Step
from tests.engine.masked_requests import MOVING_RULES, params_of
from tests.unit.step.worker import MASK, C, V, Worker, noise, sure
from vllm_dllm.denoise import noise as numbers
from vllm_dllm.step.masked import levenshtein_step
from vllm_dllm.step.masked.first_token_step import VerifiedStep
from vllm_dllm.step.masked.levenshtein_step import LevenshteinStep

GetWorker = Callable[..., Worker]
joining = pytest.mark.parametrize("joins", [True, False], ids=["joins", "runs ahead"])


def made(
    worker: GetWorker, joins: bool = True, mode: str = "self_speculation", **asked: Any
) -> Worker:
    """With a request whose prompt foretells 21."""
    one = worker(VerifiedStep, "NemotronLabsDiffusionModel", joins_commits=joins)
    admit(one, "a", mode, **asked)
    one.step({"a": torch.cat([noise(C - 1), sure([21])])})
    return one


def admit(one: Worker, req_id: str, mode: str, **asked: Any) -> None:
    width = {"canvas_length": 1} if mode == "autoregressive" else {}
    one.admit(req_id, computed=0, diffusion_mode=mode, carried=width, temperature=0.0, **asked)


@joining
@pytest.mark.parametrize(
    ("behind", "emitted", "following"),
    [
        ([99, 98, 97, 96], [21], 99),
        ([22, 98, 24, 96], [21, 22], 98),
        ([22, 23, 97, 25], [21, 22, 23], 97),
        ([22, 23, 24, 25], [21, 22, 23, 24], 25),
    ],
    ids=["nothing else", "a part", "all but the last", "all"],
)
def test_a_draft_stands_as_far_as_it_is_what_is_drawn(
    worker: GetWorker, joins: bool, behind: list[int], emitted: list[int], following: int
) -> None:
    one = made(worker, joins)
    found = one.step({"a": sure([9, 22, 23, 24])})
    assert found.emitted == {"a": []} and found.rejected == {"a": C}
    assert one.canvas("a") == [21, 22, 23, 24]
    found = one.step({"a": sure(behind)})
    assert found.emitted == {"a": emitted} and found.rejected == {"a": C - len(emitted)}
    assert one.canvas("a") == [following, MASK, MASK, MASK]
    one.step({"a": sure([9, 32, 33, 34])})
    assert one.canvas("a") == [following, 32, 33, 34]


@joining
@pytest.mark.parametrize("asked", [{"eos": 23}, {"max_tokens": 3}], ids=["stop token", "length"])
@pytest.mark.parametrize("mode", ["self_speculation", "autoregressive"])
def test_a_token_that_ends_the_answer_needs_no_forward(
    worker: GetWorker, joins: bool, mode: str, asked: dict[str, Any]
) -> None:
    one = made(worker, joins, mode, **asked)
    if mode == "self_speculation":
        one.step({"a": sure([9, 22, 99, 98])})
        found = one.step({"a": sure([22, 23, 97, 96])})
    else:
        one.step({"a": sure([22])})
        found = one.step({"a": sure([23])})
    assert found.emitted["a"][-2:] == [22, 23] and one.answer("a") == [21, 22, 23]


@joining
def test_a_first_token_that_ends_the_answer_is_not_drafted_behind(
    worker: GetWorker, joins: bool
) -> None:
    """Where the forward that foretold it could not show it."""
    one = made(worker, joins, eos=21)
    assert one.step({"a": sure([9, 22, 23, 24])}).emitted == {"a": [21]}


@joining
def test_a_step_of_too_few_rows_is_taken_back(worker: GetWorker, joins: bool) -> None:
    one = made(worker, joins)
    one.step({"a": sure([9, 22, 23, 24])})
    found = one.step({"a": sure([22, 23])})
    assert found.emitted == {"a": []} and found.rejected == {"a": 2}
    found = one.step({"a": sure([22, 98, 97, 96])})
    assert found.emitted == {"a": [21, 22]} and one.canvas("a")[0] == 98


@joining
def test_modes_share_a_step(worker: GetWorker, joins: bool) -> None:
    one = worker(VerifiedStep, "NemotronLabsDiffusionModel", joins_commits=joins)
    one.admit("diffusion", computed=0, diffusion_accept_probability=0.9, seed=3)
    admit(one, "drafts", "self_speculation")
    admit(one, "one by one", "autoregressive")
    prompt = torch.cat([noise(C - 1), sure([21])])
    one.step(dict.fromkeys(one.requests, prompt))
    first = {"diffusion": sure([21, 22, 23, 24]), "drafts": sure([9, 22, 23, 24])}
    found = one.step({**first, "one by one": sure([22])})
    assert found.emitted["drafts"] == [] and found.emitted["one by one"] == [21]
    assert found.emitted["diffusion"] == ([21, 22, 23, 24] if joins else [])
    commit = torch.cat([noise(C - 1), sure([31])])
    second = {"diffusion": commit, "drafts": sure([22, 98, 97, 96])}
    one.step({**second, "one by one": sure([23])})
    assert one.answer("diffusion") == [21, 22, 23, 24]
    assert one.canvas("diffusion") == [31, MASK, MASK, MASK]
    assert one.answer("drafts") == [21, 22] and one.canvas("drafts") == [98, MASK, MASK, MASK]
    assert one.answer("one by one") == [21, 22]


def test_both_modes_draw_a_position_by_the_same_number(worker: GetWorker) -> None:
    """So that a seed has one answer."""
    firsts = set()
    for seed in range(6):
        answers = []
        for mode in ("self_speculation", "autoregressive"):
            one = worker(VerifiedStep, "NemotronLabsDiffusionModel")
            width = {"canvas_length": 1} if mode == "autoregressive" else {}
            one.admit("a", computed=0, diffusion_mode=mode, carried=width, seed=seed)
            one.step({"a": noise(C)})
            says = {position: noise(1, seed=position) for position in range(40)}  # of its row
            while len(one.answer("a")) < 6:
                start, length = one.requests["a"].computed, C if mode[0] == "s" else 1
                one.step({"a": torch.cat([says[start + i] for i in range(length)])})
            answers.append(one.answer("a")[:6])
        assert answers[0] == answers[1]
        firsts.add(answers[0][0])
    assert len(firsts) > 1


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


def admit_moving(
    one: Worker, name: str, prompt: int, rule: Rule, seed: int, num_tokens: int
) -> None:
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


@pytest.mark.slow
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
        admit_moving(together, each, prompt, rule, seed, num_tokens)
    found = follow(together, list(prompts), block_length)
    for seed, (each, prompt) in enumerate(prompts.items()):
        alone = moving(block_length)
        admit_moving(alone, each, prompt, rule, seed, num_tokens)
        assert follow(alone, [each], block_length) == {each: expected[each]}
        assert found[each] == expected[each]
    ends = [step for steps in expected.values() for step in steps if step.finished]
    assert len(ends) >= 3 * NUM_BLOCKS[block_length]
    often = ("escaped", "last") if block_length == 4 else ()
    assert min(loop.happened[event] for event in ("deleted", "inserted", *often)) > 0
    assert loop.happened["last"] < len(ends), "others end because nothing changes any more"


@pytest.mark.slow
def test_a_block_ends_after_so_many_steps(
    moving: GetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that inserts for ever gets other tokens, one that says the mask is taken at its
    word."""
    monkeypatch.setattr(levenshtein_step, "MOST_STEPS", 9)
    for said, answer in ((SPLIT, 33), (MASK, MASK)):
        one = moving(4).admit("a", temperature=0.0, max_tokens=4, diffusion_edit_steps=16)
        rows = torch.maximum(sure([33] * 4, nats=10.0), sure([said] * 4))
        emitted = [one.step({"a": rows}).emitted["a"] for _ in range(9)]
        assert emitted == [[]] * 8 + [[answer] * 4]


@pytest.mark.slow
def test_what_is_taken_back_leaves_nothing(moving: GetWorker) -> None:
    rule, loop = MOVING_RULES["published"], Loop(4)
    expected = loop.generate(list(range(10, 14)), 80, rule, 0).steps
    one, found = moving(4), []
    admit_moving(one, "a", 4, rule, 0, 80)
    while len(one.answer("a")) < 80:
        assert one.step({"a": noise(3, seed=len(found))}).emitted == {"a": []}
        if block := one.step({"a": rows_of(one, "a", 4)}).emitted["a"]:
            found.append(block)
    assert found == [step.tokens for step in expected if step.finished]
    assert loop.happened["deleted"] and loop.happened["inserted"]
