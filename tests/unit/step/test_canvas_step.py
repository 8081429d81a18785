"""How far a step takes each canvas: limits of steps, what is emitted, committed or taken back, and
slots that others had before."""

from typing import Any

import pytest
import torch

from tests.unit.step.worker import CONTEXT, C, GetWorker, Worker, noise, sure

BLOCK, OTHER = [21, 22, 23, 24], [31, 32, 33, 34]
BLOCKS: dict[str, dict[str, Any]] = {
    "goes on": {"max_tokens": 3 * C},
    "the last": {"max_tokens": C},
    "stops": {"stop_token_ids": [5, 23]},
}


def state(worker: Worker, req_id: str) -> list[list[float]]:
    """All that a step changes."""
    slot = torch.tensor([worker.slot(req_id)])
    return [column[0].tolist() for column in worker.slots.snapshot(slot).values()]


@pytest.mark.parametrize(
    ("joins", "commits_last", "kind", "emits_in", "commits"),
    [
        (True, False, "goes on", 2, False),  # beside its successor
        (True, False, "the last", 2, False),
        (False, False, "goes on", 3, True),
        (False, False, "the last", 2, True),
        (False, False, "stops", 2, True),
        (True, True, "goes on", 2, False),
        (True, True, "the last", 3, False),
        (True, True, "stops", 3, False),
        (False, True, "the last", 3, True),
    ],
)
def test_when_a_block_is_emitted(
    worker: GetWorker,
    joins: bool,
    commits_last: bool,
    kind: str,
    emits_in: int,
    commits: bool,
) -> None:
    """A model without a doubt takes two steps, and a third where the block has its own commit. The
    block behind takes as many: nothing has been guessed of it."""
    one = worker(joins_commits=joins, settings={"commit_last_block": commits_last})
    one.admit("a", **BLOCKS[kind])
    for block in range(2 if kind == "goes on" else 1):
        for step in range(1, emits_in + 1):
            commit = step == 3 and noise(C)  # of which nothing is read
            says = sure(BLOCK) if commit is False else commit
            known = len(one.requests["a"].tokens) - one.requests["a"].computed
            found = one.step({"a": torch.cat([noise(known), says])})
            is_over = step == emits_in
            assert found.emitted == {"a": BLOCK if is_over else []}, (block, step)
            assert found.rejected == {"a": 0 if commits and is_over else C}


def test_a_canvas_takes_as_many_steps_as_it_may(worker: GetWorker) -> None:
    one = worker()
    one.admit("a", diffusion_max_steps=3)
    one.admit("b", diffusion_max_steps=5, seed=1)
    emitted: dict[str, list[int]] = {"a": [], "b": []}
    for step in range(1, 11):
        known = [len(one.requests[name].tokens) - one.requests[name].computed for name in "ab"]
        says = [noise(known[i] + C, 2 * step + i) for i in range(2)]
        found = one.step(dict(zip("ab", says, strict=True)))
        for name, tokens in found.emitted.items():
            if tokens:
                emitted[name].append(step)
    assert emitted == {"a": [3, 6, 9], "b": [5, 10]}


def test_a_part_of_a_canvas_is_taken_back(worker: GetWorker) -> None:
    """As if the step had never been; a neighbour goes on."""
    one = worker()
    for name in "ab":
        one.admit(name)
    one.step({"a": sure(BLOCK), "b": sure(OTHER)})
    before = state(one, "a")
    step = one.step({"a": sure(BLOCK[:3]), "b": sure(OTHER)})
    assert step.emitted == {"a": [], "b": OTHER} and step.rejected["a"] == 3
    assert state(one, "a") == before
    assert one.step({"a": sure(BLOCK)}).emitted == {"a": BLOCK}


@pytest.mark.parametrize(
    ("asked", "prompt", "width"),
    [
        ({}, CONTEXT - 3, 3),
        ({"diffusion_canvas_length": 2}, C, 2),
    ],
    ids=["the context ends", "as asked"],
)
def test_a_narrow_canvas_is_whole(
    worker: GetWorker, asked: dict[str, int], prompt: int, width: int
) -> None:
    one = worker()
    one.admit("a", prompt, **asked)
    one.step({"a": sure(BLOCK[:width])})
    assert one.step({"a": sure(BLOCK[:width])}).emitted == {"a": BLOCK[:width]}


def test_a_canvas_behind_the_end_is_taken_back(worker: GetWorker) -> None:
    """With asynchronous scheduling: ten tokens take no canvas of 32."""
    one = worker(joins_commits=False, canvas_length=32)
    one.admit("a", max_tokens=10, carried={"fits_canvases": True})
    before = state(one, "a")
    one.step({"a": noise(32)}, late=16)
    assert state(one, "a") == before
    one.step({"a": noise(16)}, late=16)
    assert state(one, "a") != before


