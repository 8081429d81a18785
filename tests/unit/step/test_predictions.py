"""Blocks that start from what is expected, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.predictions import Predictions
from vllm_dllm.step.registry import NewRequest
from vllm_dllm.step.slots import CanvasSlots

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
        params = SamplingParams(extra_args={"diffusion_prediction": prediction})
        end = PROMPT + len(emitted or [])
        self.req_states.all_token_ids.gpu[slot, PROMPT:end] = torch.tensor(emitted or [])
        self.slots.canvas[slot], self.slots.tokens[slot, 0] = NOISE, NO_TOKEN
        self.slots.stop_tokens[slot] = STOP
        self.predictions.drop(slot)
        options = RequestOptions.from_sampling_params(params, {})
        self.predictions.add(NewRequest(slot, params, options, PROMPT, end, num_steps=48))
        self.predictions.start()

    def first(self, slot: int) -> tuple[list[int], list[int]]:
        """The canvas and the guess that the first step finds."""
        return self.slots.canvas[slot].tolist(), self.slots.tokens[slot, 0].tolist()

    def behind(
        self, blocks: dict[int, list[int]], ended: bool = True
    ) -> dict[int, tuple[list[int], list[int]]] | None:
        """By slot: canvas and guess of the next block."""
        batch: Any = SimpleNamespace(slots_np=np.array(list(blocks)))
        emitted = torch.full((len(blocks),), C * ended)
        found = self.predictions.behind(batch, torch.tensor(list(blocks.values())), emitted)
        if found is None:
            return None
        canvas = found.put(torch.full((len(blocks), C), NOISE))
        pairs = zip(canvas.tolist(), found.guess.tolist(), strict=True)
        return dict(zip(blocks, pairs, strict=True))


@pytest.fixture
def step() -> Step:
    return Step()


def test_the_first_block_starts_as_predicted(step: Step) -> None:
    step.add(2, TEXT)
    assert step.first(2) == (TEXT[:C], TEXT[:C])
    assert step.first(1) == ([NOISE] * C, [0] * C)


def test_stop_tokens_are_guessed_behind_the_end(step: Step) -> None:
    step.add(0, TEXT[:3])
    assert step.first(0) == (TEXT[:3] + [NOISE] * 5, TEXT[:3] + [STOP] * 5)


def test_a_block_follows(step: Step) -> None:
    step.add(1, TEXT)
    changed = [*TEXT[:2], 9, 9, *TEXT[2:6]]  # two tokens more
    assert step.behind({1: TEXT[:C]}, ended=False) is not None
    found = step.behind({3: TEXT[:C], 1: changed})
    assert found == {
        3: ([NOISE] * C, [NO_TOKEN] * C),
        1: (TEXT[6:14], TEXT[6:14]),
    }
    assert step.behind({1: TEXT[6:14]}) == {1: (TEXT[14:22], TEXT[14:22])}


def test_an_answer_that_goes_on_behind_the_end(step: Step) -> None:
    step.add(1, TEXT[:C])
    assert step.behind({1: TEXT[:C]}) == {1: ([NOISE] * C, [STOP] * C)}
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
    step.predictions.drop(1)
    assert step.behind({1: TEXT[:C]}) is None


def test_longer_ones_make_room(step: Step) -> None:
    step.add(0, TEXT[:3])
    step.add(1, TEXT * 40)
    step.add(2, [])
    assert step.first(1)[0] == TEXT[:C]
    assert step.first(2)[0] == [NOISE] * C
    assert step.behind({0: [*TEXT[:3], *[STOP] * 5]}) == {0: ([NOISE] * C, [NO_TOKEN] * C)}
