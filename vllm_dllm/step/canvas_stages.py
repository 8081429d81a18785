"""What a step knows of its canvases, from stage to stage: inputs, denoised, settled, result. It
settles which canvases are emitted, committed or denoised again."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.requests.ends import EVERY_BLOCK, is_last_block
from vllm_dllm.step.asked.logprob_tensors import Placements
from vllm_dllm.step.asked.masked_settings import MaskedStepSettings
from vllm_dllm.step.asked.settings import StepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.canvas_logits import CanvasLogits
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers, SlotTokens

if TYPE_CHECKING:
    from vllm_dllm.step.requests import StepRequests


class Drafts(NamedTuple):
    """Says which canvases are drafts, whose tokens are decided causally (see `VerifiedStep`)."""

    is_draft_np: np.ndarray  # [n] bool
    is_draft: torch.Tensor  # [n] bool, the same on the device
    verified_now: torch.Tensor  # [n] bool, drafts that this step verifies, not makes


class StepInputs(NamedTuple):
    """What a step reads of its n canvases. Tensors may be views of the slots: they must not be read
    after the step has written the slots."""

    batch: CanvasBatch
    numbers: SlotNumbers
    tokens: SlotTokens
    starts: torch.Tensor  # [n] int64, absolute position of each canvas' first token
    block_ends: torch.Tensor  # [n] int64, absolute position after its last token
    stops: torch.Tensor  # [n, K] int64, stop tokens
    settings: StepSettings | MaskedStepSettings
    cut: torch.Tensor | None = None  # [n] bool, canvases that are taken back; None: surely none
    earlier: dict[str, torch.Tensor] | None = None  # `snapshot` before the step; None with `cut`
    drafts: Drafts | None = None  # None: no canvas is a draft

    @property
    def commits(self) -> torch.Tensor:
        """Returns [n] bool: canvases that this step commits."""
        return self.numbers.is_committing == 1

    @property
    def skips_grammars(self) -> torch.Tensor:
        """Returns [n] bool: canvases that are committed, or whose step is taken back."""
        return self.commits if self.cut is None else self.commits | self.cut


class VerifiedDrafts(NamedTuple):
    """What a step makes of drafts. Rows of canvases that are no drafts have no meaning."""

    tokens: torch.Tensor  # [n, C] int64, accepted tokens of drafts that are verified now
    emitted: torch.Tensor  # [n] int64, how many tokens join the answer
    next_token: torch.Tensor  # [n] int64, the first token of the next canvas


class Denoised(NamedTuple):
    """The outcome of a denoise step for each canvas, computed whatever phase the canvas is in."""

    logits: CanvasLogits
    temperature: torch.Tensor  # [n] fp32
    row_temperature: torch.Tensor  # [rows, 1] fp32
    stats: RowStats  # fields [n, C]
    soft_rows: torch.Tensor | None  # [rows, H] expected embeddings; None: the model reads none
    next_canvas: torch.Tensor  # [n, C] int64, what the next block starts from
    outcome: StepOutcome
    revealed: torch.Tensor | None  # [n, C] bool, positions that keep their tokens; None: none do
    is_committed: torch.Tensor | None = None  # [n] bool, finished blocks whose keys and values in
    # the cache are those of a commit already; None: no block's are
    placements: Placements | None = None  # None: no request asks for it
    verified: VerifiedDrafts | None = None  # None: no canvas is a draft


class Settled(NamedTuple):
    """What becomes of each canvas in its phase: denoised on, finished, emitted or committed."""

    denoises: torch.Tensor  # [n] bool, canvases that are denoised, not committed or taken back
    best_guess: torch.Tensor  # [n, C] int64
    finished: torch.Tensor  # [n] bool, canvases that this step finishes
    at_once: torch.Tensor  # [n] bool, canvases that this step finishes and emits
    ends: torch.Tensor  # [n] bool, blocks after which another one starts
    commits_next: torch.Tensor  # [n] bool, canvases that the next forward commits
    emitted: torch.Tensor  # [n] int64, how many tokens join the answer
    committed: torch.Tensor | None  # [n] int64, emitted tokens that no later step computes again


class StepResult(NamedTuple):
    """What a step made of its n canvases."""

    best_guess: torch.Tensor  # [n, C] int
    emitted: torch.Tensor  # [n] int, how many of these tokens join the answer
    rejected: torch.Tensor  # [n] int, how many tokens later steps compute again; the batch's
    # `lengths` themselves if no block is committed
    logprobs: LogprobsTensors | None  # of the emitted tokens; None: no request asks for them


class Settling:
    """Settles canvases and writes their slots. `settle_triton` does the same in kernels."""

    def __init__(
        self, slots: CanvasSlots, requests: "StepRequests", *, spares_last_commit: bool
    ) -> None:
        """`spares_last_commit`: whether a request's last block is emitted without a commit."""
        self.slots, self.requests = slots, requests
        self.spares_last_commit = spares_last_commit

    def settle(self, inputs: StepInputs, denoised: Denoised) -> Settled:
        """Decides which canvases are finished, and which blocks the step emits. Writes no slot."""
        outcome, committing = denoised.outcome, inputs.commits
        denoises = ~committing
        finished = outcome.finished & denoises
        best_guess = torch.where(
            committing[:, None], inputs.tokens.best_guess, outcome.state.best_guess
        )
        at_once = finished & self._emits_at_once(best_guess, inputs)
        if denoised.is_committed is not None:
            at_once |= finished & denoised.is_committed
        ends = committing | at_once
        emitted = inputs.batch.lengths * ends
        if inputs.cut is not None:
            emitted, denoises = torch.where(inputs.cut, 0, emitted), denoises & ~inputs.cut
        committed = None
        if not self.requests.joins_commits:
            committed = emitted
        elif denoised.is_committed is not None:
            committed = emitted * denoised.is_committed
        settled = Settled(
            denoises=denoises,
            best_guess=best_guess,
            finished=finished,
            at_once=at_once,
            ends=ends,
            commits_next=finished & ~at_once,
            emitted=emitted,
            committed=committed,
        )
        if inputs.drafts is None or denoised.verified is None:
            return settled
        return _settle_drafts(settled, inputs, inputs.drafts, denoised.verified)

    def _emits_at_once(
        self,
        blocks: torch.Tensor,  # [n, C] int64
        inputs: StepInputs,
    ) -> torch.Tensor | bool:
        """Returns [n] bool, or one bool for all: whether the step that finishes a block also emits
        it."""
        if self.spares_last_commit and self.requests.joins_commits:
            return True
        request_ends = inputs.numbers.end
        is_last = is_last_block(
            blocks, inputs.batch.valid, inputs.block_ends, request_ends, inputs.stops
        )
        if self.spares_last_commit:
            return is_last
        is_read_only = request_ends == EVERY_BLOCK
        return is_read_only | ~is_last if self.requests.joins_commits else is_read_only

    def write_slots(self, inputs: StepInputs, denoised: Denoised, settled: Settled) -> torch.Tensor:
        """Writes to the slots what the next step reads. Overwrites `next_canvas` and `soft_rows` of
        `denoised`. Returns the canvases [n, C] int64 as the next denoise step would read them."""
        slots, batch, outcome = self.slots, inputs.batch, denoised.outcome
        idx, finished, ended = batch.slot_index, settled.finished[:, None], settled.ends[:, None]
        drops_soft = ended  # a canvas starts with none
        canvas = torch.where(finished, settled.best_guess, outcome.canvas)
        if self.requests.first_canvases.has_pins(batch):
            pinned = self.requests.first_canvases.update_pins(idx, ended)
            canvas = torch.where(pinned & ~finished, inputs.tokens.first_canvas, canvas)
            drops_soft = ended | pinned
        next_canvas, guess = denoised.next_canvas, outcome.state.best_guess
        drafts, verified = inputs.drafts, denoised.verified
        if drafts is not None and verified is not None:
            next_canvas[:, 0] = torch.where(drafts.is_draft, verified.next_token, next_canvas[:, 0])
        predictions = self.requests.predictions
        if (predicted := predictions.find_predicted(batch)) is None:
            guess = guess.masked_fill(ended, NO_TOKEN)
        else:
            may_move = _may_move(inputs, outcome, settled)
            moved = predictions.realign(predicted, guess, outcome.accepted, batch.valid, may_move)
            expected = predictions.expect_next_blocks(
                predicted, settled.best_guess, settled.emitted
            )
            canvas, next_canvas = moved.fill_canvas(canvas), expected.fill_canvas(next_canvas)
            guess = torch.where(ended, expected.guess, moved.fill_guess(guess))
        slots.canvas[idx] = torch.where(ended, next_canvas, canvas)
        if denoised.soft_rows is not None:
            soft = batch.unflatten(denoised.soft_rows)
            slots.soft_embeds[idx] = soft.masked_fill_(drops_soft[..., None], 0.0)
        if denoised.revealed is not None:
            revealed = denoised.revealed & ~ended
            if drafts is not None:  # the first token of a draft is always known
                revealed[:, 0] |= drafts.is_draft
            slots.revealed[idx] = revealed
        slots.write_progress(
            idx,
            guess,
            outcome.state.steps_done.masked_fill(settled.ends, 0),
            settled.commits_next,
            outcome.state.times_repeated,
        )
        return canvas


