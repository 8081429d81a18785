"""Whether a model's vocabulary is read tile by tile, and what ranks exchange that share it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests import tolerances
from tests.unit.models.building import build
from vllm_dllm.models import vocabulary
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from vllm_dllm.models.masked import MaskedModel
from vllm_dllm.models.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def said(logged: Callable[..., list[str]]) -> list[str]:
    return logged(vocabulary)


def model_of(checkpoint: Path, vocab_size: int, is_tied: bool = True):
    """Without its weights' values."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = is_tied
    config["text_config"] |= {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    path.write_text(json.dumps(config))
    return build(checkpoint, "meta")[0]


@pytest.mark.parametrize(
    "vocab_size", [262_208, 262_144, 151_936, 128_256, 50_257, 32_000, 20_000, 16_384]
)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_every_large_vocabulary_is_streamed(
    checkpoint: Path, said: list[str], vocab_size: int, is_tied: bool
) -> None:
    model = model_of(checkpoint, vocab_size, is_tied)
    assert model.streams_vocabulary and not said
    assert len(model.lm_head_shard()) == vocab_size


def test_a_small_one_is_not(checkpoint: Path, said: list[str]) -> None:
    assert not model_of(checkpoint, 16_383).streams_vocabulary and not said


@pytest.mark.parametrize(("vocab_size", "streams"), [(262_144, True), (262_208, False)])
def test_shards_begin_at_blocks_or_the_log_says_so(
    checkpoint: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    streams: bool,
) -> None:
    model = model_of(checkpoint, vocab_size)
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    assert model.streams_vocabulary == streams
    if not streams:
        (line,) = said
        assert "`sampling_memory_mib` does not bound: 2 tensor-parallel ranks share 262208" in line


@dataclass
class Rank:
    """One of several ranks, which run in turns: what it sends is kept, and what it gets is what all
    sent in the turn before."""

    world_size: int
    sent: list[torch.Tensor]
    heard: list[list[torch.Tensor]]

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent.append(tensor)
        turn = len(self.sent) - 1
        return [others[turn] if turn < len(others) else tensor for others in self.heard]

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As FlashInfer's kernel for NVSwitch, which vLLM calls for fp32, too."""
        assert tensor.dim() == 2 and tensor.is_contiguous()
        assert tensor.shape[1] * tensor.element_size() % 16 == 0, "the kernel raises"
        return sum(self._exchange(tensor))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_join_their_shares_of_soft_embeddings(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(ranks)
    logits = 9 * torch.randn(3, 64, generator=generator)
    embeddings = torch.randn(64, 8, generator=generator)
    model = SimpleNamespace(embed_tokens=SimpleNamespace(weight=embeddings), normalizer=2.0)
    of_rank = SimpleNamespace(model=model)
    of_rank.gather_shards = partial(Vocabulary.gather_shards, of_rank)
    shares = []
    for shard, rows in zip(logits.chunk(ranks, 1), embeddings.chunk(ranks), strict=True):
        maximum = shard.amax(1)
        weights = (shard - maximum[:, None]).exp()
        shares.append((weights @ rows, weights.sum(1), maximum))
    heard: list[list[torch.Tensor]] = [[] for _ in shares]
    for _ in range(3):  # two exchanges, and the result
        sent, results = [], []
        for share in shares:
            rank = Rank(ranks, [], heard)
            monkeypatch.setattr(vocabulary, "get_tp_group", lambda rank=rank: rank)
            results.append(Vocabulary.join_soft_embeddings(of_rank, *share))
            sent.append(rank.sent)
        heard = sent
    probs = logits.double().softmax(1)
    error = tolerances.softmax(64, logits.max().item()) + tolerances.total(64)
    for found in results:
        assert torch.equal(found, results[0]), "ranks go on alike"
        tolerances.assert_within(
            found, 2 * probs @ embeddings.double(), 2 * error * probs @ embeddings.double().abs()
        )


@pytest.mark.parametrize("model", [DiffusionGemmaForBlockDiffusion, MaskedModel])
def test_a_step_without_canvases_leaves_the_head_alone(model: type) -> None:
    """Nothing here has a head."""
    of_model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=512), sampler_reads_hidden_states=lambda: False
    )
    logits = model.compute_logits(of_model, torch.zeros(0, 8, dtype=torch.bfloat16))
    assert logits.shape == (0, 512) and logits.dtype is torch.float32
