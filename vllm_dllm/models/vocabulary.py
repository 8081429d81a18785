"""A model's vocabulary as the sampler reads it: logits of single tokens and expected embeddings. It
may be sharded over the tensor-parallel ranks.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

from vllm_dllm.denoise.impossible import FP16_RANGE, MASKED_LOGIT
from vllm_dllm.denoise.vocab_stream import BLOCK, STREAMED_FROM

logger = init_logger(__name__)


def shards_begin_at_blocks(vocab_size: int, num_ranks: int) -> bool:
    """Returns whether vLLM's shards for the tensor-parallel ranks begin at multiples of `BLOCK`, so
    that draws do not depend on the number of ranks. The last block may be incomplete."""
    return num_ranks == 1 or pad_vocab_size(vocab_size) // num_ranks % BLOCK == 0


def no_logits(hidden_states: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns logits [0, V] fp32, of a step without canvases. vLLM's kernel for small layers, which
    processors with AMX run in bf16, would divide by the number of rows and end the process."""
    return hidden_states.new_empty(0, vocab_size, dtype=torch.float32)


class Vocabulary:
    """Reads the vocabulary of a model that has Gemma's names: `model.embed_tokens`,
    `model.normalizer`, `lm_head`, `config`."""

    config: Any
    model: Any
    lm_head: Any

    @property
    def softcap(self) -> float | None:
        """Returns the bound of the logits' soft cap. None: they are not capped."""
        return self.config.final_logit_softcapping

    def cap_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns a soft-capped fp32 copy of the LM head's output [rows, V]."""
        capped, cap = logits.to(torch.float32, copy=True), self.softcap
        return capped if cap is None else capped.div_(cap).tanh_().mul_(cap)

    @cached_property
    def streams_vocabulary(self) -> bool:
        """Returns whether the sampler may read the vocabulary tile by tile. Logs why not if the
        vocabulary is large."""
        if self.config.vocab_size < STREAMED_FROM:
            return False
        obstacle = self._obstacle_to_streaming()
        if obstacle is not None:
            logger.warning(
                "A step holds the logits of all its rows at once, which `sampling_memory_mib` does "
                "not bound: %s.",
                obstacle,
            )
        return obstacle is None

    def _obstacle_to_streaming(self) -> str | None:
        """Returns why a large vocabulary cannot be read tile by tile. Returns None if it can."""
        for layer in (self.model.embed_tokens, self.lm_head):
            weight = getattr(layer, "weight", None)  # packed ones have other names
            # The types in which products with the embeddings are computed.
            if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return "the embeddings or the LM head are quantised"
        ranks = get_tp_group().world_size
        if not shards_begin_at_blocks(self.config.vocab_size, ranks):
            return (
                f"{ranks} tensor-parallel ranks share {self.config.vocab_size} tokens in shards "
                f"that are no multiple of {BLOCK}"
            )
        return None

    def vocabulary_shard(self) -> tuple[int, torch.Tensor]:
        """Returns the first token of this rank's vocabulary, and the embeddings [n, H] from it
        on."""
        shard = self.model.embed_tokens.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        return first, self.model.embed_tokens.weight[: end - first]

    def lm_head_shard(self) -> torch.Tensor:
        """Returns the LM head's weights [n, H], a view in the model's dtype, of the tokens of
        `vocabulary_shard`. With tied embeddings these are the embeddings. The LM head must not be
        quantised (see `streams_vocabulary`): a packed one has no `weight`."""
        _, embeddings = self.vocabulary_shard()
        if getattr(self.config, "tie_word_embeddings", True):  # as transformers has it
            return embeddings
        return self.lm_head.weight[: len(embeddings)]

    def gather_shards(self, columns: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns columns of all ranks' shards, in the order of their tokens: each [rows, B]
        becomes [rows, B of all ranks]. All ranks must call it."""
        columns, group = tuple(columns), get_tp_group()
        if group.world_size == 1:
            return columns
        # In one message; fp32 represents every token below 2^24 exactly.
        shards = group.all_gather(torch.stack([c.float() for c in columns], dim=-1), dim=1)
        return [c.to(own.dtype) for c, own in zip(shards.unbind(-1), columns, strict=True)]

    def join_soft_embeddings(
        self,
        total: torch.Tensor,  # [rows, H] fp32, this rank's sum of exp(logit - maximum) * embedding
        weight: torch.Tensor,  # [rows] fp32, of exp(logit - maximum)
        maximum: torch.Tensor,  # [rows] fp32
    ) -> torch.Tensor:
        """Returns the result of `soft_embeddings` [rows, H] from sums over each rank's shard. All
        ranks must call it."""
        group = get_tp_group()
        if group.world_size > 1:
            maxima, weights = self.gather_shards((maximum[:, None], weight[:, None]))
            top = maxima.amax(dim=1)
            weight = (weights * (maxima - top[:, None]).exp()).sum(dim=1)
            # The weight is no column of it: FlashInfer only adds rows of whole 16 bytes.
            total = group.all_reduce(total * (maximum - top).exp()[:, None])
        soft = total / weight[:, None]
        return soft.to(self.model.embed_tokens.weight.dtype) * self.model.normalizer

    def token_logits(
        self,
        hidden: torch.Tensor,  # [rows, H]
        tokens: torch.Tensor,  # [rows] int64
    ) -> torch.Tensor:
        """Returns the soft-capped logit [rows] fp32 of each row's token. Returns MASKED_LOGIT for a
        token < 0. All ranks must call it."""
        place, is_here = self._find_in_shard(tokens)
        of_tokens = self.lm_head_shard()[place]
        logits = self.cap_logits((hidden.float() * of_tokens.float()).sum(dim=-1))
        logits.masked_fill_(~is_here, MASKED_LOGIT)
        group = get_tp_group()
        return logits if group.world_size == 1 else group.all_gather(logits[:, None]).amax(dim=1)

    def mix_embeddings(
        self,
        tokens: torch.Tensor,  # [rows, k] int64
        probs: torch.Tensor,  # [rows, k] fp32
    ) -> torch.Tensor:
        """Returns the result of `soft_embeddings` [rows, H] if all other tokens have probability 0.
        All ranks must call it."""
        _, weight = self.vocabulary_shard()
        place, is_here = self._find_in_shard(tokens)
        shares = probs.masked_fill(~is_here, 0.0).to(weight.dtype)
        return self._sum_shards(
            F.embedding_bag(place, weight, per_sample_weights=shares, mode="sum")
        )

    def _find_in_shard(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of tokens in this rank's shard, and whether they are there (bool). Any
        row stands for a token that is not. Both have the shape of `tokens`."""
        first, weight = self.vocabulary_shard()
        place = tokens - first
        return place.clamp(0, len(weight) - 1), (place >= 0) & (place < len(weight))

    def _sum_shards(self, soft: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' embeddings `soft` [rows, H], scaled as those of tokens."""
        group = get_tp_group()
        if group.world_size > 1:
            soft = group.all_reduce(soft)
        return soft * self.model.normalizer

    def soft_embeddings(
        self,
        logits: torch.Tensor,  # [rows, V] fp32, divided by the step's temperature
        probs: torch.Tensor,  # [rows, V] fp32, their softmax
    ) -> torch.Tensor:
        """Returns `softmax(logits) @ E * sqrt(H)` [rows, H] in the model's dtype, which the next
        step's self-conditioning reads. The reference rounds the logits to the model's type, takes
        the softmax in fp32 and rounds again. The vocabulary may be sharded over the tensor-parallel
        ranks: then all ranks must call it."""
        first, weight = self.vocabulary_shard()
        if weight.dtype != logits.dtype:
            if weight.dtype == torch.float16:
                logits = logits.clamp(*FP16_RANGE)
            probs = logits.to(weight.dtype).softmax(dim=-1, dtype=torch.float32)
        probs = probs[:, first : first + len(weight)]
        return self._sum_shards(torch.matmul(probs.to(weight.dtype), weight))
