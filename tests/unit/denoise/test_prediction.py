"""Where an answer stands in its prediction, against plain Python."""

import random

import pytest
import torch

from vllm_dllm.denoise.prediction import (
    FARTHEST,
    LEAST,
    LONGEST,
    MOST_MOVES,
    REACH,
    locate_next_block,
    realign_block,
    tokens_at,
)
from vllm_dllm.denoise.rules import NO_TOKEN

C = 12


def padded(predictions: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, predictions))
    return torch.tensor([one + [NO_TOKEN] * (longest - len(one)) for one in predictions])


def reference(prediction: list[int], position: int, answer: list[int]) -> int:
    """Where the next block begins, `answer` being what a block emitted."""
    expected = position + len(answer)

    def found(place: int) -> int:
        count = 0
        for back in range(1, min(LONGEST, len(answer)) + 1):
            if not 0 <= place - back < len(prediction) or prediction[place - back] != answer[-back]:
                break
            count += 1
        return count

    places = [
        place
        for place in range(expected - REACH, expected + REACH + 1)
        if place == expected or found(place) >= LEAST
    ]
    return min(places, key=lambda place: (-found(place), abs(place - expected), place))


def edited(text: list[int], chance: random.Random) -> list[int]:
    answer = list(text)
    for _ in range(chance.randrange(4)):
        place = chance.randrange(len(answer))
        match chance.randrange(3):
            case 0:
                del answer[place]
            case 1:
                answer.insert(place, chance.randrange(5))
            case 2:
                answer[place] = chance.randrange(5)
    return answer


@pytest.mark.parametrize("seed", range(20))
def test_as_plain_python_finds_it(seed: int) -> None:
    """Five tokens only: most of an answer's ends stand in its prediction more than once."""
    chance = random.Random(seed)
    texts = [[chance.randrange(5) for _ in range(chance.randrange(1, 60))] for _ in range(8)]
    answers = [edited(text, chance) or [1] for text in texts]
    positions = [chance.randrange(70) for _ in texts]
    emitted = [min(C, chance.randrange(1, len(answer) + 1)) for answer in answers]
    blocks = torch.randint(5, (8, C))
    for block, answer, length in zip(blocks, answers, emitted, strict=True):
        block[:length] = torch.tensor(answer[:length])
    given = padded(texts), torch.tensor(positions), blocks, torch.tensor(emitted)
    expected = [
        reference(text, position, answer[:length])
        for text, position, answer, length in zip(texts, positions, answers, emitted, strict=True)
    ]
    assert locate_next_block(*given).tolist() == expected


def plain_places(prediction: list[int], position: int, guess: list[int]) -> list[int]:
    """`realign_block` of one block."""
    places = [position + i for i in range(len(guess))]

    def found(moved: list[int]) -> int:
        return sum(
            0 <= place < len(prediction) and prediction[place] == token
            for place, token in zip(moved, guess, strict=True)
        )

    for _ in range(MOST_MOVES):
        moves = [
            (found(moved) - found(places), -abs(shift), shift, begin, end, moved)
            for shift in range(-FARTHEST, FARTHEST + 1)
            for begin in range(len(guess))
            for end in range(begin + 1, len(guess) + 1)
            for part in [[place + shift for place in places[begin:end]]]
            for moved in [places[:begin] + part + places[end:]]
        ]
        gained, *_, moved = max(moves)
        if gained >= LEAST:
            places = moved
    return places


@pytest.mark.parametrize("seed", range(10))
def test_moves_within_a_block_as_plain_python_finds_them(seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.choice([4, 60])
    texts = [[chance.randrange(kinds) for _ in range(chance.randrange(1, 60))] for _ in range(4)]
    positions = [chance.randrange(len(text) + 3) for text in texts]
    guesses = torch.randint(kinds, (4, C))
    for guess, text, position in zip(guesses, texts, positions, strict=True):
        own = text[position:]
        if len(own) > 8:
            own = edited(edited(own, chance), chance)[:C]
        guess[: len(own)] = torch.tensor(own)
    found = realign_block(padded(texts), torch.tensor(positions), guesses)
    rows = zip(texts, positions, guesses.tolist(), strict=True)
    assert found.tolist() == [plain_places(*row) for row in rows]


def test_nothing_stands_outside_a_prediction() -> None:
    found = tokens_at(torch.tensor([[7, 8, 9]]), torch.tensor([[-1, 0, 1, 2, 3]]))
    assert found.tolist() == [[NO_TOKEN, 7, 8, 9, NO_TOKEN]]
