"""A vocabulary read tile by tile against the same read at once; the fused pass over the LM head's
output against the plain one, in Triton's interpreter where there is no GPU."""

from types import ModuleType

import pytest
import torch
from scipy import stats

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from vllm_dllm.denoise import expected_embedding_triton, vocab_stream_triton
from vllm_dllm.denoise.expected_embedding import add_needed_
from vllm_dllm.denoise.row_stats import RowStats, row_stats
from vllm_dllm.denoise.vocab_stream import _STAGE_BITS, BLOCK, VocabBlocks, join_blocks, read_blocks

pytestmark = pytest.mark.numerics

V = 3 * BLOCK + 100


def random_logits(rows: int, sharpness: float = 5.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return sharpness * torch.randn(rows, V, generator=generator)


def stream(logits: torch.Tensor, uniform: torch.Tensor, tile: int) -> RowStats:
    """Statistics with tiles of `tile` tokens."""
    parts = [
        read_blocks(logits[:, first : first + tile], uniform, first)[0]
        for first in range(0, logits.shape[1], tile)
    ]
    blocks = VocabBlocks(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))
    return join_blocks(blocks, uniform)


@pytest.mark.parametrize("tile", [BLOCK, 2 * BLOCK, 4 * BLOCK])
def test_statistics(tile: int) -> None:
    logits = random_logits(40)
    logits[0], logits[1, :5] = 0.0, 80.0  # all alike; several alike at the top
    logits[2], logits[2, 7] = -1e20, 3.0  # all but one excluded
    uniform = torch.rand(40, dtype=torch.float64)
    ours = stream(logits, uniform, tile)
    expected, _ = row_stats(logits, uniform)
    assert torch.equal(ours.best_guess, expected.best_guess)
    exact = logits.double().log_softmax(-1)
    entropy = -(exact.exp() * exact).sum(-1)
    spread = (-exact.amax(-1) - entropy).abs().max().item()
    allowed = tolerances.entropy(V, largest_logit=25.0, spread=spread)
    for found in (ours, expected):
        tolerances.assert_within(found.entropy_nats, entropy, allowed)
        tolerances.assert_within(found.best_logprob, exact.amax(-1), tolerances.softmax(V, 25.0))
    assert ours.candidate[2] == 7


def test_tiles_and_shards_change_nothing() -> None:
    logits, uniform = random_logits(64, 1.0), torch.rand(64, dtype=torch.float64)
    one, *others = (stream(logits, uniform, tile) for tile in (4 * BLOCK, BLOCK, 2 * BLOCK))
    for other in others:
        for column, same in zip(one, other, strict=True):
            assert torch.equal(column, same)


@pytest.mark.slow
def test_candidates_follow_the_distribution() -> None:
    """The two stages of a draw together: 200,000 draws over four blocks."""
    probs = torch.zeros(V)
    tokens = torch.tensor([3, 900, BLOCK + 5, 2 * BLOCK + 17, V - 1])
    probs[tokens] = torch.tensor([0.1, 0.2, 0.4, 0.05, 0.25])
    draws = 4000
    logits = probs.log().clamp(min=-1e20).expand(draws, -1)
    counts = torch.zeros(V)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
        candidate = stream(logits, uniform, 2 * BLOCK).candidate
        counts += torch.bincount(candidate, minlength=V)
    assert counts[probs == 0].sum() == 0
    expected = probs[tokens].double() * 10 * draws
    found = stats.chisquare(counts[tokens].numpy(), expected.numpy(), sum_check=False)
    assert found.pvalue > tolerances.P_VALUE


def test_a_row_of_nan_in_tiles_points_into_the_vocabulary() -> None:
    logits = torch.full((1, V), torch.nan)
    ours = stream(logits, torch.tensor([0.5], dtype=torch.float64), BLOCK)
    for tokens in (ours.best_guess, ours.candidate):
        assert 0 <= tokens.item() < V


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    if not torch.cuda.is_available():
        interpret_kernels(vocab_stream_triton, expected_embedding_triton)
    return vocab_stream_triton


