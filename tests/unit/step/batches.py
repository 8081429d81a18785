"""Canvases of a step without an engine, their rules, and a model's vocabulary."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_dllm.denoise.logit_rules import CanvasRules, LogitRules
from vllm_dllm.denoise.rules import NO_TOKEN
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from vllm_dllm.step.batch import CanvasBatch
from vllm_dllm.step.logits.filters import RuleContext


def input_batch(
    canvas_rows: Sequence[int],
    slots: Sequence[int] | None = None,
    prompt_rows: Sequence[int] | None = None,
) -> Any:
    """vLLM's, as far as canvases go: each is the last rows of its request."""
    rows = np.array(canvas_rows) + np.array(prompt_rows or [0] * len(canvas_rows))
    return SimpleNamespace(
        num_reqs=len(rows),
        num_draft_tokens=sum(canvas_rows),
        cu_num_logits_np=np.cumsum([0, *canvas_rows]),
        query_start_loc_np=np.cumsum([0, *rows]),
        idx_mapping_np=np.arange(len(rows)) if slots is None else np.array(slots),
    )


def canvas_batch(
    canvas_length: int, *of_batch: Any, device: str | torch.device = "cpu"
) -> CanvasBatch:
    return CanvasBatch.build(input_batch(*of_batch), canvas_length, torch.device(device))


class Model(DiffusionGemmaForBlockDiffusion):
    """The part that reads the vocabulary."""

    def __init__(self, embeddings: torch.Tensor, head: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)
        vocab_size, hidden_size = embeddings.shape
        self.config = SimpleNamespace(
            final_logit_softcapping=30.0, vocab_size=vocab_size, tie_word_embeddings=head is None
        )
        self.lm_head = SimpleNamespace(weight=embeddings if head is None else head)
        self.model = nn.Module()
        self.model.normalizer = hidden_size**0.5
        shard = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=vocab_size)
        self.model.embed_tokens = SimpleNamespace(weight=embeddings, shard_indices=shard)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.cap_logits(hidden @ self.lm_head.weight.T)


class Filters:
    """The same rules, or truncation, for these canvases."""

    def __init__(
        self,
        rules: LogitRules | None = None,
        top_p: float | None = None,
        canvases: Sequence[int] = (1,),
    ) -> None:
        self.rules, self.top_p, self.canvases = rules, top_p, list(canvases)

    def canvases_with_rules(self, batch: CanvasBatch) -> list[int]:
        return [] if self.rules is None else self.canvases

    def needs_whole_rows(self, batch: CanvasBatch) -> list[int]:
        return [] if self.rules is None and self.top_p is None else self.canvases

    def rules_of_request(self, i: int, batch: CanvasBatch) -> LogitRules:
        return self.rules or LogitRules()

    def rules_of_canvas(self, i: int, context: RuleContext) -> CanvasRules:
        rules, before = self.rules_of_request(i, context.batch), torch.full((2,), NO_TOKEN)
        return CanvasRules(rules, context.starts[i], context.guesses[i], before)

    def truncate(self, scaled: torch.Tensor, batch: CanvasBatch, rows: slice) -> torch.Tensor:
        if self.top_p is None:
            return scaled
        n = len(scaled)
        return apply_top_k_top_p(scaled, torch.full((n,), 50), torch.full((n,), self.top_p)).clamp(
            -1e20
        )
