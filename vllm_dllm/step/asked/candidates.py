"""Brings the most probable tokens of a canvas to the host, where a grammar finds its legal path."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dllm.denoise.acceptance import Reveal
from vllm_dllm.grammar.masks import unpack_mask
from vllm_dllm.grammar.walk import MORE_TOKENS, CanvasRows
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
    parts, first = [], 0
    for rows in logits.processed(i):
        parts.append(_top_tokens(rows / temperature[first : first + len(rows)], MOST_PROBABLE))
        first += len(rows)
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    if revealing is not None:
        tokens, logprobs = _put_revealed_first(tokens, logprobs, revealing, i)
    reader = _RowReader(logits, i, temperature)
    return CanvasRows(
        tokens.cpu().numpy(),
        logprobs.cpu().numpy(),
        best_legal=reader.best_legal,
        more=reader.more_top_tokens,
    )


def _top_tokens(
    scaled: torch.Tensor,  # [..., V] fp32
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k most probable tokens [..., k] int64 of each row, the best first, and their
    log-probabilities [..., k] fp32."""
    top = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
    return top.indices, top.values - scaled.logsumexp(dim=-1, keepdim=True)


class _RowReader(NamedTuple):
    """Reads more of single rows of canvas i. Waits for the device."""

    logits: CanvasLogits
    i: int
    temperature: torch.Tensor  # [L, 1] fp32

    def best_legal(
        self,
        row: int,
        words: np.ndarray,  # [W] uint32, a bit for each token
    ) -> tuple[int, float]:
        """Returns the row's most probable token of the set `words`, and its log-probability among
        all tokens."""
        scaled = self._scaled(row)
        is_illegal = async_tensor_h2d(~unpack_mask(words, len(scaled)), device=scaled.device)
        token = scaled.masked_fill(is_illegal, float("-inf")).argmax()
        logprob = scaled[token] - scaled.logsumexp(dim=-1)
        chosen, of_chosen = torch.stack((token.double(), logprob.double())).tolist()
        return int(chosen), of_chosen

    def more_top_tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row's `MORE_TOKENS` most probable tokens [k] int64, the best first, and their
        log-probabilities [k] fp32."""
        tokens, logprobs = _top_tokens(self._scaled(row), MORE_TOKENS)
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _scaled(self, row: int) -> torch.Tensor:
        return self.logits.row(self.i, row) / self.temperature[row]


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
