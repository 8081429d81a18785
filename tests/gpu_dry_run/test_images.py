"""Images on a GPU: their tower makes nobody wait."""

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig

from tests.gpu_dry_run.fake_cuda import CUDA, FakeCuda
from vllm_dllm.models import vision
from vllm_dllm.tools.pretrain.architecture import VISION_CONFIG

PATCHES = 16  # of the largest image: four tokens
H = 64


def test_the_tower_waits_for_nothing(cuda: FakeCuda) -> None:
    """Of two images, one smaller than the other."""
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(hidden_size=H, num_hidden_layers=1),
        vision_config=dict(VISION_CONFIG),
    )
    tower, projection = (part.to(CUDA) for part in vision.build(config, torch.float32))
    patches = torch.zeros(2, PATCHES, 3 * VISION_CONFIG["patch_size"] ** 2, device=CUDA)
    positions = torch.zeros(2, PATCHES, 2, dtype=torch.int64, device=CUDA)
    cuda.waits.clear()
    rows = vision.encode(tower, projection, patches, positions, [4, 2])
    assert [list(each.shape) for each in rows] == [[4, H], [2, H]]
    assert cuda.waits == []
