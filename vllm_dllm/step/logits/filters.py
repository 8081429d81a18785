"""Applies the sampling parameters of a batch's requests to the logits of their canvases."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.penalties import use_penalty
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from vllm_dllm.denoise.bad_words import BadWords
from vllm_dllm.denoise.impossible import TRUNCATED_LOGIT
from vllm_dllm.denoise.logit_rules import CanvasRules, LogitRules, Penalties, exclude_below_min_p_
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.slots import NewRequest, Registry

if TYPE_CHECKING:
    from vllm_dllm.step.canvas_stages import StepInputs


@lru_cache
def _positions(length: int, device: torch.device) -> torch.Tensor:
    """Returns the positions in a canvas, [length] int64."""
    return torch.arange(length, device=device)


class RuleContext(NamedTuple):
    """What the rules of n canvases' requests depend on."""

    batch: CanvasBatch
    starts: torch.Tensor  # [n] int64, absolute position of each canvas' first token
    guesses: torch.Tensor  # [n, C] int64, the step before's best guesses
    kept: torch.Tensor | None = None  # [n, C] int64, tokens revealed for good; < 0: none yet
    leads: Mapping[int, torch.Tensor] = MappingProxyType({})  # by canvas, see `CanvasRules`
    draw: Callable[[torch.Tensor, slice], torch.Tensor] | None = None
    """(logits [k, V], their rows in the batch) -> tokens [k] int64 that are drawn from them. None:
    rows take their best guesses."""


