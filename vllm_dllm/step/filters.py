"""The sampling parameters of a batch's requests, applied to the logits of their canvases."""

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.penalties import use_penalty
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.convergence import NO_TOKEN
from vllm_dllm.denoise.logit_rules import (
    LEFT_OUT,
    CanvasRules,
    LogitRules,
    Penalties,
    exclude_below_min_p_,
)
from vllm_dllm.requests.options import RequestOptions
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.registry import NewRequest


class LogitFilters:
    """By slot; only requests that ask for something are in here, so others cost nothing."""

    def __init__(self, req_states: RequestState, sampling_states: SamplingStates) -> None:
        self.req_states = req_states
        self.sampling_states = sampling_states
        self.device = req_states.device
        self.vocab_size = req_states.vocab_size
        self._rules: dict[int, LogitRules] = {}
        self._truncated: set[int] = set()  # top_k, top_p, min_p
        self._penalised: list[NewRequest] = []  # since the last step

    # --- requests ---------------------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        slot, params, options = request.slot, request.params, request.options
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
            self._truncated.add(slot)
        words = params.bad_words_token_ids or []
        rules = LogitRules(
            bias=self._bias(params),
            excluded=self._excluded(params, options),
            bad_words=BadWords(word for word in words if len(word) > 1),
        )
        # A tokenizer or a generation_config may name tokens that the model has not.
        stops = sorted(stop for stop in params.all_stop_token_ids if 0 <= stop < self.vocab_size)
        if params.min_tokens > 0 and stops:
            rules.early_stops = self._to_device(stops)
            rules.stops_from = request.prompt_len + params.min_tokens
        if use_penalty(params):
            self._penalised.append(request)
        if rules:
            self._rules[slot] = rules

    def drop(self, slot: int) -> None:
        self._rules.pop(slot, None)
        self._truncated.discard(slot)
        self._penalised = [request for request in self._penalised if request.slot != slot]

    def start(self) -> None:
        for request in self._penalised:
            rules = self._rules.setdefault(request.slot, LogitRules())
            rules.penalties = self._penalties(request)
        self._penalised.clear()

    def _bias(self, params: SamplingParams) -> torch.Tensor | None:
        if not params.logit_bias:
            return None
        bias = torch.zeros(self.vocab_size)
        tokens = torch.tensor(list(params.logit_bias))
        bias[tokens] = torch.tensor(list(params.logit_bias.values()), dtype=bias.dtype)
        return async_tensor_h2d(bias, device=self.device)

    def _excluded(self, params: SamplingParams, options: RequestOptions) -> torch.Tensor | None:
        allowed: list[int] = list(params.allowed_token_ids or ())
        if options.constrained:
            allowed = list(params.logprob_token_ids or ())
        never = [word[0] for word in params.bad_words_token_ids or [] if len(word) == 1]
        if not (allowed or never):
            return None
        excluded = torch.full((self.vocab_size,), bool(allowed))
        excluded[allowed] = False
        excluded[never] = True
        return async_tensor_h2d(excluded, device=self.device)

    def _to_device(self, tokens: list[int]) -> torch.Tensor:
        return async_tensor_h2d(np.array(tokens, dtype=np.int64), device=self.device)

    def _penalties(self, request: NewRequest) -> Penalties:
        params, prompt_len = request.params, request.prompt_len
        tokens = self.req_states.all_token_ids.gpu[request.slot]
        # After a preemption the prefill holds the blocks committed so far, too.
        committed = tokens[prompt_len : request.prefill_len].long()
        in_prompt = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        counts = torch.zeros(self.vocab_size, device=self.device)
        return Penalties(
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            counts.scatter_add_(0, committed, torch.ones_like(committed, dtype=counts.dtype)),
            in_prompt.index_fill_(0, tokens[:prompt_len].long(), True),
        )

    # --- a step -----------------------------------------------------------------------------

    def ruled(self, batch: CanvasBatch) -> list[int]:
        """Canvases whose requests have rules, see `of_canvas`."""
        if not self._rules:
            return []
        return [i for i, slot in enumerate(batch.slots_np.tolist()) if slot in self._rules]

    def needs_whole_rows(self, batch: CanvasBatch) -> list[int]:
        """Canvases whose requests ask for something that takes all logits of a row."""
        if not self._rules and not self._truncated:
            return []
        slots = batch.slots_np.tolist()
        asks = self._rules.keys() | self._truncated
        return [i for i, slot in enumerate(slots) if slot in asks]

    def of_canvas(
        self,
        i: int,
        batch: CanvasBatch,
        start: torch.Tensor,  # [] int64, absolute position of its first token
        guess: torch.Tensor,  # [C] int64, the step before's best guess
        kept: torch.Tensor | None = None,  # [C] int64, tokens revealed for good; < 0: none yet
    ) -> CanvasRules:
        """What the request of canvas i asks for before the temperature; nothing, if it does not."""
        slot = int(batch.slots_np[i])
        rules = self._rules.get(slot) or LogitRules()
        before = self._tokens_before(slot, start, rules.bad_words.reach)
        return CanvasRules(rules, start, guess, before, kept)

    def truncate(
        self,
        scaled: torch.Tensor,  # [rows, V] fp32, divided by the temperature
        batch: CanvasBatch,
        rows: slice,  # of the batch's rows
    ) -> torch.Tensor:
        """Leaves out what min_p, top_k and top_p leave out; may change `scaled` in place."""
        if self._truncated.isdisjoint(batch.slots_np.tolist()):
            return scaled
        states, slots = self.sampling_states, batch.by_row(batch.slots)[rows]
        if states.min_p.np[batch.slots_np].any():
            exclude_below_min_p_(scaled, states.min_p.gpu[slots][:, None])
        scaled = states.apply_top_k_top_p(scaled, slots, batch.slots_np)
        return scaled.clamp(min=LEFT_OUT)  # from -inf

    def count_emitted(
        self,
        batch: CanvasBatch,
        blocks: torch.Tensor,  # [n, C] int64
        emitted: torch.Tensor,  # [n] int64, tokens
    ) -> None:
        """Tells penalties which blocks were emitted."""
        for i, slot in enumerate(batch.slots_np.tolist()):
            rules = self._rules.get(slot)
            if rules is not None and rules.penalties is not None:
                rules.penalties.count_(blocks[i, : batch.lengths_np[i]], emitted[i] > 0)

    def _tokens_before(self, slot: int, start: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` tokens before `start`; NO_TOKEN in place of the prompt's."""
        positions = start - count + torch.arange(count, device=self.device)
        tokens = self.req_states.all_token_ids.gpu[slot][positions.clamp(min=0)].long()
        is_own = positions >= int(self.req_states.prompt_len.np[slot])
        return torch.where(is_own, tokens, NO_TOKEN)
