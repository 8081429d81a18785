"""Clients that leave before their answer is there."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.conftest import Server
from tests.server.open_requests import LONG, OpenRequest

KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": 3, "frequency_penalty": 0.5},
    {"prompt": [9] * 300, "prompt_logprobs": 1, "stream": False},
    {"bad_words": ["a b"], "logit_bias": {"7": 2.0}},
    {"prompt": [[5, 6], [7, 8]]},
]


def storm(server: Server, count: int, at_once: int) -> None:
    """So many requests, each closed by its client at a random moment of its life."""
    chance = random.Random(count)
    moments = [chance.choice([0, chance.random() * 0.1, chance.random()]) for _ in range(count)]

    def ask_and_leave(i: int) -> None:
        OpenRequest(server, LONG | {"stream": True, "seed": i} | KINDS[i % len(KINDS)]).leave(
            moments[i]
        )

    with ThreadPoolExecutor(at_once) as clients:
        list(clients.map(ask_and_leave, range(count)))


def seeded_answers(server: Server) -> list[str]:
    """Of requests of several kinds, one after the other, as they come over the wire."""
    found = []
    for seed in range(4):
        body = {"prompt": [11, 12, 13 + seed], "seed": seed, "max_tokens": 100, "ignore_eos": True}
        answer = OpenRequest(server, body | {"logprobs": 2}).wait()
        assert answer.status == 200
        found.append(answer.text.partition('"choices"')[2])  # before it: its name and the time
    return found
