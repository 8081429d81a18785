"""Reports the log-probabilities of a step's tokens to the requests that ask for them.

A block that has a commit of its own is emitted one step after the step that decided it, so each
step's log-probabilities are kept for one step: a commit reports those of the step before it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.step.asked.logprob_tensors import (
    LogprobRequest,
    Placements,
    first_rows_of,
    join_requests,
    join_tiles,
    pad_rows,
    select_scores,
    token_logprobs,
    with_reveal_step,
)
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.canvas_logits import CanvasLogits
from vllm_dllm.step.logits.masked_logits import MaskedLogits
from vllm_dllm.step.slots import NewRequest, Registry


class StepLogprobs(Registry):
    """Keeps log-probabilities by slot and reports them with the tokens that a step emits. Only
    requests that ask for log-probabilities have an entry."""

    def __init__(self, mode: str, vocab_size: int, device: torch.device) -> None:
        """`mode`: vLLM's `logprobs_mode`. `vocab_size`: what a request that asks for all tokens
        gets."""
        self.reports_logits = mode in ("raw_logits", "processed_logits")
        self.reports_processed = mode in ("processed_logits", "processed_logprobs")
        self.vocab_size = vocab_size
        self.device = device
        self._requests: dict[int, LogprobRequest] = {}

    def add_request(self, request: NewRequest) -> None:
        """Keeps which log-probabilities the request asks for, if any."""
        slot, params, options = request.slot, request.params, request.options
        count = params.logprobs
        token_ids = tuple(params.logprob_token_ids or ())
        if count is None and not token_ids:
            return
        self._requests[slot] = LogprobRequest(
            self.vocab_size if count == -1 else count or 0,
            async_tensor_h2d(np.array(token_ids, dtype=np.int64), device=self.device),
            when_placed=options.logprobs == "unmask",
            read_only=options.read_only,
            constrained=options.constrained,
        )

    def remove_request(self, slot: int) -> None:
        self._requests.pop(slot, None)

    def any_in(self, batch: CanvasBatch) -> bool:
        """Returns whether any request of the batch asks for log-probabilities."""
        return batch.any_in(self._requests.keys())

    def needs_placements(self, batch: CanvasBatch) -> bool:
        """Returns whether `report` needs `placements`: a request asks for scores of the step that
        placed a token."""
        return any(request.when_placed for _, request in self._requests_in(batch))

    def _requests_in(self, batch: CanvasBatch) -> Iterator[tuple[int, LogprobRequest]]:
        """Yields the indices of canvases that ask for log-probabilities, and what they ask for."""
        for i, slot in enumerate(batch.slots_list if self._requests else ()):
            if (request := self._requests.get(slot)) is not None:
                yield i, request

    def keep_first_scores(
        self,
        batch: CanvasBatch,  # one row of each request
        logits: CanvasLogits,
        row_temperature: torch.Tensor,  # [n, 1]
        tokens: torch.Tensor,  # [n] int64, the first of each canvas
        is_new: torch.Tensor | None,  # [n] bool, others keep earlier scores; None: all are new
    ) -> None:
        """Keeps the scores of the first token of each canvas, which is sampled before the canvas'
        first step. Skips requests that do not ask for scores of the step that placed a token."""
        for i, request in self._requests_in(batch):
            if not request.when_placed:
                continue
            own = slice(i, i + 1)
            scores = self._score_tokens(logits, i, request, row_temperature[own], tokens[own])
            latest = pad_rows(with_reveal_step(0, scores), batch.canvas_length)
            if is_new is not None and request.latest is not None:
                latest = select_scores(is_new[i], latest, request.latest)
            request.latest = latest

    def _score_tokens(
        self,
        logits: CanvasLogits,
        i: int,  # index of the canvas
        wanted: LogprobRequest,
        row_temperature: torch.Tensor | None,  # [L, 1]; None: 1
        tokens: torch.Tensor,  # [L] int64
    ) -> LogprobsTensors:
        """Returns the scores of `tokens` in canvas i. They are of processed logits if the server
        reports those or the request is constrained, else of raw logits."""
        # A constrained request asks for probabilities among its choices.
        in_process = self.reports_processed or wanted.constrained
        tiles, first = [], 0
        for rows in logits.processed(i) if in_process else logits.raw(i):
            last = first + len(rows)
            scale = None if row_temperature is None else row_temperature[first:last]
            tiles.append(
                token_logprobs(rows, scale, tokens[first:last], wanted, self.reports_logits)
            )
            first = last
        return join_tiles(tiles)

    def keep_first_logits(
        self,
        slots: list[int],
        logits: torch.Tensor,  # [n, V] fp32
        is_new: torch.Tensor | None,  # [n] bool, others keep earlier logits; None: all are new
    ) -> None:
        """Keeps the logits that the first tokens of n canvases were drawn from, for slots that ask
        for log-probabilities. No later forward computes these logits."""
        for i, slot in enumerate(slots):
            if (request := self._requests.get(slot)) is None:
                continue
            if is_new is None or request.first_logits is None:
                request.first_logits = logits[i].clone()
            else:
                request.first_logits = torch.where(is_new[i], logits[i], request.first_logits)

    def restore_first_logits(
        self,
        batch: CanvasBatch,
        logits: torch.Tensor,  # [rows, V] fp32, changed in place
        are_overwritten: torch.Tensor,  # [n] bool
    ) -> None:
        """Overwrites the first row of the chosen canvases in `logits` with what was kept for their
        slots. Canvases whose requests ask for no log-probabilities stay."""
        for i, request in self._requests_in(batch):
            if request.first_logits is not None:
                first = batch.rows_of(i).start
                logits[first] = torch.where(are_overwritten[i], request.first_logits, logits[first])

    def shift_draft_logits(
        self,
        batch: CanvasBatch,
        logits: MaskedLogits,  # changed: rows get the logits that their tokens were drawn from
        num_accepted: torch.Tensor,  # [n] int64, how many rows of a verified draft are accepted
        verified_now: torch.Tensor,  # [n] bool, drafts; in others only the first row changes
    ) -> None:
        """Moves the logits of verified drafts on by one row, in place, because their rows predict
        the tokens behind them. The first row gets the kept logits. The logits of the last accepted
        row are kept: the next canvas' first token is drawn from them."""
        for i, request in self._requests_in(batch):
            if (kept := request.first_logits) is not None:
                own = logits.all_rows(in_process=self.reports_processed)[batch.rows_of(i)]
                (last,) = own.index_select(0, num_accepted[i : i + 1] - 1)
                request.first_logits = torch.where(verified_now[i], last, kept)
                own[1:] = torch.where(verified_now[i], own[:-1].clone(), own[1:])
                own[0] = kept

    def report(
        self,
        batch: CanvasBatch,
        logits: CanvasLogits,
        row_temperature: torch.Tensor,  # [rows, 1]
        best_guess: torch.Tensor,  # [n, C] int64
        *,
        num_reqs: int,  # of the whole batch
        at_once: torch.Tensor,  # [n] bool, blocks that were decided by this step's logits
        cut: torch.Tensor | None,  # [n] bool, canvases whose step is taken back; None: none is
        placements: Placements | None = None,  # None: `needs_placements` is False
        are_drafts: np.ndarray | None = None,  # [n] bool, after `shift_draft_logits`; None: none is
    ) -> LogprobsTensors | None:
        """Returns the scores of the tokens that this step may emit, and keeps its scores for the
        next one. A canvas that is committed reports what the step before kept. A read-only request
        gets scores before the temperature. Returns None if no request of the batch asks for
        log-probabilities."""
        if not self.any_in(batch):
            return None
        parts: list[LogprobsTensors] = []
        first_rows, num_rows = [0] * num_reqs, 0
        for i, wanted in self._requests_in(batch):
            rows = batch.rows_of(i)
            length = rows.stop - rows.start
            # A read-only request asks what the model thinks, not what the schedule makes of it.
            scale = None if wanted.read_only else row_temperature[rows]
            scores = self._score_tokens(logits, i, wanted, scale, best_guess[i, :length])
            is_draft = are_drafts is not None and bool(are_drafts[i])
            if is_draft and length < batch.canvas_length:
                # What is drawn behind the last row may be emitted with it.
                assert wanted.first_logits is not None, "kept for drafts"
                behind, scale = best_guess[i, length : length + 1], row_temperature[rows][-1:]
                of_next = token_logprobs(
                    wanted.first_logits[None], scale, behind, wanted, self.reports_logits
                )
                scores = join_tiles([scores, of_next])
            if wanted.when_placed:
                assert placements is not None, "needs_placements says so"
                scores = with_reveal_step(placements.steps[i], scores)
                if wanted.latest is not None:
                    positions = placements.positions[i, :length]
                    scores = select_scores(positions, scores, first_rows_of(wanted.latest, length))
            if not (wanted.read_only or is_draft):
                before, latest = wanted.latest, pad_rows(scores, batch.canvas_length)
                if before is not None:
                    # A commit's own logits say nothing of its block: the step before decided it.
                    scores = select_scores(at_once[i], scores, first_rows_of(before, length))
                    # The host does not know whether the step was taken back.
                    latest = latest if cut is None else select_scores(cut[i], before, latest)
                wanted.latest = latest
            first_rows[int(batch.requests_np[i])] = num_rows
            num_rows += len(scores.logprobs)
            parts.append(scores)
        return join_requests(parts, first_rows)