def _may_move(inputs: StepInputs, outcome: StepOutcome, settled: Settled) -> torch.Tensor:
    """Returns [n] bool: canvases whose expected tokens may move. These have had only their first
    step, are denoised on, and reveal nothing permanently."""
    may_move = settled.denoises & ~settled.finished & (outcome.state.steps_done == 1)
    if isinstance(inputs.settings, StepSettings) and inputs.settings.reveal is not None:
        may_move &= ~inputs.settings.reveal.is_chosen
    return may_move


def _settle_drafts(
    settled: Settled, inputs: StepInputs, drafts: Drafts, verified: VerifiedDrafts
) -> Settled:
    """Returns `settled` with the outcome of canvases that are drafts; others keep theirs."""
    is_draft = drafts.is_draft
    at_once = torch.where(is_draft, settled.finished & (verified.emitted > 0), settled.at_once)
    emitted = torch.where(is_draft, verified.emitted, settled.emitted)
    if inputs.cut is not None:
        emitted = torch.where(inputs.cut, 0, emitted)
    has_nothing_to_draft = is_draft & (inputs.numbers.width == 1)
    return settled._replace(
        best_guess=torch.where(drafts.verified_now[:, None], verified.tokens, settled.best_guess),
        at_once=at_once,
        ends=inputs.commits | at_once,
        commits_next=settled.finished & ~at_once | has_nothing_to_draft,
        emitted=emitted,
        committed=torch.where(
            is_draft, emitted, 0 if settled.committed is None else settled.committed
        ),
    )
