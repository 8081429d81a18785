"""Self-conditioning in few launches against the same in PyTorch's operations, in Triton's
interpreter where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from attention_kernels.interpreter import interpret_kernels
from tests import tolerances
from tests.unit.step.batches import canvas_batch
from vllm_dllm.models.diffusion_gemma import SelfConditioning
from vllm_dllm.step.slots import CanvasSlots, SlotNumbers
from vllm_dllm.step.uniform import condition_triton
from vllm_dllm.step.uniform.uniform_step import UniformStep

pytestmark = pytest.mark.numerics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
R, C, H, INTERMEDIATE = 8, 12, 40, 72
BATCHES: dict[str, tuple[list[int], list[int], list[int]]] = {  # slots, prompt rows, canvas rows
    "side by side": ([2, 3, 4], [0, 0, 0], [C, C, C]),
    "anywhere": ([6, 0, 5], [0, 0, 0], [C, C, C]),
    "narrow": ([1, 2, 7], [0, 0, 0], [C, 1, 5]),
    "beside prompts": ([1, 2, 7], [4, 0, 9], [C, C, 5]),
}


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> None:
    if DEVICE.type == "cpu":
        interpret_kernels(condition_triton)


def step_of(batch: str, fuses: bool) -> UniformStep:
    slots, prompts, canvases = BATCHES[batch]
    step = UniformStep.__new__(UniformStep)
    step.fuses = fuses
    step.slots = CanvasSlots(torch.zeros(R, C, dtype=torch.int64, device=DEVICE), H, torch.float32)
    generator = torch.Generator().manual_seed(0)
    step.slots.soft_embeds.copy_(torch.randn(R, C, H, generator=generator))
    step.slots.soft_embeds[slots[1]] = 0  # as on a canvas' first step
    step.slots.numbers[slots[2], SlotNumbers._fields.index("is_committing")] = 1
    with set_current_vllm_config(VllmConfig()), torch.random.fork_rng():
        torch.manual_seed(1)
        module = SelfConditioning(H, INTERMEDIATE, eps=1e-6)
    torch.nn.init.normal_(module.pre_norm.weight, generator=generator)
    module.to(DEVICE)
    step.model = SimpleNamespace(self_conditioning=module)
    step.batch = canvas_batch(C, canvases, slots, prompts, device=DEVICE)
    return step


@pytest.mark.parametrize("batch", BATCHES)
def test_condition(batch: str) -> None:
    _, prompts, canvases = BATCHES[batch]
    plain = torch.randn(sum(prompts) + sum(canvases), H).to(DEVICE)
    expected, ours = torch.full_like(plain, torch.nan), torch.full_like(plain, torch.nan)
    with torch.inference_mode():
        for fuses, out in ((False, expected), (True, ours)):
            step = step_of(batch, fuses)
            step.condition(plain, step.batch, out=out)
    assert (expected == plain).all(dim=1).sum() == sum(prompts) + canvases[2], "a commit's, too"
    assert ours[(expected == plain).all(dim=1)].equal(plain[(expected == plain).all(dim=1)])
    share = tolerances.norm(H) + 2 * tolerances.product(INTERMEDIATE)
    torch.testing.assert_close(ours, expected, **tolerances.within(share, size=3.0))
