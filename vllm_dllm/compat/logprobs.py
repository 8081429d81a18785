"""Log-probabilities in answers: with the denoise step that revealed a token, and each token's text
decoded once.

vLLM carries a token's log-probabilities and its rank from the worker to the API server. The rank
has 64 bits and a vocabulary needs 32, so the step is packed into the upper 32 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.logprobs import Logprob

from vllm_dllm.compat.patching import wrap

_BITS = 32


@dataclass
class RevealedLogprob(Logprob):
    """A token's log-probability, with the step that revealed it."""

    step: int = 0
    """The denoise step of the token's block, from 1. 0: the token was known before the first."""


def pack_step_into_ranks(ranks: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
    """Returns `ranks`, [rows] int64, with `step` + 1 in their upper 32 bits, where 0 is no step.
    `step`: [] int64."""
    return ranks + ((step + 1) << _BITS)


def return_revealed_steps() -> None:
    """Makes log-probabilities with a packed step `RevealedLogprob`s, and shows the step in a
    server's chats and completions. Patches vLLM's processing of log-probabilities. Repeatable."""

    @wrap("v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs")
    def update(stock: Any, self: Any, logprobs_lists: Any) -> None:
        """Adds a step's log-probabilities as vLLM does, with packed steps moved out of ranks."""
        steps = logprobs_lists.sampled_token_ranks >> _BITS
        if not steps.any():
            return stock(self, logprobs_lists)
        ranks = logprobs_lists.sampled_token_ranks - (steps << _BITS)
        stock(self, logprobs_lists._replace(sampled_token_ranks=ranks))
        tokens = logprobs_lists.logprob_token_ids[:, 0].tolist()
        entries = self.logprobs[-len(tokens) :]
        for entry, token, step in zip(entries, tokens, steps.tolist(), strict=True):
            entry[token] = RevealedLogprob(**vars(entry[token]), step=step - 1)

    serving = "entrypoints.openai"

    @wrap(f"{serving}.chat_completion.serving:OpenAIServingChat._create_chat_logprobs")
    def chat(stock: Any, self: Any, token_ids: Any, top_logprobs: Any, **kwargs: Any) -> Any:
        """Returns vLLM's log-probabilities of a chat, with the step in each entry that has one."""
        found = stock(self, token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
        if steps := _steps(token_ids, top_logprobs):
            found.content = [
                entry.model_copy(update={"step": step})
                for entry, step in zip(found.content, steps, strict=True)
            ]
        return found

    @wrap(f"{serving}.completion.serving:OpenAIServingCompletion._create_completion_logprobs")
    def completion(stock: Any, self: Any, token_ids: Any, top_logprobs: Any, **kwargs: Any) -> Any:
        """Returns vLLM's log-probabilities of a completion, with the list `steps` if any."""
        found = stock(self, token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
        steps = _steps(token_ids, top_logprobs)
        return found.model_copy(update={"steps": steps}) if steps else found


def _steps(
    tokens: Sequence[int], scores: Sequence[dict[int, Logprob] | None]
) -> list[int | None] | None:
    """Returns the step that revealed each of `tokens`, None for a token of the prompt, or None if
    no token has a step. `scores`: each token's log-probabilities, by token id."""
    entries = [
        None if found is None else found.get(token)
        for token, found in zip(tokens, scores, strict=False)
    ]
    if not any(isinstance(entry, RevealedLogprob) for entry in entries):
        return None
    return [entry.step if isinstance(entry, RevealedLogprob) else None for entry in entries]


def cache_token_texts() -> None:
    """Has a server decode each token beside log-probabilities only once, by a patch of vLLM's
    function. Repeatable.

    vLLM decodes each one again: 20 prompts of 1,000 tokens with 20 alternatives are 420,000 calls
    of the tokenizer, in the process that serves all clients.
    """
    known: dict[int, tuple[Any, dict[int, str]]] = {}  # by id of a tokenizer, which is kept

    @wrap("v1.engine.logprobs:convert_ids_list_to_tokens")
    def convert_ids_list_to_tokens(stock: Any, tokenizer: Any, token_ids: list[int]) -> list[str]:
        _, texts = known.setdefault(id(tokenizer), (tokenizer, {}))
        if new := [token for token in dict.fromkeys(token_ids) if token not in texts]:
            texts.update(zip(new, stock(tokenizer, new), strict=True))
        return [texts[token] for token in token_ids]
