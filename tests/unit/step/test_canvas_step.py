"""How far a step takes each canvas: which rows are its own, what its request's settings and the
load do to it, limits of steps, what is emitted, committed or taken back."""

from typing import Any

import pytest
import torch

from tests.unit.step.batches import canvas_batch
from tests.unit.step.worker import C, GetWorker, V, Worker, noise, sure
from vllm_dllm.config.extension import LoadStage
from vllm_dllm.denoise.step import StepRules
from vllm_dllm.step.asked.settings import LoadStages

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
    worker: GetWorker, joins: bool, commits_last: bool, kind: str, emits_in: int, commits: bool
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


def test_a_canvas_behind_the_end_is_taken_back(worker: GetWorker) -> None:
    """With asynchronous scheduling: ten tokens take no canvas of 32."""
    one = worker(joins_commits=False, canvas_length=32)
    one.admit("a", max_tokens=10, carried={"fits_canvases": True})
    before = state(one, "a")
    one.step({"a": noise(32)}, late=16)
    assert state(one, "a") == before
    one.step({"a": noise(16)}, late=16)
    assert state(one, "a") != before


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
    one = worker().admit("a")
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
    one = worker(joins_commits=joins).admit("a", **PINS, diffusion_max_steps=3)
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


STAGES = (
    LoadStage(4, stability_threshold=0),
    LoadStage(8, confidence_threshold=0.02, stability_threshold=0),
)
OWN = [(0.005, 1), (0.05, 3), (0.001, 0)]  # confidence, stability of three requests


def expected(num_canvases: int, own: tuple[float, int], allowed: int) -> tuple[float, float]:
    confidence, stability = own
    for stage in STAGES[:allowed]:
        if num_canvases >= stage.canvases:
            confidence = max(confidence, stage.confidence_threshold)
            stability = min(stability, stage.stability_threshold)
    return confidence, stability


@pytest.mark.parametrize("num_canvases", [1, 3, 4, 7, 8, 100])
def test_thresholds_follow_the_load(num_canvases: int) -> None:
    load = LoadStages(STAGES, torch.device("cpu"))
    rows = [(own, allowed) for own in OWN for allowed in (0, 1, 2, 9)]
    rules = StepRules(
        0.1,
        torch.tensor([own[0] for own, _ in rows]),
        torch.tensor([float(own[1]) for own, _ in rows]),
    )
    if reached := load.num_stages_at(num_canvases):
        rules = load.loosen(rules, torch.tensor([allowed for _, allowed in rows]), reached)
    want = [expected(num_canvases, own, allowed) for own, allowed in rows]
    torch.testing.assert_close(
        torch.stack((rules.confidence_threshold, rules.stability_threshold), dim=-1),
        torch.tensor(want),
        rtol=0,
        atol=0,
    )
    assert rules.entropy_bound == 0.1


def asked(**options: Any) -> dict[str, Any]:
    return {f"diffusion_{name}": value for name, value in options.items()}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 2),
        ({"stability_threshold": 3}, 4),
        ({"confidence_threshold": 1e-9, "max_steps": 5}, 5),
        ({"confidence_threshold": 9.0, "stability_threshold": 0}, 1),
    ],
)
def test_when_a_canvas_is_finished(worker: GetWorker, settings: dict[str, Any], steps: int) -> None:
    one = worker().admit("a", **asked(**settings))
    emitted = [one.step({"a": sure(BLOCK, 15.0)}).emitted["a"] for _ in range(steps)]
    assert emitted == [[]] * (steps - 1) + [BLOCK]


ALL_30, ALL_31, FIRST_30 = [30] * 2 * C, [31] * 2 * C, [30] * C + [31] * C


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({}, ALL_30),
        ({"presence_penalty": 2.0}, FIRST_30),
        ({"frequency_penalty": 0.5}, FIRST_30),
        ({"repetition_penalty": 4.0}, FIRST_30),
        ({"logit_bias": {31: 2.0}}, ALL_31),
        ({"allowed_token_ids": [31, 32]}, ALL_31),
        ({"bad_words": [[30]]}, ALL_31),
        ({"bad_words": [[30, 30]]}, [30, 31] * C),
        ({"min_tokens": 2 * C, "stop_token_ids": [30]}, ALL_31),
    ],
    ids=str,
)
def test_rules_of_tokens(worker: GetWorker, options: dict[str, Any], answer: list[int]) -> None:
    """The model's first choice is 30 and its second 31, everywhere."""
    one = worker().admit("a", **options, diffusion_max_steps=1)
    for _ in range(2):
        known = len(one.requests["a"].tokens) - one.requests["a"].computed
        says = torch.zeros(known + C, V)
        says[:, 30:32] = torch.tensor([13.0, 12.0])
        one.step({"a": says})
    assert one.answer("a") == answer


