"""A model's vocabulary as the sampler reads it: which part of it is here, logits of single tokens,
expected embeddings. It may be sharded over the tensor-parallel ranks.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from vllm.distributed import get_tp_group

from vllm_dllm.denoise.logit_rules import MASKED_LOGIT
from vllm_dllm.denoise.vocab_stream import BLOCK, STREAMED_FROM


class Vocabulary:
    """Of a model with Gemma's names: `model.embed_tokens`, `model.normalizer`, `config`."""

    config: Any
    model: Any

    @property
    def softcap(self) -> float | None:
        return self.config.final_logit_softcapping

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """The LM head's output, soft-capped in fp32; a copy."""
        capped, cap = logits.to(torch.float32, copy=True), self.softcap
        return capped if cap is None else capped.div_(cap).tanh_().mul_(cap)

    @cached_property
    def streams_vocabulary(self) -> bool:
        """Whether the sampler may read the vocabulary tile by tile: a large one, whose output
        weights are the embeddings, and whose shards begin at blocks."""
        _, weight = self.vocabulary_shard()
        return (
            self.config.vocab_size >= STREAMED_FROM
            and self.config.tie_word_embeddings
            and weight.is_floating_point()
            and weight.dtype != torch.float8_e4m3fn
            and self.model.embed_tokens.num_embeddings_per_partition % BLOCK == 0
        )

    def vocabulary_shard(self) -> tuple[int, torch.Tensor]:
        """This rank's first token, and the embeddings [n, H] from there on."""
        shard = self.model.embed_tokens.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        return first, self.model.embed_tokens.weight[: end - first]

    def gather_shards(self, columns: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each [rows, B] of this rank's vocabulary -> [rows, B of all], in the tokens' order."""
        columns, group = tuple(columns), get_tp_group()
        if group.world_size == 1:
            return columns
        # In one piece; fp32 holds every token below 2^24.
        shards = group.all_gather(torch.stack([c.float() for c in columns], dim=-1), dim=1)
        return [c.to(own.dtype) for c, own in zip(shards.unbind(-1), columns, strict=True)]

    def join_soft_embeddings(
        self,
        total: torch.Tensor,  # [rows, H] fp32, this rank's sum of exp(logit - maximum) * embedding
        weight: torch.Tensor,  # [rows] fp32, of exp(logit - maximum)
        maximum: torch.Tensor,  # [rows] fp32
    ) -> torch.Tensor:
        """What `soft_embeddings` gives, from sums over shards of the vocabulary."""
        group = get_tp_group()
        if group.world_size > 1:
            top = group.all_gather(maximum[:, None], dim=1).amax(dim=1)
            scale = (maximum - top).exp()[:, None]
            joined = group.all_reduce(torch.cat((total, weight[:, None]), dim=1) * scale)
            total, weight = joined[:, :-1], joined[:, -1]
        soft = total / weight[:, None]
        return soft.to(self.model.embed_tokens.weight.dtype) * self.model.normalizer

    def logits_of(
        self,
        hidden: torch.Tensor,  # [rows, H]
        tokens: torch.Tensor,  # [rows] int64
    ) -> torch.Tensor:
        """Each row's soft-capped logit [rows] fp32 of its own token; far down where that is < 0."""
        first, weight = self.vocabulary_shard()
        place = tokens - first
        is_here = (place >= 0) & (place < len(weight))
        embeddings = weight[place.clamp(0, len(weight) - 1)]
        logits = self.cap((hidden.float() * embeddings.float()).sum(dim=-1))
        logits.masked_fill_(~is_here, MASKED_LOGIT)
        group = get_tp_group()
        return logits if group.world_size == 1 else group.all_gather(logits[:, None]).amax(dim=1)

    def embeddings_of(
        self,
        tokens: torch.Tensor,  # [rows, k] int64
        probs: torch.Tensor,  # [rows, k] fp32
    ) -> torch.Tensor:
        """What `soft_embeddings` gives [rows, H] where all other tokens have probability 0."""
        first, weight = self.vocabulary_shard()
        place = tokens - first
        is_here = (place >= 0) & (place < len(weight))
        soft = F.embedding_bag(
            place.clamp(0, len(weight) - 1),
            weight,
            per_sample_weights=probs.masked_fill(~is_here, 0.0).to(weight.dtype),
            mode="sum",
        )
        group = get_tp_group()
        if group.world_size > 1:
            soft = group.all_reduce(soft)
        return soft * self.model.normalizer

    def soft_embeddings(
        self,
        logits: torch.Tensor,  # [rows, V] fp32, divided by the step's temperature
        probs: torch.Tensor,  # [rows, V] fp32, their softmax
    ) -> torch.Tensor:
        """`softmax(logits) @ E * sqrt(H)` [rows, H], the next step's self-conditioning input.

        The reference rounds the logits to the model's type, takes the softmax in fp32 and rounds
        again. The vocabulary may be sharded over the tensor-parallel ranks.
        """
        weight = self.model.embed_tokens.weight
        if weight.dtype != logits.dtype:
            probs = logits.to(weight.dtype).softmax(dim=-1, dtype=torch.float32)
        shard = self.model.embed_tokens.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        soft = torch.matmul(probs[:, first:end].to(weight.dtype), weight[: end - first])
        group = get_tp_group()
        if group.world_size > 1:
            soft = group.all_reduce(soft)
        return soft * self.model.normalizer
