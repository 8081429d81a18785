"""Brings the most probable tokens of a canvas to the host, where a grammar finds its legal path."""

from functools import partial

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.acceptance import Reveal
from vllm_dllm.grammar.rows import MORE_TOKENS, CanvasRows, unpack_mask
from vllm_dllm.step.logits.canvas_logits import CanvasLogits

MOST_PROBABLE = 32
"""Tokens of each row that go to the host. A row in which none of them is legal is read again."""
_REVEALED_NATS = 20.0
"""How much the log-probability of other tokens is lowered in the row of a revealed one."""


def read_canvas_rows(
    logits: CanvasLogits,
    i: int,
    temperature: torch.Tensor,  # [L, 1] fp32, of canvas i
    revealing: Reveal | None,  # None: no canvas reveals tokens permanently
) -> CanvasRows:
    """Returns the `MOST_PROBABLE` most probable tokens of each row of canvas i on the host, and
    functions that read more of a row. A permanently revealed token comes first in its row. Waits
    for the device."""
    of_rows, first = [], 0
    for rows in logits.processed(i):
        of_rows.append(_top_tokens(rows / temperature[first : first + len(rows)], MOST_PROBABLE))
        first += len(rows)
    tokens, logprobs = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
    if revealing is not None:
        tokens, logprobs = _put_revealed_first(tokens, logprobs, revealing, i)
    return CanvasRows(
        tokens.cpu().numpy(),
        logprobs.cpu().numpy(),
        partial(_best_legal, logits, i, temperature),
        partial(_more_top_tokens, logits, i, temperature),
    )


def _top_tokens(
    scaled: torch.Tensor,  # [..., V] fp32
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k most probable tokens [..., k] int64 of each row, the best first, and their
    log-probabilities [..., k] fp32."""
    top = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
    return top.indices, top.values - scaled.logsumexp(dim=-1, keepdim=True)


def _best_legal(
    logits: CanvasLogits,
    i: int,
    temperature: torch.Tensor,  # [L, 1] fp32
    row: int,
    words: np.ndarray,  # [W] uint32
) -> tuple[int, float]:
    """Returns one row's most probable token of the set `words`, and its log-probability among all
    tokens. Each word has a bit for each of 32 tokens. Waits for the device."""
    scaled = logits.row(i, row) / temperature[row]
    is_legal = unpack_mask(words, len(scaled))
    among = scaled.masked_fill(async_tensor_h2d(~is_legal, device=scaled.device), float("-inf"))
    token = among.argmax()
    found = torch.stack((token.double(), (scaled[token] - scaled.logsumexp(dim=-1)).double()))
    chosen, logprob = found.tolist()
    return int(chosen), logprob


def _more_top_tokens(
    logits: CanvasLogits,
    i: int,
    temperature: torch.Tensor,  # [L, 1] fp32
    row: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `MORE_TOKENS` most probable tokens [k] int64 of one row of canvas i, the best
    first, and their log-probabilities [k] fp32. Waits for the device."""
    tokens, logprobs = _top_tokens(logits.row(i, row) / temperature[row], MORE_TOKENS)
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _put_revealed_first(
    tokens: torch.Tensor,  # [L, k] int64
    logprobs: torch.Tensor,  # [L, k] fp32
    revealing: Reveal,
    i: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `tokens` and `logprobs` with each permanently revealed token first in its row, at
    log-probability 0. In such a row the last token drops out, the other log-probabilities fall by
    `_REVEALED_NATS`, and the revealed token may occur a second time."""
    L = len(tokens)
    is_revealed = (revealing.revealed[i, :L] & revealing.is_chosen[i])[:, None]
    shown = revealing.tokens[i, :L, None]
    certain = torch.zeros_like(logprobs[:, :1])
    others = logprobs[:, :-1] - _REVEALED_NATS
    return (
        torch.where(is_revealed, torch.cat((shown, tokens[:, :-1]), dim=1), tokens),
        torch.where(is_revealed, torch.cat((certain, others), dim=1), logprobs),
    )
