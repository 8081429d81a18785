"""What a block sees when many share a forward: its context, itself, and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import tolerances
from vllm_dllm.tools.drafter.blocks import Blocks, block_logits, make_blocks
from vllm_dllm.tools.drafter.reference import DFlashDrafter, Target, load_drafter

pytestmark = pytest.mark.numerics

LENGTHS = (20, 13)
ANCHORS = ((5, 11, 18), (3, 9, -1))  # unsorted ones occur too; -1: no block
WIDTHS = ((8, 3, 8), (8, 8, 8))
W = 8
MASK = 497
# Target and drafter have up to 4 layers of 64; states and logits are at most a few units large.
LOGITS = dict(rtol=0.0, atol=tolerances.model(layers=4, width=64, logits=2.0))


@pytest.fixture(scope="module")
def drafter(drafter_folder: Path) -> DFlashDrafter:
    return load_drafter(drafter_folder)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, 490, (2, max(LENGTHS)), generator=generator)
    tokens[1, LENGTHS[1] :] = 0
    return tokens


@pytest.fixture(scope="module")
def blocks(tokens: Tensor) -> Blocks:
    lengths, anchors, widths = map(torch.tensor, (LENGTHS, ANCHORS, WIDTHS))
    return make_blocks(tokens, lengths, anchors, widths, W, MASK)


def test_wanted_are_the_tokens_behind_the_anchor(tokens: Tensor, blocks: Blocks) -> None:
    wanted = blocks.wanted.view(2, 3, W)
    assert wanted[0, 0].tolist() == [-1, *tokens[0, 6:13].tolist()]
    assert wanted[0, 1].tolist() == [-1, *tokens[0, 12:14].tolist(), *[-1] * 5], "ends at its width"
    assert wanted[0, 2].tolist() == [-1, int(tokens[0, 19]), *[-1] * 6], "ends with the sequence"
    assert wanted[1, 2].tolist() == [-1] * W, "no block"


@torch.no_grad()
def test_a_block_among_others_is_a_block_alone(
    target: Target, drafter: DFlashDrafter, tokens: Tensor, blocks: Blocks
) -> None:
    """Alone means: its anchor and masks at the positions that follow, no mask of attention, and a
    context that ends before the anchor. So it sees neither what comes later nor another block."""
    states, _ = target.states(tokens, drafter.target_layer_ids)
    together = block_logits(drafter, target, states, blocks).view(2, 3, W, -1)
    for row in range(2):
        for n, (anchor, width) in enumerate(zip(ANCHORS[row], WIDTHS[row], strict=True)):
            if anchor < 0:
                continue
            slots = torch.tensor([[int(tokens[row, anchor])] + [MASK] * (width - 1)])
            context = drafter.context_kv(states[row : row + 1, :anchor], torch.arange(anchor)[None])
            positions = anchor + torch.arange(width)[None]
            alone = target.logits(drafter(target.embed(slots), positions, context))
            torch.testing.assert_close(together[row, n, :width], alone[0], **LOGITS)


@torch.no_grad()
def test_states_are_the_outputs_of_the_layers(target: Target, tokens: Tensor) -> None:
    """The last layer's too, which transformers shows only behind the final norm."""
    states, logits = target.states(tokens[:1], [1, 3])
    hidden = target.model(tokens[:1], output_hidden_states=True).hidden_states
    second, last = states.chunk(2, dim=-1)
    torch.testing.assert_close(second, hidden[2], **LOGITS)
    torch.testing.assert_close(target.model.model.norm(last), hidden[4], **LOGITS)
    torch.testing.assert_close(target.logits(hidden[4]), logits, **LOGITS)
    assert (last - hidden[4]).abs().max() > 100 * LOGITS["atol"]