def test_the_servers_own_settings_change_nothing(worker: GetWorker) -> None:
    own = asked(t_min=0.4, t_max=0.8, entropy_bound=0.1, confidence_threshold=0.005)
    one = worker()
    one.admit("says nothing")
    one.admit("says it", **own, **asked(stability_threshold=1))
    for step in range(3):
        one.step(dict.fromkeys(one.requests, noise(C, step)))
        assert one.canvas("says it") == one.canvas("says nothing")


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"min_p": 1.0}, {"top_p": 1e-3}, {"top_k": 1}], ids=str
)
def test_greedy_candidates(worker: GetWorker, options: dict[str, float]) -> None:
    """With temperature 0 what is kept of a step is its best guess; so it is where others are left
    out."""
    one, says = worker(), noise(C, scale=1.0)
    one.admit("a", **options, **asked(entropy_bound=1e6))
    one.step({"a": says})
    assert one.canvas("a") == says.argmax(-1).tolist()


REVEALING = (
    asked(acceptance="top_k", accept_tokens=1),
    asked(acceptance="confidence", accept_probability=1.0),
)


@pytest.mark.parametrize("rule", REVEALING)
def test_a_position_is_revealed_for_good(worker: GetWorker, rule: dict[str, Any]) -> None:
    """One in each of these steps, and the last one finishes the canvas."""
    one, known = worker(), {}
    one.admit("a", **rule)
    for step in range(1, C + 1):
        emitted = one.step({"a": noise(C, step)}).emitted["a"]
        canvas, revealed = one.canvas("a"), one.slots.revealed[one.slot("a")].tolist()
        if step < C:
            assert sum(revealed) == step
            assert all(canvas[place] == token for place, token in known.items())
            known = {place: canvas[place] for place in range(C) if revealed[place]}
    assert len(emitted) == C and all(emitted[place] == known[place] for place in known)


def test_under_load_a_canvas_is_finished_sooner_where_its_request_allows_it(
    worker: GetWorker,
) -> None:
    stages = [{"canvases": 2, "stability_threshold": 0, "confidence_threshold": 9.0}]
    one = worker(settings={"load_stages": stages})
    one.admit("allows", **asked(load_stages=1))
    one.admit("does not")
    assert not one.step({"allows": noise(C)}).emitted["allows"], "alone"
    emitted = one.step({name: noise(C) for name in one.requests}).emitted
    assert emitted["allows"] and not emitted["does not"]


def test_what_follows_the_answer_is_not_waited_for(worker: GetWorker) -> None:
    one = worker()
    one.admit("judged", stop_token_ids=[22], **asked(judge_answer_only=True))
    one.admit("whole", stop_token_ids=[22], **asked(judge_answer_only=False))
    for step in range(2):
        says = torch.cat([sure(BLOCK[:2]), noise(2, step, scale=9.0)])
        emitted = one.step(dict.fromkeys(one.requests, says)).emitted
    assert emitted["judged"] and not emitted["whole"]


def test_slots_in_order_are_a_slice() -> None:
    in_order = canvas_batch(C, [4, 0, 4], [3, 9, 4], [0, 4, 0])
    assert in_order.slot_index == slice(3, 5)
    assert in_order.request_index.tolist() == [0, 2]
    for slots in ([4, 3], [3, 5]):
        index = canvas_batch(C, [4, 4], slots).slot_index
        assert isinstance(index, torch.Tensor) and index.tolist() == slots


def test_prefills_and_short_canvases() -> None:
    # A prefill that goes on, a prompt's last 3 rows with a canvas cut to 2, a full canvas.
    batch = canvas_batch(C, [0, 2, 4], [1, 0, 3], [5, 3, 0])
    assert batch.requests.tolist() == [1, 2] and batch.slots.tolist() == [0, 3]
    assert batch.tokens is not None and batch.tokens.tolist() == [8, 9, 10, 11, 12, 13]
    assert batch.cells is not None and batch.cells.tolist() == [0, 1, 4, 5, 6, 7]
    assert batch.valid is not None and batch.valid.sum(-1).tolist() == [2, 4]
    rows = torch.arange(1, 7)
    assert batch.unflatten(rows).tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert torch.equal(batch.flatten(batch.unflatten(rows)), rows)


def test_kept_for_steps_with_the_same_canvases() -> None:
    first = canvas_batch(C, [4, 4], [7, 2])
    assert canvas_batch(C, [4, 4], [7, 2]) is first
    for other in (
        canvas_batch(C, [4, 4], [7, 3]),  # another request
        canvas_batch(C, [4, 3], [7, 2], [0, 1]),  # a canvas cut short
        canvas_batch(C, [4, 4], [7, 2], [1, 0]),  # the end of a prompt before it
        canvas_batch(C, [4], [7]),
    ):
        assert other is not first