@pytest.mark.parametrize("leaves", ["a", "stays"])
def test_a_slot_is_the_latest_requests(worker: GetWorker, leaves: str) -> None:
    """What was guessed for the one before counts for nothing."""
    one, fresh = worker(), worker()
    one.admit("stays", seed=5)
    one.admit("a")
    one.step({"stays": noise(C), "a": sure(BLOCK)})
    slot = one.slot(leaves)
    one.leave(leaves)
    one.admit("b", seed=3)
    assert one.slot("b") == slot
    fresh.admit("b", seed=3)
    for _ in range(2):
        assert state(one, "b") == state(fresh, "b")
        found, expected = (w.step({"b": sure(BLOCK)}).emitted for w in (one, fresh))
        assert found == expected
    assert found == {"b": BLOCK}


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_after_a_preemption(worker: GetWorker, steps: int, joins: bool) -> None:
    """The canvas starts anew, where the answer was, with the noise that it had."""
    stayed, back = (worker(joins_commits=joins) for _ in range(2))
    for one in (stayed, back):
        one.admit("a", diffusion_max_steps=2, seed=9)
    runs = {"stayed": stayed, "back": back}
    begun: dict[str, dict[int, list[int]]] = {"stayed": {}, "back": {}}

    def step(name: str) -> None:
        request = runs[name].requests["a"]
        known, begins = len(request.tokens) - request.computed, len(request.tokens)
        numbers = runs[name].slots.read_numbers(torch.tensor([runs[name].slot("a")]))
        if not numbers.steps_done:
            begun[name][begins] = runs[name].canvas("a")
        says = noise(known + C, seed=100 * begins + int(numbers.steps_done))
        runs[name].step({"a": says if joins else says[known:]})

    for _ in range(steps):
        step("back")
    back.leave("a")
    back.admit("other", seed=2)
    back.requests["a"].computed = len(back.requests["a"].tokens)
    back.place("a")
    for name, one in runs.items():
        while len(one.answer("a")) < 4 * C:
            step(name)
    assert back.answer("a") == stayed.answer("a") and begun["back"] == begun["stayed"]


def test_numbers_are_taken_once(worker: GetWorker) -> None:
    one = worker()
    one.admit("a")
    one.step({"a": sure(BLOCK)})
    assert one.sampler.take_numbers() is None, "nobody counts"
    one.admit("b", carried={"is_counted": True})
    one.step({"b": sure(BLOCK)})
    numbers = one.sampler.take_numbers()
    assert numbers is not None and [(row.step, row.accepted) for row in numbers.rows()] == [(1, C)]
    assert one.stepping.memory.peak_bytes == numbers.sampling_peak_bytes > 0
    assert numbers.sampling_bound_bytes > numbers.sampling_peak_bytes
    assert one.sampler.take_numbers() is None


@pytest.mark.parametrize("streams", [True, False])
def test_a_forward_without_canvases_makes_whole_logits(worker: GetWorker, streams: bool) -> None:
    """As prompts' log-probabilities need them. What is known of a step ends with it."""
    one = worker()
    one.stepping.model.streams_vocabulary = streams
    one.admit("a", prompt=2 * C, computed=0)
    one.stepping.begin_step(one._batch({"a": C}, late=0))
    assert not one.stepping.reads_hidden_states
    one.stepping.begin_step(one._batch({"a": 3 * C}, late=0))
    assert one.stepping.reads_hidden_states == streams
    one.stepping.begin_step(one._batch({"a": C}, late=0))
    assert not one.stepping.reads_hidden_states
    one.stepping.begin_step(one._batch({"a": 3 * C}, late=0))
    one.stepping.take_batch()
    assert not one.stepping.reads_hidden_states


PINS = {"diffusion_seed_canvas": [40] * C, "diffusion_pinned": [0, 2]}


@pytest.mark.parametrize("joins", [True, False])
def test_pins_hold_through_the_first_canvas(worker: GetWorker, joins: bool) -> None:
    """And not where it is committed, on its own or not."""
    one = worker(joins_commits=joins)
    one.admit("a", **PINS, diffusion_max_steps=3)
    held = []
    for step in range(6):
        known = len(one.requests["a"].tokens) - one.requests["a"].computed
        one.step({"a": noise(known + C, step)})
        held.append(one.canvas("a")[::2] == [40, 40])
    assert held == [True, True, *[False] * 4]


def test_pins_are_not_emitted_where_tokens_are_revealed_for_good(worker: GetWorker) -> None:
    """Nor do they bring tokens that the request excludes."""
    one = worker()
    top_1 = {"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 1}
    one.admit("a", **PINS, **top_1, allowed_token_ids=[7, 8, 9])
    for step in range(C):
        assert (one.canvas("a")[::2] == [40, 40]) and not one.answer("a")
        one.step({"a": noise(C, step)})
    assert set(one.answer("a")) <= {7, 8, 9} and len(one.answer("a")) == C
