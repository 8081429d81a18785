"""What a step knows of its canvases, stage by stage."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.denoise.row_stats import RowStats
from vllm_dllm.denoise.step import StepOutcome
from vllm_dllm.step.asked.logprob_tensors import Placed
from vllm_dllm.step.asked.masked_settings import MaskedStepSettings
from vllm_dllm.step.asked.settings import StepSettings
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.canvas_logits import CanvasLogits
from vllm_dllm.step.slots import SlotNumbers, SlotTokens


class Drafts(NamedTuple):
    """Canvases whose tokens are the autoregressive model's (`verified_step`)."""

    are_np: np.ndarray  # [n] bool, these are
    are: torch.Tensor  # [n] bool, the same
    are_verified: torch.Tensor  # [n] bool, by this step; the others are drafted


class Found(NamedTuple):
    """What a step reads of its n canvases. Views of the slots, where these lie side by side: of no
    use once something is written."""

    batch: CanvasBatch
    numbers: SlotNumbers
    tokens: SlotTokens
    starts: torch.Tensor  # [n] int64, absolute position of each canvas' first token
    block_ends: torch.Tensor  # [n] int64, absolute position after its last token
    stops: torch.Tensor  # [n, K] int64, stop tokens
    settings: StepSettings | MaskedStepSettings
    cut: torch.Tensor | None  # [n] bool, steps that are taken back; None: surely none
    earlier: dict[str, torch.Tensor] | None  # what they are taken back to
    drafts: Drafts | None = None  # None: no canvas is one


class Verified(NamedTuple):
    """What a step makes of drafts."""

    drafts: Drafts  # the other fields say nothing of other canvases
    tokens: torch.Tensor  # [n, C] int64, of those that are verified now
    emitted: torch.Tensor  # [n] int64, tokens that are the answer's from now on
    next_token: torch.Tensor  # [n] int64, with which the next canvas begins


class Denoised(NamedTuple):
    """What a denoise step would make of each canvas, whatever its phase is."""

    logits: CanvasLogits
    temperature: torch.Tensor  # [n] fp32
    row_temperature: torch.Tensor  # [rows, 1] fp32
    stats: RowStats  # fields [n, C]
    soft_rows: torch.Tensor | None  # [rows, H]; None: of a model that reads none
    next_canvas: torch.Tensor  # [n, C] int64, the first canvas of the block behind
    outcome: StepOutcome
    revealed: torch.Tensor | None  # [n, C] bool, positions that keep their tokens; None: none do
    is_committed: torch.Tensor | None = None  # [n] bool, finished blocks of which this forward left
    # the keys and values that their commit would; None: of none
    placed: Placed | None = None  # None: nobody asks
    verified: Verified | None = None  # None: no canvas is a draft


class Settled(NamedTuple):
    """What becomes of each canvas, by its phase."""

    denoises: torch.Tensor  # [n] bool, else it commits or is taken back
    best_guess: torch.Tensor  # [n, C] int64
    finished: torch.Tensor  # [n] bool, decided by this step
    at_once: torch.Tensor  # [n] bool, and emitted by it, too
    ends: torch.Tensor  # [n] bool, blocks after which another one starts
    commits_next: torch.Tensor  # [n] bool, the next forward commits the canvas
    emitted: torch.Tensor  # [n] int64, tokens
    committed: torch.Tensor | None  # [n] int64, those that no later step computes; None: of none


class Advanced(NamedTuple):
    """What a step made of its n canvases."""

    best_guess: torch.Tensor  # [n, C] int
    emitted: torch.Tensor  # [n] int, tokens of it that are the answer's from now on
    rejected: torch.Tensor  # [n] int, tokens that later steps compute again; the batch's `lengths`
    # themselves if no block is committed
    logprobs: LogprobsTensors | None  # of the emitted tokens
