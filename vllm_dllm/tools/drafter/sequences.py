"""Collects the token sequences that a drafter is trained on.

A drafter learns what its own target writes. So the target answers prompts greedily, in a running
vLLM server or in transformers. Answers are written line by line, and a stopped run continues after
the last whole line. Otherwise the sequences are the blocks that a serving drafter kept
(`vllm_dllm/drafters/buffer.py`).
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import torch

from vllm_dllm.drafters.buffer import PATTERN
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.reference import Target
from vllm_dllm.tools.inputs import encode_prompt_rows, read_prompt_rows

BATCH_SIZE = 128  # prompts that transformers answers at once
SERVER_CONNECTIONS = 32  # prompts that a server answers at once

Completer = Callable[[Sequence[list[int]]], Iterable[list[int]]]
"""Token ids of prompts -> token ids of their answers, in the same order."""


@dataclass(frozen=True)
class KnownSequence:
    """Tokens whose continuation at every anchor is known."""

    tokens: list[int]
    first_anchor: int
    """Index of the first token that may start a block. It is where the answer starts, or the anchor
    of the one block that a serving drafter recorded. The last anchor is the second to last
    token."""


def room_for_prompts(context: int, max_tokens: int) -> int:
    """Returns the most tokens of a prompt whose answer of `max_tokens` tokens fits into the
    target's context. Raises InputError if there is no answer, or no room."""
    if not 1 <= max_tokens < context:
        raise InputError(
            f"--max-tokens must be from 1 to {context - 1}, since the target's context of "
            f"{context} tokens also holds the prompt, got {max_tokens}"
        )
    return context - max_tokens


def read_prompts(path: Path, model: Path, room: int) -> list[list[int]]:
    """Returns the token ids of every row of a JSON Lines file. Raises InputError if a row is not a
    prompt, or has more than `room` tokens."""
    remedy = "the answer must fit after it in the model's context; shorten it or lower --max-tokens"
    return encode_prompt_rows(read_prompt_rows(path), model, room, remedy)


@torch.no_grad()
def complete(target: Target, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns the target's greedy answers, by transformers, in the prompts' order. Each has at most
    `max_tokens` tokens. An answer that ends has EOS as its last token."""
    model = target.model
    stops = model.generation_config.eos_token_id
    stop_ids = set(stops if isinstance(stops, list) else [stops])
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    for start in range(0, len(order), BATCH_SIZE):
        chosen = order[start : start + BATCH_SIZE]
        length = max(len(prompts[i]) for i in chosen)
        tokens = [[0] * (length - len(prompts[i])) + prompts[i] for i in chosen]
        is_token = [[t >= length - len(prompts[i]) for t in range(length)] for i in chosen]
        output = model.generate(
            input_ids=torch.tensor(tokens, device=target.device),
            attention_mask=torch.tensor(is_token, device=target.device).long(),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        for i, answer in zip(chosen, output[:, length:].tolist(), strict=True):
            end = next((n for n, token in enumerate(answer, 1) if token in stop_ids), len(answer))
            answers[i] = answer[:end]
    return [answers[i] for i in range(len(prompts))]


def make_server_completer(url: str, max_tokens: int, vocab_size: int) -> Completer:
    """Returns a function that has the vLLM server at `url` answer prompts greedily, several at a
    time. A server that wants an API key gets that in VLLM_API_KEY. Raises InputError if no server
    answers. The function raises it if the server refuses a prompt, sends no token ids, or serves
    another model."""
    key = os.environ.get("VLLM_API_KEY") or "none"
    client = openai.OpenAI(base_url=url.rstrip("/").removesuffix("/v1") + "/v1", api_key=key)
    try:
        name = client.models.list().data[0].id
    except openai.AuthenticationError as error:
        raise InputError(f"the server at {url} wants its API key in VLLM_API_KEY") from error
    except openai.OpenAIError as error:
        raise InputError(f"no vLLM server answers at {url}: {error}") from error

    def answer(prompt: list[int]) -> list[int]:
        """Returns the server's greedy answer to one prompt. Raises InputError if it cannot be
        used."""
        try:
            completion = client.completions.create(
                model=name,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0.0,
                extra_body={"return_token_ids": True},
            )
        except openai.OpenAIError as error:
            raise InputError(f"the server at {url} refused a prompt: {error}") from error
        tokens = getattr(completion.choices[0], "token_ids", None)
        if tokens is None:
            raise InputError(
                f"the server at {url} sent no token ids: expected vLLM 0.32 or 0.33, which do when "
                f"asked for return_token_ids"
            )
        if max(tokens) >= vocab_size:
            raise InputError(
                f"the server's model {name} wrote token {max(tokens)}, the target's vocabulary "
                f"has {vocab_size} tokens: expected the same model on both sides"
            )
        return tokens

    def answer_all(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
        with ThreadPoolExecutor(SERVER_CONNECTIONS) as pool:
            yield from pool.map(answer, prompts)

    return answer_all


def collect_answers(
    prompts: Sequence[list[int]], completer: Completer, path: Path
) -> list[KnownSequence]:
    """Completes the prompts that `path` has no line for yet, and appends their lines. Returns the
    sequences of all lines, also of those that a stopped run has written.

    Answers of one token stay in the file, so that its lines match the prompts. They have no anchor,
    so they are not returned. Raises InputError if there are no others.
    """
    done = _whole_lines(path)
    rest = iter(prompts[len(done) :])
    with path.open("a") as file:
        while batch := list(islice(rest, 4 * BATCH_SIZE)):
            for prompt, answer in zip(batch, completer(batch), strict=True):
                row = {"tokens": prompt + answer, "first_anchor": len(prompt)}
                file.write(json.dumps(row) + "\n")
                done.append(row)
            file.flush()
            print(f"{len(done)} of {len(prompts)} prompts answered", file=sys.stderr, flush=True)
    sequences = [KnownSequence(row["tokens"], row["first_anchor"]) for row in done]
    if anchored := [s for s in sequences if s.first_anchor < len(s.tokens) - 1]:
        return anchored
    raise InputError(
        f"the target answers none of the {len(prompts)} prompts with two tokens or more: give "
        f"prompts that need longer answers"
    )


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `path`; [] if there is no file. Removes a last line that was cut off from
    the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def read_buffer(path: Path, vocab_size: int) -> list[KnownSequence]:
    """Returns the blocks of a buffer, oldest first, as sequences to train on. Raises InputError if
    there are none, or they do not fit a vocabulary of `vocab_size` tokens.

    After a block's anchor come the accepted tokens, and the one that the target put in place of the
    first wrong guess. What would have followed that guess is not known.
    """
    shards = sorted(path.glob(PATTERN))
    if not shards:
        raise InputError(f"{path} holds no buffer: expected files {PATTERN}")
    sequences = []
    for shard in shards:
        lines = shard.read_bytes().split(b"\n")[:-1]  # the rest is not a whole line
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                sequence = KnownSequence(row["tokens"], row["anchor"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InputError(
                    f'{shard}, line {number}: expected {{"tokens": [...], "anchor": 3}}: {error!r}'
                ) from error
            largest = max(sequence.tokens, default=0)
            if largest >= vocab_size:
                raise InputError(
                    f"{shard}, line {number} has token {largest}, the drafter's vocabulary has "
                    f"{vocab_size} tokens: the buffer belongs to another model"
                )
            if 0 <= sequence.first_anchor < len(sequence.tokens) - 1:
                sequences.append(sequence)
    if not sequences:
        raise InputError(f"{path} holds no block with a known token after its anchor")
    return sequences
