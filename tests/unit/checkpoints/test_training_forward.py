"""The training forward gives transformers' numbers, in fp32, layer types and padding included."""

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion

from checkpoints.recipes.forward import TrainingForward
from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests import tolerances

pytestmark = pytest.mark.numerics

VOCAB_SIZE, CANVAS_LENGTH = 512, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), canvas_length=CANVAS_LENGTH)
    return DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("lengths", [[1, 1], [20, 20], [31, 30], [100, 33]], ids=str)
@torch.no_grad()
def test_logits_equal_transformers(model, lengths):
    torch.manual_seed(0)
    longest = max(lengths)
    prefix = torch.randint(7, VOCAB_SIZE, (len(lengths), longest))
    is_token = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    canvases = torch.randint(VOCAB_SIZE, (len(lengths), 2, CANVAS_LENGTH))
    previous = 3 * torch.randn(1, 2, CANVAS_LENGTH, VOCAB_SIZE)

    training = TrainingForward(model)
    ours = training.decode(canvases, training.encode(prefix, is_token), previous)

    for row, length in enumerate(lengths):
        for copy in range(2):
            reference = model(
                input_ids=prefix[row : row + 1, longest - length :],
                decoder_input_ids=canvases[row : row + 1, copy],
                # Only the first prefix has self-conditioning in `previous`.
                self_conditioning_logits=previous[:, copy] if row == 0 else None,
            ).logits
            torch.testing.assert_close(ours[row, copy], reference[0], rtol=0, atol=tolerances.LOGIT)
