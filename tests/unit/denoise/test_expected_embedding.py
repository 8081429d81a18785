"""The expected embedding from vocabulary tiles: whole, without the negligible, of top tokens."""

import pytest
import torch

from tests import tolerances
from vllm_dllm.denoise.expected_embedding import ExpectedEmbedding, TopTokens
from vllm_dllm.denoise.vocab_stream import BLOCK, VocabBlocks, read_blocks

pytestmark = pytest.mark.numerics

V, H = 3 * BLOCK + 100, 8
NUM_BLOCKS = 4


def random_logits(rows: int, sharpness: float = 5.0) -> torch.Tensor:
    """Up to five times `sharpness`."""
    generator = torch.Generator().manual_seed(1)
    return sharpness * torch.randn(rows, V, generator=generator)


def expected_embedding(
    logits: torch.Tensor, tile: int, embeddings: torch.Tensor, **options: object
) -> torch.Tensor:
    """With tiles of `tile` tokens."""
    uniform = torch.rand(len(logits), dtype=torch.float64)
    running = ExpectedEmbedding(len(logits), H, logits.device, **options)
    for first in range(0, logits.shape[1], tile):
        piece = logits[:, first : first + tile]
        running.add_tile(
            piece, *read_blocks(piece, uniform, first), embeddings[first : first + tile]
        )
    total, weight, _ = running.result()
    return total / weight[:, None]


def assert_expected(ours: torch.Tensor, logits: torch.Tensor, embeddings: torch.Tensor) -> None:
    """`ours` is softmax(logits) @ embeddings."""
    probs, embeddings = logits.double().softmax(-1), embeddings.double()
    share = tolerances.softmax(logits.shape[1], logits.abs().max().item())
    tolerances.assert_within(ours, probs @ embeddings, share * (probs @ embeddings.abs()))


@pytest.mark.parametrize("tile", [BLOCK, 4 * BLOCK])
def test_expected_embedding(tile: int) -> None:
    logits, embeddings = random_logits(20), torch.randn(V, H)
    assert_expected(expected_embedding(logits, tile, embeddings), logits, embeddings)


def test_expected_embedding_in_bf16_rounds_as_the_reference() -> None:
    logits, embeddings = random_logits(20, 3.0), torch.randn(V, H).bfloat16()
    ours = expected_embedding(logits, BLOCK, embeddings)
    probs = logits.bfloat16().softmax(-1, dtype=torch.float32).bfloat16()
    reference = probs.double() @ embeddings.double()
    exact = logits.double().softmax(-1) @ embeddings.double()
    error = (ours.double() - reference).abs().max()
    assert error < 0.5 * (reference - exact).abs().max()
    # Both round their weights, which stand to different maxima.
    share = 2 * tolerances.unit_roundoff(torch.bfloat16) + tolerances.softmax(V, 15.0)
    magnitudes = probs.double() @ embeddings.double().abs()
    tolerances.assert_within(ours, reference, share * magnitudes)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3], ids=["exact", "within"])
