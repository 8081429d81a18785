"""Blocks that start from what is expected, without an engine."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.unit.step.batches import canvas_batch
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.asked.first_canvases import Predicted, Predictions
from vllm_dllm.step.slots import CanvasSlots, NewRequest

R, C, PROMPT, STOP = 4, 8, 5, 1
NOISE = 77
TEXT = list(range(100, 130))


class Step:
    """The slots of a worker, and their predictions."""

    def __init__(self) -> None:
        self.slots = CanvasSlots(torch.full((R, C), NOISE), 2, torch.float32)
        tokens = SimpleNamespace(gpu=torch.zeros(R, 64, dtype=torch.int32))
        self.req_states: Any = SimpleNamespace(all_token_ids=tokens)
        self.predictions = Predictions(self.slots, self.req_states)

    def add(self, slot: int, prediction: list[int], emitted: list[int] | None = None) -> None:
        end = PROMPT + len(emitted or [])
        self.req_states.all_token_ids.gpu[slot, PROMPT:end] = torch.tensor(emitted or [])
        self.slots.canvas[slot], self.slots.tokens[slot, 0] = NOISE, NO_TOKEN
        self.slots.stop_tokens[slot] = STOP
        self.predictions.remove_request(slot)
        options = RequestOptions(prediction=prediction)
        self.predictions.add_request(
            NewRequest(slot, SamplingParams(), options, PROMPT, end, num_steps=48)
        )
        self.predictions.apply_staged_writes()

    def first(self, slot: int) -> tuple[list[int], list[int]]:
        """The canvas and the guess that the first step finds."""
        return self.slots.canvas[slot].tolist(), self.slots.tokens[slot, 0].tolist()

    def among(self, blocks: dict[int, list[int]]) -> Predicted | None:
        batch = canvas_batch(C, [C] * len(blocks), list(blocks))
        return self.predictions.find_predicted(batch)

    def moved(
        self,
        guesses: dict[int, list[int]],
        accepted: Iterable[int] = (),
        width: int = C,
        may_move: bool = True,
    ) -> dict[int, tuple[list[int], list[int]]]:
        """By slot: canvas and guess of a block that goes on, all noise but for what has moved."""
        predicted = self.among(guesses)
        assert predicted is not None
        shape = len(guesses), C
        positions = torch.arange(C)
        found = self.predictions.realign(
            predicted,
            torch.tensor(list(guesses.values())),
            torch.isin(positions, torch.tensor([*accepted], dtype=torch.int64)).expand(shape),
            None if width == C else (positions < width).expand(shape),
            torch.full(shape[:1], may_move),
        )
        noise = torch.full(shape, NOISE)
        pairs = zip(
            found.fill_canvas(noise).tolist(), found.fill_guess(noise).tolist(), strict=True
        )
        return dict(zip(guesses, pairs, strict=True))

    def behind(
        self, blocks: dict[int, list[int]], ended: bool = True
    ) -> dict[int, tuple[list[int], list[int]]] | None:
        """By slot: canvas and guess of the next block."""
        predicted = self.among(blocks)
        if predicted is None:
            return None
        emitted = torch.full((len(blocks),), C * ended)
        found = self.predictions.expect_next_blocks(
            predicted, torch.tensor(list(blocks.values())), emitted
        )
        canvas = found.fill_canvas(torch.full((len(blocks), C), NOISE))
        pairs = zip(canvas.tolist(), found.guess.tolist(), strict=True)
        return dict(zip(blocks, pairs, strict=True))


@pytest.fixture
def step() -> Step:
    return Step()


def test_stop_tokens_are_guessed_behind_the_end(step: Step) -> None:
    step.add(0, TEXT[:3])
    assert step.first(0) == (TEXT[:3] + [STOP] + [NOISE] * 4, TEXT[:3] + [STOP] * 5)


def test_a_block_follows(step: Step) -> None:
    step.add(1, TEXT)
    changed = [*TEXT[:2], 9, 9, *TEXT[2:6]]  # two tokens more
    assert step.behind({1: TEXT[:C]}, ended=False) is not None
    found = step.behind({3: TEXT[:C], 1: changed})
    assert found == {3: ([NOISE] * C, [NO_TOKEN] * C), 1: (TEXT[6:14], TEXT[6:14])}
    assert step.behind({1: TEXT[6:14]}) == {1: (TEXT[14:22], TEXT[14:22])}


def test_an_answer_that_goes_on_behind_the_end(step: Step) -> None:
    step.add(1, TEXT[:C])
    assert step.behind({1: TEXT[:C]}) == {1: ([STOP] + [NOISE] * (C - 1), [STOP] * C)}
    assert step.behind({1: [9] * C}) == {1: ([NOISE] * C, [NO_TOKEN] * C)}


def test_after_a_preemption_as_before(step: Step) -> None:
    answer = [*TEXT[:4], 9, *TEXT[4:10], *TEXT[13:18]]  # two blocks, three tokens left out
    step.add(0, TEXT)
    step.behind({0: answer[:C]})
    undisturbed = step.behind({0: answer[C:]})
    step.add(3, TEXT, emitted=answer)
    assert {0: step.first(3)} == undisturbed == {0: (TEXT[18:26], TEXT[18:26])}


def test_who_has_none_pays_nothing(step: Step) -> None:
    assert step.behind({0: TEXT[:C]}) is None
    step.add(1, TEXT)
    assert step.behind({0: TEXT[:C]}) is None
    step.predictions.remove_request(1)
    assert step.behind({1: TEXT[:C]}) is None


def test_longer_ones_make_room(step: Step) -> None:
    step.add(0, TEXT[:3])
    step.add(1, TEXT * 40)
    step.add(2, [])
    assert step.first(1)[0] == TEXT[:C]
    assert step.first(2)[0] == [NOISE] * C
    assert step.behind({0: [*TEXT[:3], *[STOP] * 5]}) == {0: ([NOISE] * C, [NO_TOKEN] * C)}


STAY = [NOISE] * C, [NOISE] * C


def test_the_rest_of_a_block_moves(step: Step) -> None:
    step.add(1, TEXT)
    guess = [*TEXT[:2], 9, *TEXT[2:7]]  # one token more
    step.add(3, TEXT[10:])
    found = step.moved({0: guess, 3: guess, 1: guess})
    assert found[0] == found[3] == STAY
    canvas, of_guess = found[1]
    assert canvas == of_guess == [NOISE] * 3 + TEXT[2:7]
    assert step.moved({1: guess}, may_move=False) == {1: STAY}
    assert step.moved({1: TEXT[:C]}) == {1: STAY}


def test_what_the_model_is_sure_of_stays(step: Step) -> None:
    """Unless it is what the canvas held."""
    step.add(1, TEXT)
    guess = [TEXT[0], *TEXT[2:5], TEXT[4], *TEXT[6:9]]  # one token less, but for the fifth
    canvas, _ = step.moved({1: guess}, accepted=range(C))[1]
    assert canvas == [*[NOISE] * 4, TEXT[5], *[NOISE] * 3]


def test_the_end_moves_with_the_rest(step: Step) -> None:
    step.add(1, TEXT[:7])
    guess = [*TEXT[:2], *TEXT[3:7], STOP, STOP]  # one token less
    assert step.moved({1: guess}) == {
        1: ([NOISE, NOISE, *TEXT[3:7], STOP, NOISE], [NOISE, NOISE, *TEXT[3:7], STOP, STOP])
    }


def test_what_is_no_part_of_a_narrow_canvas_moves_nothing(step: Step) -> None:
    step.add(1, TEXT)
    guess = [*TEXT[:3], *TEXT[4:9]]
    assert step.moved({1: guess}, width=5) == {1: STAY}
    assert step.moved({1: guess}, width=6) != {1: STAY}
