"""Where an answer stands in its prediction, against plain Python."""

import random

import pytest
import torch

from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.prediction import (
    FARTHEST,
    LEAST,
    LONGEST,
    MOST_MOVES,
    REACH,
    locate_next_block,
    next_places,
    realign_block,
    tokens_at,
)

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


def after(prediction: list[int], answer: list[int], emitted: int = C) -> list[int]:
    """What the second block starts from when the first was `answer`."""
    given = padded([prediction])
    block = torch.tensor([answer[:C]])
    place = locate_next_block(given, torch.tensor([0]), block, torch.tensor([emitted]))
    return tokens_at(given, next_places(place, 6))[0].tolist()


TEXT = list(range(100, 140))


def test_an_answer_as_predicted() -> None:
    assert after(TEXT, TEXT) == TEXT[C : C + 6]


def test_tokens_left_out_and_added() -> None:
    assert after(TEXT, TEXT[:3] + TEXT[5:]) == TEXT[C + 2 : C + 8]
    assert after(TEXT, [*TEXT[:3], 7, 7, *TEXT[3:]]) == TEXT[C - 2 : C + 4]


def test_a_difference_at_the_very_end() -> None:
    """Nothing to go by: the answer is taken to have as many tokens as the prediction."""
    assert after(TEXT, [*TEXT[: C - 1], 7]) == TEXT[C : C + 6]


def test_two_tokens_are_no_sign() -> None:
    text = [*TEXT[:30], 1, 2, *TEXT[30:]]
    assert after(text, [*TEXT[: C - 2], 1, 2]) == text[C : C + 6]
    text = [*TEXT[:30], 1, 2, 3, *TEXT[30:]]
    assert after(text, [*TEXT[: C - 3], 1, 2, 3]) == TEXT[30:36]


def test_behind_the_end_there_is_nothing() -> None:
    assert after(TEXT[: C + 2], TEXT) == [*TEXT[C : C + 2], *[NO_TOKEN] * 4]
    assert after([5], TEXT) == [NO_TOKEN] * 6


def test_part_of_a_block() -> None:
    assert after(TEXT, TEXT, emitted=5) == TEXT[5:11]


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


def moved(guess: list[int], position: int = 0) -> list[int]:
    """The text of a block whose first step guessed this."""
    given = padded([TEXT])
    return tokens_at(given, realign_block(given, torch.tensor([position]), torch.tensor([guess])))[
        0
    ].tolist()


def test_a_block_whose_rest_has_moved() -> None:
    assert moved([*TEXT[:3], 7, *TEXT[3:20]]) == [*TEXT[:4], *TEXT[3:20]]
    assert moved([*TEXT[5:9], *TEXT[11:20]], position=5) == [*TEXT[5:9], *TEXT[11:20]]


def test_two_moves() -> None:
    guess = [*TEXT[:4], *TEXT[5:12], 7, 7, *TEXT[12:20]]
    assert moved(guess) == [*TEXT[:4], *TEXT[5:14], *TEXT[12:20]]


def test_a_part_in_the_middle() -> None:
    guess = [*TEXT[:4], *TEXT[5:10], 7, *TEXT[10:20]]
    assert moved(guess) == [*TEXT[:4], *TEXT[5:11], *TEXT[10:20]]


def test_two_tokens_elsewhere_are_no_move() -> None:
    assert moved([*TEXT[:6], 7, *TEXT[6:8]]) == TEXT[:9]
    assert moved([7] * 9) == TEXT[:9]
