"""Computes the expected embeddings that the next step's self-conditioning reads, exact unless the
server is told otherwise.

`self_conditioning_tolerance` leaves out parts of the vocabulary that hold next to no probability;
`self_conditioning_top_k` leaves out all but a few tokens, and the log says how much that was.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from vllm_dllm.denoise.expected_embedding import ExpectedEmbedding, TopTokens, top_k_tokens
from vllm_dllm.denoise.vocab_stream import BLOCK

if TYPE_CHECKING:
    from vllm_dllm.denoise.expected_embedding_triton import FusedExpectedEmbedding

logger = init_logger(__name__)

LOG_SECONDS = 10.0


class SoftEmbedding:
    """Computes the expected embeddings of rows of logits: exactly, within a tolerance, or over the
    most probable tokens alone."""

    def __init__(
        self,
        model: Any,  # the served model, see `models.vocabulary`
        tolerance: float = 0.0,  # probability that may be left out of a row
        top_k: int | None = None,  # how many tokens are not left out; None: all
    ) -> None:
        self.model, self.tolerance, self.top_k = model, tolerance, top_k
        self.dropped: DroppedMass | None = None
        if top_k is not None and model.vocabulary_shard()[0] == 0:  # one rank's log is enough
            self.dropped = DroppedMass(top_k)

    def embed_rows(
        self,
        scaled: torch.Tensor,  # [rows, V] fp32, temperature-scaled
        probs: torch.Tensor,  # [rows, V] fp32, their softmax
    ) -> torch.Tensor:
        """Returns expected embeddings of rows held whole, [rows, H] in the model's dtype."""
        if self.top_k is None:
            return self.model.soft_embeddings(scaled, probs)
        top = probs.topk(min(self.top_k, probs.shape[1]), dim=-1)
        return self.embed_tokens(top.indices, top.values)

    def embed_tokens(
        self,
        tokens: torch.Tensor,  # [rows, k] int64
        probs: torch.Tensor,  # [rows, k] fp32
    ) -> torch.Tensor:
        """Returns expected embeddings over the given tokens alone, [rows, H] in the model's dtype.
        Their probabilities are scaled to a sum of 1."""
        kept = probs.sum(dim=-1, keepdim=True)
        if self.dropped is not None:
            self.dropped.count_rows(1 - kept)
        return self.model.mix_embeddings(tokens, probs / kept)

    def start_rows(
        self,
        hidden: torch.Tensor,  # [rows, H]
        temperature: torch.Tensor,  # [rows, 1] fp32
        guess: torch.Tensor | None,  # [rows] int64, the step before's best guess; < 0: none
    ) -> "ExpectedEmbedding | FusedExpectedEmbedding | TopTokens":
        """Returns an accumulator for the expected embeddings of these rows, whose logits come tile
        by tile, for `finish_rows`."""
        first_token, weight = self.model.vocabulary_shard()
        if self.top_k is not None:
            return TopTokens(self.top_k, first_token)
        floor = None
        if self.tolerance and guess is not None:
            floor = self.model.token_logits(hidden, guess) / temperature.squeeze(-1)
        rows, hidden_size = hidden.shape
        if hidden.is_cuda and hidden.dtype == weight.dtype and not self.tolerance:
            from vllm_dllm.denoise.expected_embedding_triton import FusedExpectedEmbedding

            return FusedExpectedEmbedding(rows, len(weight), hidden.device)
        num_blocks = -(-self.model.config.vocab_size // BLOCK)
        return ExpectedEmbedding(
            rows, hidden_size, hidden.device, self.tolerance, num_blocks, floor
        )

    def finish_rows(
        self, running: "ExpectedEmbedding | FusedExpectedEmbedding | TopTokens"
    ) -> torch.Tensor:
        """Returns [rows, H] in the model's dtype, over all ranks' vocabulary, when `running` has
        all tiles of this rank's. All ranks must call it."""
        if not isinstance(running, TopTokens):
            return self.model.join_soft_embeddings(*running.result())
        logits, tokens, log_total = running.result()
        logits, tokens = self.model.gather_shards((logits, tokens))
        (log_totals,) = self.model.gather_shards((log_total,))
        logits, tokens = top_k_tokens(logits, tokens, running.k)
        return self.embed_tokens(tokens, (logits - log_totals.logsumexp(-1, True)).exp())


class DroppedMass:
    """Counts the probability that is left out, and logs it every `LOG_SECONDS`. Waits for the
    device only to log."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._parts: torch.Tensor | None = None  # [3] fp32: sum, largest, rows
        self._logged = time.monotonic()

    def count_rows(self, dropped: torch.Tensor) -> None:
        """Counts the probability left out of rows, `dropped` [rows, 1] fp32. Logs if it is time."""
        if self._parts is None:
            self._parts = torch.zeros(3, device=dropped.device)
        total, largest, rows = self._parts
        total += dropped.sum()
        torch.maximum(largest, dropped.amax(), out=largest)
        rows += len(dropped)
        if time.monotonic() - self._logged >= LOG_SECONDS:
            total, largest, rows = self._parts.tolist()  # waits for the device
            logger.info(
                "Self-conditioning on the %d most probable tokens left out %.4f%% of the "
                "probability on average, and at most %.2f%% (%d predictions).",
                *(self.top_k, 100 * total / rows, 100 * largest, rows),
            )
            self._parts.zero_()
            self._logged = time.monotonic()