@pytest.mark.parametrize("temperature", [1e-3, 5e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_temperatures(dtype: torch.dtype, temperature: float, tolerance: float) -> None:
    """Rounding moves logits of 30 / T by more than an exponential bears; fp16 ends before them."""
    logits = 30 * (random_logits(200, 1.0) / 3).tanh() / temperature
    embeddings = torch.randn(V, H).to(dtype)
    options = {"tolerance": tolerance, "num_blocks": NUM_BLOCKS, "floor": logits.amax(-1)}
    ours = expected_embedding(logits, BLOCK, embeddings, **options if tolerance else {})
    rounded = logits.clamp(-65504, 65504) if dtype == torch.float16 else logits
    probs, exact = rounded.to(dtype).double().softmax(-1), embeddings.double()
    share = 2 * tolerances.unit_roundoff(dtype) + tolerances.softmax(V, 0) + 2 * tolerance
    tolerances.assert_within(ours, probs @ exact, share * exact.abs().amax())


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What each tile of this test says is needed, [rows, B] bool."""
    from vllm_dllm.denoise import expected_embedding as module

    found: list[torch.Tensor] = []
    add_needed_ = module.add_needed_

    def add(*args: torch.Tensor) -> None:
        found.append(args[4])
        add_needed_(*args)

    monkeypatch.setattr(module, "add_needed_", add)
    return found


def left_out(
    shares: torch.Tensor,  # [rows] fp64, probability of each block but the first
    temperature: float,
    dtype: torch.dtype,
    needed: list[torch.Tensor],
) -> torch.Tensor:
    """Probability [rows] that rows of one large block and three small ones miss at tolerance 0.05.
    All logits of a block are alike; they are rounded like an LM head's output of this type."""
    rows, V = len(shares), 4 * BLOCK
    probs = torch.stack((1 - 3 * shares, shares, shares, shares), dim=1) / BLOCK
    exact = probs.log() + 20.0 / temperature
    scaled = (exact * temperature).to(dtype).float() / temperature
    logits = scaled[:, :, None].expand(rows, 4, BLOCK).reshape(rows, V)
    floor = exact[:, 0].float()
    options = {"tolerance": 0.05, "num_blocks": 4, "floor": floor}
    needed.clear()
    expected_embedding(logits, BLOCK, torch.zeros(V, H, dtype=dtype), **options)
    own = logits.double().softmax(-1).view(rows, 4, BLOCK).sum(-1)
    return (own * ~torch.cat(needed, dim=1)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [0.8, 0.1, 0.02])
def test_what_a_tolerance_leaves_out_is_within_it(
    temperature: float, dtype: torch.dtype, needed: list[torch.Tensor]
) -> None:
    """Blocks just below what may be left out, whatever that is; nearly half of it is used."""
    shares = torch.logspace(-6, -0.7, 400, dtype=torch.float64)
    found = left_out(shares, temperature, dtype, needed)
    assert found.max() <= 0.05
    if dtype == torch.float32:
        assert found.max() > 0.45 * 0.05 * 3 / 4


def test_decided_rows_need_one_block(needed: list[torch.Tensor]) -> None:
    """Whichever block their token is in: the floor, what the step before took for best, tells."""
    logits, rows = random_logits(60, 1.0), torch.arange(60)
    best = torch.randint(0, V, (60,))
    logits[rows, best] = 30.0
    options = {"tolerance": 1e-3, "num_blocks": NUM_BLOCKS, "floor": logits[rows, best]}
    embeddings = torch.randn(V, H)
    ours = expected_embedding(logits, BLOCK, embeddings, **options)
    found = torch.cat(needed, dim=1)
    assert torch.equal(found, best[:, None] // BLOCK == torch.arange(NUM_BLOCKS))
    left = V * (logits[rows, best] - logits.topk(2).values[:, 1]).neg().exp()  # for all others
    assert left.max() < tolerances.U, "the others would be seen"
    torch.testing.assert_close(ours, embeddings[best], **tolerances.short_formula())


def test_no_block_of_a_flat_row_is_left_out(needed: list[torch.Tensor]) -> None:
    logits, embeddings = torch.zeros(5, V), torch.randn(V, H)
    options = {"tolerance": 0.1, "num_blocks": NUM_BLOCKS}
    ours = expected_embedding(logits, BLOCK, embeddings, **options)
    assert torch.cat(needed, dim=1).all()
    assert_expected(ours, logits, embeddings)


@pytest.mark.parametrize("k", [1, 7, 2000])
@pytest.mark.parametrize("tile", [BLOCK, 4 * BLOCK])
def test_top_tokens(tile: int, k: int) -> None:
    logits, running, unread = random_logits(20), TopTokens(k, 0), torch.empty(0)
    no_blocks = VocabBlocks(*[unread] * 5)
    for first in range(0, V, tile):
        running.add_tile(logits[:, first : first + tile], no_blocks, None, unread)
    values, tokens, log_total = running.result()
    expected = logits.topk(k, dim=-1)
    # Of equal logits either may come first, or be left out.
    assert torch.equal(values, expected.values) and torch.equal(logits.gather(1, tokens), values)
    assert all(len(set(row)) == k for row in tokens.tolist())
    exact = logits.double().logsumexp(-1, keepdim=True)
    allowed = tolerances.softmax(V, logits.abs().max().item())
    torch.testing.assert_close(log_total.double(), exact, rtol=0, atol=allowed)
