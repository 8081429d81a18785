"""A vocabulary whose shards are on several ranks, threads here: the results are those of one, and
of each row no more is exchanged than a few numbers a block."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests import tolerances
from tests.processes import HANGS_S
from tests.unit.step.batches import Model
from tests.unit.step.test_logits import LARGEST, LENGTHS, ROWS, H, make
from tests.unit.step.test_logits import read as read_rows
from vllm_dllm.denoise.vocab_stream import BLOCK
from vllm_dllm.models import vocabulary
from vllm_dllm.step.logits.canvas_logits import ReadRows
from vllm_dllm.step.logits.streamed_logits import StreamedLogits

pytestmark = pytest.mark.numerics

V, RANKS = 20 * BLOCK, 2


class Group:
    """vLLM's GroupCoordinator, among threads."""

    world_size = RANKS

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=HANGS_S)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * RANKS
        self.numbers_a_row: list[int] = []
        self.rank = threading.local()

    def _exchange(
        self, tensor: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.parts[self.rank.index] = tensor
        self.numbers_a_row.append(tensor[0].numel())
        self.barrier.wait()
        joined = join(self.parts)
        self.barrier.wait()
        return joined

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.cat(parts, dim=dim))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As FlashInfer's kernel for NVSwitch, which vLLM calls for fp32, too."""
        assert tensor.dim() == 2 and tensor.is_contiguous()
        assert tensor.shape[1] * tensor.element_size() % 16 == 0, "the kernel raises"
        return self._exchange(tensor, lambda parts: torch.stack(parts).sum(0))


def shard_of(embeddings: torch.Tensor, rank: int) -> Model:
    model, width = Model(embeddings), V // RANKS
    shard = slice(rank * width, (rank + 1) * width)
    layer = model.model.embed_tokens
    model.lm_head.weight = layer.weight = embeddings[shard]
    layer.shard_indices = SimpleNamespace(
        org_vocab_start_index=shard.start, org_vocab_end_index=shard.stop
    )
    return model


def read(model: Model, hidden: torch.Tensor, guesses: torch.Tensor, **soft: float) -> ReadRows:
    return read_rows(make(StreamedLogits, hidden, model, None, 1 << 30, guesses, **soft))


@pytest.mark.parametrize(
    "soft", [{}, {"tolerance": 0.02}, {"top_k": 30}], ids=["exact", "tolerance", "top_k"]
)
def test_two_ranks_are_one(monkeypatch: pytest.MonkeyPatch, soft: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = 2 * torch.randn(V, H, generator=generator)
    hidden = torch.randn(ROWS, H, generator=generator)
    guesses = torch.randint(V, (len(LENGTHS), max(LENGTHS)), generator=generator)
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    stats, embedding = read(Model(embeddings), hidden, guesses, **soft)

    group = Group()
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: group)

    def on_rank(rank: int) -> ReadRows:
        group.rank.index = rank
        return read(shard_of(embeddings, rank), hidden, guesses, **soft)

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(on_rank, range(RANKS)))
        for own_stats, own_embedding in results:
            assert torch.equal(own_embedding, results[0][1]), "ranks go on alike"
            assert torch.equal(own_stats.best_guess, stats.best_guess)
            assert torch.equal(own_stats.candidate, stats.candidate)
            allowed = 2 * tolerances.entropy(V, LARGEST, spread=math.log(V))
            tolerances.assert_within(own_stats.entropy_nats, stats.entropy_nats, allowed)
            # Which blocks a tolerance leaves out depends on those seen before.
            longest = embeddings.norm(dim=-1).max() * H**0.5
            off = (own_embedding - embedding).norm(dim=-1).max() / longest
            assert off <= max(soft.get("tolerance", 0.0), 2 * tolerances.softmax(V, LARGEST))
    assert max(group.numbers_a_row) <= max(5 * V // BLOCK // RANKS, 2 * 30)
