"""What a step knows of its canvases, from stage to stage: inputs, denoised, settled, result."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.step.asked.logprob_tensors import Placements
from vllm_dllm.step.asked.masked_settings import MaskedStepSettings
from vllm_dllm.step.asked.settings import StepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.canvas_logits import CanvasLogits
from vllm_dllm.step.slots import SlotNumbers, SlotTokens


class Drafts(NamedTuple):
    """Says which canvases are drafts, whose tokens the model decides causally (see
    `verified_step`)."""

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
    cut: torch.Tensor | None = (
        None  # [n] bool, canvases whose step is taken back; None: surely none
    )
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
    """What becomes of each canvas in its phase: it is denoised on, finished, emitted or
    committed."""

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
