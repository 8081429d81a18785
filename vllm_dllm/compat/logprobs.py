"""What is told with log-probabilities: the step that revealed a token, and the texts of tokens.

vLLM carries a token's log-probabilities and its rank from the worker to the API server. The rank
has 64 bits and a vocabulary needs 32, so the step travels in the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logprobs import Logprob

from vllm_dllm.compat.patching import is_server, replace

_BITS = 32


@dataclass
class RevealedLogprob(Logprob):
    """What vLLM says of a token, and when it was revealed."""

    step: int = 0
    """The denoise step of the token's block, counted from 1. 0: it was known before the first."""


def with_step(
    ranks: torch.Tensor,  # [rows] int64
    step: torch.Tensor | int,  # [] int64
) -> torch.Tensor:
    """[rows] int64: the ranks of tokens that were revealed by this step."""
    return ranks + ((step + 1) << _BITS)


def show_steps() -> None:
    """Log-probabilities whose ranks have a step are `RevealedLogprob`s, and a server's chats and
    completions show the step. Repeatable."""

    def sampled(stock: Any) -> Any:
        def update(self: Any, lists: Any) -> None:
            steps = lists.sampled_token_ranks >> _BITS
            if not steps.any():
                return stock(self, lists)
            ranks = lists.sampled_token_ranks - (steps << _BITS)
            stock(self, lists._replace(sampled_token_ranks=ranks))
            tokens = lists.logprob_token_ids[:, 0].tolist()
            entries = self.logprobs[-len(tokens) :]
            for entry, token, step in zip(entries, tokens, steps.tolist(), strict=True):
                entry[token] = RevealedLogprob(**vars(entry[token]), step=step - 1)

        return update

    def chat(stock: Any) -> Any:
        def create(self: Any, token_ids: Any, top_logprobs: Any, **kwargs: Any) -> Any:
            found = stock(self, token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
            if steps := _steps(token_ids, top_logprobs):
                found.content = [
                    entry.model_copy(update={"step": step})
                    for entry, step in zip(found.content, steps, strict=True)
                ]
            return found

        return create

    def completion(stock: Any) -> Any:
        def create(self: Any, token_ids: Any, top_logprobs: Any, **kwargs: Any) -> Any:
            found = stock(self, token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
            steps = _steps(token_ids, top_logprobs)
            return found.model_copy(update={"steps": steps}) if steps else found

        return create

    replace("v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs", sampled)
    if not is_server():
        return
    serving = "entrypoints.openai"
    replace(
        f"{serving}.chat_completion.serving:OpenAIServingChat._create_chat_logprobs",
        chat,
    )
    replace(
        f"{serving}.completion.serving:OpenAIServingCompletion._create_completion_logprobs",
        completion,
    )


def _steps(
    tokens: Sequence[int], scores: Sequence[dict[int, Logprob] | None]
) -> list[int | None] | None:
    """The step of each token, None for one of the prompt. None: nobody has asked for them."""
    entries = [
        None if found is None else found.get(token)
        for token, found in zip(tokens, scores, strict=False)
    ]
    if not any(isinstance(entry, RevealedLogprob) for entry in entries):
        return None
    return [entry.step if isinstance(entry, RevealedLogprob) else None for entry in entries]


def find_token_texts_once() -> None:
    """Finds the text of each token beside log-probabilities once. vLLM decodes every token of every
    log-probability by itself: 20 prompts of 1,000 tokens with 20 alternatives are 420,000 calls of
    the tokenizer, in the process that serves everybody. Repeatable, and nothing in a process that
    is no server."""
    if not is_server():
        return

    def make(stock: Any) -> Any:
        known: dict[int, tuple[Any, dict[int, str]]] = {}  # by tokenizer, which stays

        def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
            _, texts = known.setdefault(id(tokenizer), (tokenizer, {}))
            if new := [token for token in dict.fromkeys(token_ids) if token not in texts]:
                texts.update(zip(new, stock(tokenizer, new), strict=True))
            return [texts[token] for token in token_ids]

        return convert_ids_list_to_tokens

    replace("v1.engine.logprobs:convert_ids_list_to_tokens", make)
