"""Log-probabilities: those of prompts within a memory budget, of a request's own prompt only, each
text once; and the denoise step that revealed a token, returned with its log-probability.

vLLM carries a token's log-probabilities and its rank from the worker to the API server. The rank
has 64 bits and a vocabulary needs 32, so the step is packed into the upper 32 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logprobs import Logprob
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.compat.patching import patch, wrap

_BITS = 32


@dataclass
class RevealedLogprob(Logprob):
    """A token's log-probability, with the step that revealed it."""

    step: int = 0
    """The denoise step of the token's block, counted from 1. 0: the token was known before the
    first."""


def pack_step_into_ranks(
    ranks: torch.Tensor,  # [rows] int64
    step: torch.Tensor | int,  # [] int64
) -> torch.Tensor:
    """Returns `ranks`, [rows] int64, with `step` + 1 in their upper 32 bits. 0 there means no
    step."""
    return ranks + ((step + 1) << _BITS)


def return_revealed_steps() -> None:
    """Makes log-probabilities with a packed step `RevealedLogprob`s, and shows the step in a
    server's chats and completions. Patches vLLM's processing of log-probabilities. Repeatable."""

    @wrap("v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs")
    def update(stock: Any, self: Any, lists: Any) -> None:
        """Adds a step's log-probabilities as vLLM does, and takes packed steps out of their
        ranks."""
        steps = lists.sampled_token_ranks >> _BITS
        if not steps.any():
            return stock(self, lists)
        ranks = lists.sampled_token_ranks - (steps << _BITS)
        stock(self, lists._replace(sampled_token_ranks=ranks))
        tokens = lists.logprob_token_ids[:, 0].tolist()
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
        """Returns vLLM's log-probabilities of a completion, with the list `steps` if there are
        any."""
        found = stock(self, token_ids=token_ids, top_logprobs=top_logprobs, **kwargs)
        steps = _steps(token_ids, top_logprobs)
        return found.model_copy(update={"steps": steps}) if steps else found


def _steps(
    tokens: Sequence[int], scores: Sequence[dict[int, Logprob] | None]
) -> list[int | None] | None:
    """Returns the step that revealed each of `tokens`, None for a token of the prompt. Returns None
    in place of a list if no token has a step. `scores`: each token's log-probabilities, by token
    id."""
    entries = [
        None if found is None else found.get(token)
        for token, found in zip(tokens, scores, strict=False)
    ]
    if not any(isinstance(entry, RevealedLogprob) for entry in entries):
        return None
    return [entry.step if isinstance(entry, RevealedLogprob) else None for entry in entries]


if TYPE_CHECKING:  # loads what only workers need
    from vllm.v1.worker.gpu.input_batch import InputBatch


def limit_prompt_logprob_rows(num_rows: int) -> None:
    """Makes a worker compute the logits of prompt log-probabilities for `num_rows` rows at a time,
    or for vLLM's own number if that is less. Patches a constant of vLLM's. Repeatable."""
    patch("v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE", lambda stock: min(num_rows, stock))


def restrict_prompt_logprobs(runner: Any) -> None:
    """Makes `runner`, a model runner that has loaded its model, score only rows of a prompt, and
    erase the tokens of finished requests. A request then learns nothing of other prompts
    (`docs/upstream/prompt-logprobs-leak.md`). Does nothing if the runner scores no prompts.

    vLLM's scheduler pads a request that has one token left to compute with drafts, so that all
    requests of a step are equally long. vLLM scores each row of the request as one of its prompt,
    and the tokens of rows beyond the prompt are those of the slot's previous request.
    """
    if runner.prompt_logprobs_worker is not None:
        tokens = runner.req_states.all_token_ids
        runner.prompt_logprobs_worker = PromptOnlyLogprobs(runner.prompt_logprobs_worker, tokens)


class PromptOnlyLogprobs:
    """Wraps vLLM's `PromptLogprobsWorker`. Cuts off scores beyond the prompt, and erases the tokens
    of requests that leave."""

    def __init__(self, stock: Any, all_token_ids: Any) -> None:
        """`stock`: vLLM's `PromptLogprobsWorker`. `all_token_ids`: vLLM's buffer of requests'
        tokens, whose `.gpu` is [max_num_reqs, max_model_len] int32. A slot of it is zeroed when its
        request leaves."""
        self._stock, self._all_token_ids = stock, all_token_ids
        self._slots: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def add_request(self, req_id: str, req_idx: int, *args: Any, **kwargs: Any) -> None:
        self._slots[req_id] = req_idx
        self._stock.add_request(req_id, req_idx, *args, **kwargs)

    def remove_request(self, req_id: str) -> None:
        """Forgets a request and zeroes its slot of the tokens, if it was added."""
        if (slot := self._slots.pop(req_id, None)) is not None:
            self._all_token_ids.gpu[slot].zero_()
        self._stock.remove_request(req_id)

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        input_batch: "InputBatch",
        all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len] int32
        num_computed_tokens: torch.Tensor,  # [max_num_reqs] int32
        prompt_lens: np.ndarray,  # [max_num_reqs], by slot
    ) -> dict[str, LogprobsTensors]:
        """Returns vLLM's scores by request id, without rows beyond the prompt. A request of which
        none are left has no entry."""
        found: dict[str, LogprobsTensors] = self._stock.compute_prompt_logprobs(
            logits_fn,
            hidden_states,
            input_batch,
            all_token_ids,
            num_computed_tokens,
            prompt_lens,
        )
        if not found:
            return found
        ends = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
        beyond = ends - prompt_lens[input_batch.idx_mapping_np]
        for request_id, num_rows in zip(input_batch.req_ids, beyond.tolist(), strict=True):
            if num_rows > 0 and (scores := found.pop(request_id, None)) is not None:
                kept = len(scores.logprobs) - num_rows
                if kept > 0:
                    found[request_id] = LogprobsTensors(*(rows[:kept] for rows in scores[:3]))
        return found


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