class LogitFilters(Registry):
    """Keeps requests' rules and truncations by slot, and applies them to logits. Requests without
    any have no entry and cost nothing."""

    def __init__(self, req_states: RequestState, sampling_states: SamplingStates) -> None:
        self.req_states = req_states
        self.sampling_states = sampling_states
        self.device = req_states.device
        self.vocab_size = req_states.vocab_size
        self.moving_tokens: tuple[int, ...] = ()
        """Tokens that delete or insert others. Requests with bad words of several tokens do without
        them: two tokens that a deletion brings together may be a bad word."""
        self._rules: dict[int, LogitRules] = {}
        self._truncated: set[int] = set()  # slots with top_k, top_p or min_p
        # Staged requests, and what their rules name, by slot.
        self._added: dict[int, tuple[NewRequest, tuple[Sequence[float], ...]]] = {}

    # --- requests ---------------------------------------------------------------------------

    def add_request(self, request: NewRequest) -> None:
        """Stages the request's rules for `apply_staged_writes`, and notes whether it truncates
        logits."""
        params, named = request.params, self._named_tokens(request)
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
            self._truncated.add(request.slot)
        if any(named) or params.bad_words_token_ids or use_penalty(params):
            self._added[request.slot] = request, named

    def remove_request(self, slot: int) -> None:
        self._rules.pop(slot, None)
        self._truncated.discard(slot)
        self._added.pop(slot, None)

    def _named_tokens(self, request: NewRequest) -> tuple[Sequence[float], ...]:
        """Returns what a request's rules name: the allowed tokens, none if all are; bad words of
        one token; biased tokens, and their biases; stop tokens that may not come before
        `min_tokens` others."""
        params, size = request.params, self.vocab_size
        allowed = params.allowed_token_ids
        if request.options.constrained:
            allowed = params.logprob_token_ids
        bias, words = params.logit_bias or {}, params.bad_words_token_ids or []
        # A tokenizer or a generation_config may name tokens that the model does not have.
        never = [word[0] for word in words if len(word) == 1 and 0 <= word[0] < size]
        if any(len(word) > 1 for word in words):
            never += self.moving_tokens
        stops = [stop for stop in sorted(params.all_stop_token_ids) if 0 <= stop < size]
        # A grammar's walk knows where an answer can go on (`GrammarState.min_tokens`).
        has_early_stops = params.min_tokens > 0 and params.structured_outputs is None
        early_stops = stops if has_early_stops else []
        return allowed or [], never, list(bias), list(bias.values()), early_stops

    def apply_staged_writes(self) -> None:
        """Makes the rules of staged requests. Copies the tokens of all of them to the device at
        once, without waiting."""
        if not self._added:
            return
        lists = [one for _, named in self._added.values() for one in named]
        numbers = np.concatenate([np.array(one, dtype=np.float64) for one in lists])  # exact
        copied = async_tensor_h2d(numbers, device=self.device).split([len(one) for one in lists])
        parts = iter(copied)
        for slot, (request, named) in self._added.items():
            if rules := self._make_rules(request, *(next(parts) for _ in named)):
                self._rules[slot] = rules
        self._added.clear()

    def _make_rules(
        self,
        request: NewRequest,
        allowed: torch.Tensor,  # [k] float64, as the others: see `_named_tokens`
        never: torch.Tensor,
        biased: torch.Tensor,
        biases: torch.Tensor,
        early_stops: torch.Tensor,
    ) -> LogitRules:
        """Returns the rules that a request's parameters set; without effect if they set none."""
        params, size = request.params, self.vocab_size
        words = params.bad_words_token_ids or []
        rules = LogitRules(bad_words=BadWords(w for w in words if len(w) > 1 and max(w) < size))
        if len(biased):
            bias = torch.zeros(size, device=self.device)
            rules.bias = bias.index_copy_(0, biased.long(), biases.float())
        if len(allowed) or len(never):
            excluded = torch.full((size,), len(allowed) > 0, dtype=torch.bool, device=self.device)
            excluded.index_fill_(0, allowed.long(), False)
            rules.excluded = excluded.index_fill_(0, never.long(), True)
        if len(early_stops):
            rules.early_stops = early_stops.long()
            rules.stops_from = request.prompt_len + params.min_tokens
        if use_penalty(params):
            rules.penalties = self._make_penalties(request)
        return rules

    def _make_penalties(self, request: NewRequest) -> Penalties:
        """Returns a request's penalties, with counts of the tokens emitted before it was added."""
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

    def canvases_with_rules(self, batch: CanvasBatch) -> list[int]:
        """Returns the indices of canvases whose requests have rules, see `rules_of_canvas`."""
        return batch.canvases_in(self._rules) if self._rules else []

    def canvases_with_bad_words(self, batch: CanvasBatch) -> list[int]:
        """Returns the indices of canvases whose requests have bad words of several tokens."""
        ruled = self.canvases_with_rules(batch)
        return [i for i in ruled if self.rules_of_request(i, batch).bad_words]

    def needs_whole_rows(self, batch: CanvasBatch) -> list[int]:
        """Returns the indices of canvases whose requests have rules or truncate logits, which needs
        all logits of a row at once."""
        slots = self._rules.keys() | self._truncated
        return batch.canvases_in(slots) if slots else []

    def rules_of_request(self, i: int, batch: CanvasBatch) -> LogitRules:
        """Returns the rules of canvas i's request; without effect if it has none."""
        return self._rules.get(int(batch.slots_np[i])) or LogitRules()

    def rules_of_canvas(self, i: int, context: RuleContext) -> CanvasRules:
        """Returns what applies the rules of canvas i's request, before the temperature."""
        rules, start = self.rules_of_request(i, context.batch), context.starts[i]
        kept = None if context.kept is None else context.kept[i]
        before = self._tokens_before(int(context.batch.slots_np[i]), start, rules.bad_words.reach)
        draw, first = context.draw, context.batch.rows_of(i).start

        def draw_rows(logits: torch.Tensor, row: int) -> torch.Tensor:
            assert draw is not None
            return draw(logits, slice(first + row, first + row + len(logits)))

        return CanvasRules(
            rules,
            start,
            context.guesses[i],
            before,
            kept,
            lead=context.leads.get(i),
            draw=None if draw is None else draw_rows,
        )

    def _tokens_before(self, slot: int, start: torch.Tensor, count: int) -> torch.Tensor:
        """Returns [count] int64: the last tokens before the slot's canvas, which begins at absolute
        position `start` []; NO_TOKEN in the prompt."""
        positions = start - count + torch.arange(count, device=self.device)
        tokens = self.req_states.all_token_ids.gpu[slot][positions.clamp(min=0)].long()
        is_answer = positions >= int(self.req_states.prompt_len.np[slot])
        return torch.where(is_answer, tokens, NO_TOKEN)

    def spelling_changes(
        self,
        inputs: "StepInputs",
        tokens: torch.Tensor,  # [n, C] int64, without the changes
        changed: torch.Tensor,  # [n, C] bool, positions that may change
        others: torch.Tensor,  # [n, C] int64, their tokens then
    ) -> torch.Tensor:
        """Returns [n, C] bool: positions that must not change, since their requests' bad words of
        several tokens would be spelled. Waits for the device if a request has such words."""
        batch, spelling = inputs.batch, torch.zeros_like(changed)
        for i in self.canvases_with_bad_words(batch):
            words, length = self.rules_of_request(i, batch).bad_words, int(batch.lengths_np[i])
            before = self._tokens_before(
                int(batch.slots_np[i]), inputs.starts[i], words.reach
            ).tolist()
            columns = torch.stack((tokens[i], changed[i].long(), others[i]))[:, :length].tolist()
            rows = enumerate(zip(*columns[1:], strict=True))
            changes = {row: other for row, (is_changed, other) in rows if is_changed}
            for row in words.spelling_changes(before, columns[0], changes):
                spelling[i, row] = True
        return spelling

    def truncate(
        self,
        scaled: torch.Tensor,  # [rows, V] fp32, divided by the temperature
        batch: CanvasBatch,
        rows: slice | torch.Tensor,  # of the batch's rows
    ) -> torch.Tensor:
        """Returns `scaled` with the logits of tokens that min_p, top_k and top_p leave out set to
        `TRUNCATED_LOGIT`. May change `scaled` in place."""
        if not batch.any_in(self._truncated):
            return scaled
        states, slots = self.sampling_states, batch.expand_to_rows(batch.slots)[rows]
        if states.min_p.np[batch.slots_np].any():
            exclude_below_min_p_(scaled, states.min_p.gpu[slots][:, None])
        scaled = states.apply_top_k_top_p(scaled, slots, batch.slots_np)
        return scaled.clamp(min=TRUNCATED_LOGIT)  # from -inf

    def count_emitted(
        self,
        batch: CanvasBatch,
        blocks: torch.Tensor,  # [n, C] int
        emitted: torch.Tensor,  # [n] int, tokens
    ) -> None:
        """Adds emitted tokens to the counts of requests with penalties, in place."""
        for i in self.canvases_with_rules(batch):
            penalties = self.rules_of_request(i, batch).penalties
            if penalties is not None:
                block = blocks[i, : batch.lengths_np[i]].long()
                is_emitted = _positions(len(block), self.device) < emitted[i]
                penalties.count_tokens_(block, is_emitted)

    def write_emitted_tokens(
        self,
        inputs: "StepInputs",
        blocks: torch.Tensor,  # [n, C] int64
        emitted: torch.Tensor,  # [n] int64, tokens
    ) -> None:
        """Writes the emitted tokens of requests with bad words to the runner's `all_token_ids`, in
        place. The runner writes them later, but rules applied in this step look back at them."""
        batch = inputs.batch
        for i in self.canvases_with_bad_words(batch):
            slot, length = int(batch.slots_np[i]), int(batch.lengths_np[i])
            tokens = self.req_states.all_token_ids.gpu[slot]
            positions = inputs.starts[i] + _positions(length, self.device)
            positions = positions.clamp(max=len(tokens) - 1)  # of a canvas that is cut
            block = blocks[i, :length].to(tokens.dtype)
            is_emitted = _positions(length, self.device) < emitted[i]
            tokens[positions] = torch.where(is_emitted, block, tokens[positions])