def inputs(dtype: torch.dtype, width: int, rows: int = 12):
    generator = torch.Generator().manual_seed(0)
    output = (20 * torch.randn(rows, width, generator=generator)).to(dtype)
    output[0] = 1.0  # all alike
    temperature = torch.linspace(0.4, 0.8, rows)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    uniform[1:3] = torch.tensor([0.0, 1 - 2.0**-53])
    return output, temperature, uniform


def read(
    fused: ModuleType,
    output: torch.Tensor,  # overwritten if it is on the device
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    softcap: float | None = None,
    first_token: int = 0,
    tiles: int = 1,  # of the same number of blocks
) -> VocabBlocks:
    """The blocks of all tiles, and those of the tiles as they are read."""
    width = output.shape[1]
    reader = fused.FusedVocabReader(softcap, temperature[:, None], uniform, first_token, width)
    length = width // tiles
    found = [reader.read_tile(output[:, i * length : (i + 1) * length])[1] for i in range(tiles)]
    blocks = reader.blocks()
    for column, pieces in zip(blocks, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), column, rtol=0, atol=0, equal_nan=True)
    return blocks


def scaled(output: torch.Tensor, temperature: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = output.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature[:, None]


def assert_same_draws(
    ours: torch.Tensor,  # [rows, B] tokens of the vocabulary
    expected: torch.Tensor,
    logits: torch.Tensor,  # [rows, Vt]
    uniform: torch.Tensor,  # [rows]
) -> None:
    """A draw next to a boundary of its block's cumulative distribution may fall to its other side,
    and only such a one."""
    draw = (uniform * 2.0**_STAGE_BITS).frac()
    for row, block in (ours != expected).nonzero().tolist():
        probs = logits[row].split(BLOCK)[block].double().softmax(0).cumsum(0)
        first, last = sorted(int(t[row, block]) % BLOCK for t in (ours, expected))
        # Every boundary between the two tokens is where the draw is.
        off = (probs[first:last] - draw[row]).abs().max()
        assert off <= share(logits), f"row {row}, block {block}"


def share(logits: torch.Tensor) -> float:
    """By which a block's sums, each of the two, may be off."""
    return 2 * tolerances.softmax(BLOCK, logits.abs().max().item())


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("width", [2 * BLOCK, BLOCK + 77])
def test_blocks(fused: ModuleType, width: int, dtype: torch.dtype, softcap: float | None) -> None:
    output, temperature, uniform = inputs(dtype, width)
    logits = scaled(output, temperature, softcap)
    expected, _ = read_blocks(logits, uniform, first_token=3 * BLOCK)
    on_device = [tensor.to(DEVICE) for tensor in (output, temperature, uniform)]
    ours = read(fused, *on_device, softcap, 3 * BLOCK)
    assert torch.equal(ours.best.cpu(), expected.best)
    largest = logits.abs().max().item()
    of_logits = tolerances.short_formula(size=largest)
    torch.testing.assert_close(ours.maximum.cpu(), expected.maximum, **of_logits)
    of_sums = tolerances.within(share(logits))
    torch.testing.assert_close(ours.total.cpu(), expected.total, **of_sums)
    # A sum of exp(-x) x, whose x may be off by a share of the largest logit.
    of_sums["atol"] = of_logits["atol"] * expected.total.max().item()
    torch.testing.assert_close(ours.weighted.cpu(), expected.weighted, **of_sums)
    assert_same_draws(ours.candidate.cpu(), expected.candidate, logits, uniform)
    stored = tolerances.one_step(dtype) if dtype == torch.float16 else of_logits
    torch.testing.assert_close(on_device[0].cpu(), logits.to(dtype), **stored)


def test_a_soft_cap_near_0_and_far_from_it(fused: ModuleType) -> None:
    """A GPU's exp and rsqrt are not exact, and most of what is drawn at random is far from 0."""
    near = torch.logspace(-6, 0, BLOCK // 2)
    far = torch.tensor([0.0, 1e4, -1e4, torch.inf, -torch.inf]).repeat(BLOCK)[:BLOCK]
    output = torch.stack((torch.cat((near, -near)), far))
    temperature, uniform = torch.tensor([0.4, 1.0]), torch.tensor([0.3, 0.7], dtype=torch.float64)
    logits = scaled(output, temperature, 30.0)
    on_device = output.to(DEVICE)
    read(fused, on_device, temperature.to(DEVICE), uniform.to(DEVICE), 30.0)
    for found, expected, share in zip(on_device.cpu(), logits, 30 / temperature, strict=True):
        # A GPU's exp is right to 2 ** -22.5, and half of a tanh.
        allowed = tolerances.short_formula() | {"atol": share.item() * 2**-23}
        torch.testing.assert_close(found, expected, **allowed)


def test_excluded_tokens_are_never_drawn(fused: ModuleType) -> None:
    output = torch.full((64, BLOCK), -1e20)
    output[:, [5, 600]] = torch.tensor([0.0, 1.0])
    uniform = torch.linspace(0, 1 - 2.0**-53, 64, dtype=torch.float64) / 2**26 % 1
    found = read(fused, output.to(DEVICE), torch.ones(64, device=DEVICE), uniform.to(DEVICE))
    assert set(found.candidate.flatten().tolist()) == {5, 600}


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_row_of_nan_points_into_the_vocabulary(fused: ModuleType, softcap: float | None) -> None:
    output = torch.full((1, BLOCK + 7), torch.nan, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    found = read(fused, output, one, one.double() / 2, softcap)
    joined = fused.join_blocks(found, one.double() / 2)
    for tokens in (found.best, found.candidate, joined.best_guess, joined.candidate):
        assert (tokens < BLOCK + 7).all()


def test_tiles_change_nothing(fused: ModuleType) -> None:
    """And one canvas' temperature, which may be one number in memory."""
    output, _, uniform = inputs(torch.float32, 4 * BLOCK)
    temperature = torch.tensor([0.7], device=DEVICE).expand(len(output))
    one, other = (
        read(fused, output.to(DEVICE).clone(), temperature, uniform.to(DEVICE), 30.0, tiles=tiles)
        for tiles in (1, 2)
    )
    for column, same in zip(one, other, strict=True):
        assert torch.equal(column, same)
    expected, _ = read_blocks(scaled(output, temperature.cpu(), 30.0), uniform, 0)
    assert torch.equal(one.best.cpu(), expected.best)


@pytest.mark.parametrize("num_blocks", [1, 8, 13])
def test_join_blocks(fused: ModuleType, num_blocks: int) -> None:
    output, temperature, uniform = inputs(torch.float32, num_blocks * BLOCK, rows=40)
    logits = scaled(output, temperature, 30.0)
    logits[3, BLOCK:] = -1e20  # all excluded but a block
    blocks, _ = read_blocks(logits, uniform, 0)
    expected = join_blocks(blocks, uniform)
    on_device = VocabBlocks(*(column.to(DEVICE) for column in blocks))
    ours = fused.join_blocks(on_device, uniform.to(DEVICE))
    assert torch.equal(ours.best_guess.cpu(), expected.best_guess)
    largest = logits.clamp(min=-100).abs().max().item()
    of_rows = tolerances.softmax(num_blocks * BLOCK, largest)
    # Of logits `largest` apart.
    spread = 2 * largest * of_rows
    tolerances.assert_within(ours.entropy_nats.cpu(), expected.entropy_nats, spread)
    tolerances.assert_within(ours.best_logprob.cpu(), expected.best_logprob, spread)
    masses = (blocks.total * (blocks.maximum - blocks.maximum.amax(-1, True)).exp()).double()
    share = masses.cumsum(-1) / masses.sum(-1, keepdim=True)
    for row in (ours.candidate.cpu() != expected.candidate).nonzero().flatten().tolist():
        assert (share[row] - uniform[row]).abs().min() <= of_rows, f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_add_needed(fused: ModuleType, dtype: torch.dtype) -> None:
    """Rows, columns and tokens that fill no tile; blocks that all, some and none of them need."""
    rows, hidden_size, width = 70, 136, 2 * BLOCK + 77
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, width, generator=generator).to(dtype)
    embeddings = torch.randn(width, hidden_size, generator=generator).to(dtype)
    maximum = logits.float().amax(-1)
    needed = torch.rand(rows, 3, generator=generator) < 0.5
    needed[:64, 0], needed[:64, 1], needed[64:, 2] = True, False, False
    sums, totals = torch.randn(rows, hidden_size), torch.rand(rows)
    expected = sums.clone(), totals.clone()
    add_needed_(*expected, logits, maximum, needed, embeddings)
    ours = sums.to(DEVICE), totals.to(DEVICE)
    rest = (t.to(DEVICE) for t in (logits, maximum, needed, embeddings))
    expected_embedding_triton.add_needed_(*ours, *rest)
    # Weights are rounded to `dtype`; some lie on the other side of a tie.
    rounded = 2 * tolerances.unit_roundoff(dtype) if dtype == torch.float16 else 0.0
    share = rounded + tolerances.softmax(width, maximum.max().item())
    magnitudes = sums.abs(), totals.clone()
    add_needed_(*magnitudes, logits, maximum, needed, embeddings.abs())
    for one, other, size in zip(ours, expected, magnitudes, strict=True):
        tolerances.assert_within(one.cpu(), other, share * size.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_expected_embedding(fused: ModuleType, tiles: int, dtype: torch.dtype) -> None:
    """Of tiles whose largest logits rise and fall, in rows that lie apart."""
    rows, hidden_size, width = 12, 8, 5 * BLOCK + 77
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, width + 3, generator=generator)
    logits[:4, 3 * BLOCK :] += 6
    logits = logits.to(dtype)[:, :width]
    embeddings = torch.randn(width, hidden_size, generator=generator).to(dtype)
    running = expected_embedding_triton.FusedExpectedEmbedding(rows, width, torch.device(DEVICE))
    uniform = torch.full((rows,), 0.5, dtype=torch.float64)
    exact_logits, weights = logits.double(), logits.to(DEVICE)
    length = -(-6 // tiles) * BLOCK
    for first in range(0, width, length):
        tile = slice(first, first + length)
        blocks, _ = read_blocks(exact_logits[:, tile].float(), uniform, first)
        on_device = VocabBlocks(*(column.to(DEVICE) for column in blocks))
        running.add_tile(weights[:, tile], on_device, None, embeddings[tile].to(DEVICE))
    total, weight, maximum = (part.cpu().double() for part in running.result())
    assert torch.equal(maximum, exact_logits.amax(-1))
    exact = (exact_logits - maximum[:, None]).exp()
    share = tolerances.softmax(width, exact_logits.abs().max().item())
    tolerances.assert_within(weight, exact.sum(-1), share * exact.sum(-1))
    # Weights, and in 16 bits each tile's product, are rounded to the logits' type. Below the
    # smallest normal number, fp16 rounds to a fixed grid.
    share += 2 * tolerances.unit_roundoff(dtype)
    grid = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    magnitudes = (share * exact + grid) @ embeddings.double().abs()
    tolerances.assert_within(total, exact @ embeddings.double(), magnitudes)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4])
def test_low_temperatures(fused: ModuleType, temperature: float) -> None:
    """Rounding moves logits by more than weights in fp16 bear, and fp16 ends before the largest."""
    output, _, uniform = inputs(torch.float16, 2 * BLOCK)
    rows, width = output.shape
    embeddings = torch.randn(width, 8, generator=torch.Generator().manual_seed(1)).half()
    on_device = torch.device(DEVICE)
    per_row = torch.full((rows, 1), temperature, device=on_device)
    reader = fused.FusedVocabReader(30.0, per_row, uniform.to(DEVICE), 0, width)
    running = expected_embedding_triton.FusedExpectedEmbedding(rows, width, on_device)
    found = []
    for first in range(0, width, BLOCK):
        tile = slice(first, first + BLOCK)
        logits, blocks, _ = reader.read_tile(output[:, tile].to(DEVICE, copy=True))
        found.append(logits.cpu().clone())
        running.add_tile(logits, blocks, None, embeddings[tile].to(DEVICE))
    total, weight, _ = (part.cpu() for part in running.result())
    logits = torch.cat(found, dim=1)
    probs, exact = logits.double().softmax(-1), embeddings.double()
    share = 2 * tolerances.unit_roundoff(torch.float16) + tolerances.softmax(width, 0)
    tolerances.assert_within(total / weight[:, None], probs @ exact, share * exact.abs().amax())
