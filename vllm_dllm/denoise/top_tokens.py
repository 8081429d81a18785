"""The k most probable tokens of rows whose logits arrive tile by tile."""

import torch


class TopTokens:
    def __init__(self, k: int) -> None:
        self.k = k
        self._logits: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None
        self._log_total: torch.Tensor | None = None

    def add(
        self,
        logits: torch.Tensor,  # [rows, Vt]
        first_token: int,  # of the tile
    ) -> None:
        top = logits.topk(min(self.k, logits.shape[1]), dim=-1)
        found = top.values.float(), top.indices + first_token
        log_total = logits.float().logsumexp(dim=-1, keepdim=True)
        if self._logits is None or self._tokens is None or self._log_total is None:
            self._logits, self._tokens = found
            self._log_total = log_total
            return
        self._log_total = torch.logaddexp(self._log_total, log_total)
        self._logits, self._tokens = most_probable(
            torch.cat((self._logits, found[0]), dim=-1),
            torch.cat((self._tokens, found[1]), dim=-1),
            self.k,
        )

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [rows, k] fp32 and tokens [rows, k] int64, the most probable first, with fewer
        columns if there are fewer tokens; and the logsumexp [rows, 1] fp32 over all tiles."""
        assert self._logits is not None and self._tokens is not None, "no tile has been added"
        assert self._log_total is not None
        return self._logits, self._tokens, self._log_total


def most_probable(
    logits: torch.Tensor,  # [rows, n] fp32
    tokens: torch.Tensor,  # [rows, n] int64
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    top = logits.topk(min(k, logits.shape[1]), dim=-1)
    return top.values, tokens.gather(-1, top.indices)
