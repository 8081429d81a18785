"""Computes log-probabilities of tokens, and selects, pads and joins tensors of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F
from vllm.v1.outputs import LogprobsTensors

from vllm_dllm.compat.logprobs import pack_step_into_ranks


@dataclass
class LogprobRequest:
    """The log-probabilities that one request wants for each of its tokens, and what is kept of
    earlier steps for it."""

    num_logprobs: int  # most likely tokens to report besides the chosen one
    token_ids: torch.Tensor  # [k] int64, report these instead of the most likely ones; k may be 0
    when_placed: bool = False  # of the step that placed a token
    read_only: bool = False
    constrained: bool = False  # among its allowed tokens
    latest: LogprobsTensors | None = None
    """Scores [C rows] of the last step not taken back, or of those that placed the tokens."""
    first_logits: torch.Tensor | None = None  # [V] that the canvas' first token was drawn from


class Placements(NamedTuple):
    """Where a masked model's step places tokens in n canvases, by revealing or replacing them."""

    positions: torch.Tensor  # [n, C] bool
    steps: torch.Tensor  # [n] int64, the number of this step in each canvas, from 1


def token_logprobs(
    logits: torch.Tensor,  # [rows, V] fp32
    temperature: torch.Tensor | None,  # [rows, 1] fp32; None: 1
    tokens: torch.Tensor,  # [rows] int64, the chosen tokens
    request: LogprobRequest,
    report_logits: bool,  # report raw values instead of log-probabilities
) -> LogprobsTensors:
    """Returns the scores of each row's chosen token in column 0. The other columns are
    `request.token_ids`, or else the `num_logprobs` most probable tokens. Ranks of the chosen tokens
    count from 1."""
    columns = tokens[:, None]
    if len(request.token_ids) > 0:
        columns = torch.cat((columns, request.token_ids.expand(len(tokens), -1)), dim=1)
    elif request.num_logprobs > 0:
        likeliest = logits.topk(request.num_logprobs, dim=-1).indices
        columns = torch.cat((columns, likeliest), dim=1)
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(dim=-1)
    scaled = logits if temperature is None else logits / temperature
    scores = scaled.gather(1, columns)
    if not report_logits:
        scores = scores - scaled.logsumexp(dim=-1, keepdim=True)
    return LogprobsTensors(logprob_token_ids=columns, logprobs=scores, selected_token_ranks=ranks)


def select_scores(
    condition: torch.Tensor,  # [] or [rows] bool
    one: LogprobsTensors,
    other: LogprobsTensors,
) -> LogprobsTensors:
    """Returns the rows of `one` where the condition holds, else those of `other`, which has the
    same shape. Does not wait for the device."""
    rows = condition[..., None]
    return LogprobsTensors(
        torch.where(rows, one.logprob_token_ids, other.logprob_token_ids),
        torch.where(rows, one.logprobs, other.logprobs),
        torch.where(condition, one.selected_token_ranks, other.selected_token_ranks),
    )


def with_reveal_step(step: torch.Tensor | int, scores: LogprobsTensors) -> LogprobsTensors:
    """Returns `scores` with the number of the step that revealed their tokens, `step` ([] int64),
    packed into the ranks."""
    return scores._replace(
        selected_token_ranks=pack_step_into_ranks(scores.selected_token_ranks, step)
    )


def pad_rows(scores: LogprobsTensors, num_rows: int) -> LogprobsTensors:
    """Returns the scores padded to `num_rows` rows with zeros, which have no meaning."""
    missing = num_rows - len(scores.logprobs)
    if missing == 0:
        return scores
    # Padding begins with the last axis, and rows are the first.
    return LogprobsTensors(
        *(F.pad(column, (0, 0) * (column.dim() - 1) + (0, missing)) for column in scores[:3])
    )


def first_rows_of(scores: LogprobsTensors, num_rows: int) -> LogprobsTensors:
    """Returns the first `num_rows` rows of the scores."""
    return LogprobsTensors(*(column[:num_rows] for column in scores[:3]))


def join_tiles(tiles: Sequence[LogprobsTensors]) -> LogprobsTensors:
    """Returns the scores of consecutive tiles of rows as one."""
    if len(tiles) == 1:
        return tiles[0]
    columns = zip(*(tile[:3] for tile in tiles), strict=True)
    return LogprobsTensors(*(torch.cat(column) for column in columns))


def join_requests(parts: Sequence[LogprobsTensors], first_rows: list[int]) -> LogprobsTensors:
    """Returns the scores of all requests as one. The scores of batch request i begin at row
    `first_rows[i]`. Narrower parts are padded with token 0 at -inf, which vLLM's output processor
    never reports."""
    width = max(part.logprobs.shape[1] for part in parts)

    def joined(tensors: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
        return torch.cat([F.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])

    return LogprobsTensors(
        logprob_token_ids=joined([part.logprob_token_ids for part in parts], 0),
        logprobs=joined([part.logprobs for part in parts], float("-inf")),
        selected_token_ranks=torch.cat([part.selected_token_ranks for part in parts]),
        cu_num_generated_tokens=first_rows,
    )
