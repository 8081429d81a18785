"""The experts of LLaDA2.2's blocks, of requests that lie in one step, beside the reference's."""

from types import SimpleNamespace

import pytest
import torch

from tests import tolerances
from tests.engine.llada2 import Gate
from vllm_dllm.models.llada2 import BlockRouting

BLOCK, EXPERTS, HIDDEN = 4, 16, 8
CONFIG = SimpleNamespace(
    block_size=BLOCK,
    expert_capacity=5,
    num_experts=EXPERTS,
    num_experts_per_tok=3,
    hidden_size=HIDDEN,
    routed_scaling_factor=2.5,
)


@pytest.mark.parametrize("stale", [0, 9])
def test_each_block_chooses_together(stale: int) -> None:
    """Whole blocks; one that the context cuts, before another request's first; what a CUDA graph
    has behind the rows, which holds an earlier step's positions."""
    generator = torch.Generator().manual_seed(0)
    gate = Gate(CONFIG)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(gate.weight.shape, generator=generator))
        gate.expert_bias.copy_(torch.randn(EXPERTS, generator=generator))
    requests = [range(8), range(4, 14), range(4), range(8, 12)]
    positions = [position for each in requests for position in each]
    rows = torch.randn(len(positions) + 3, HIDDEN, generator=generator)
    routing = BlockRouting(CONFIG, len(rows) + 5)
    routing.number_blocks(torch.tensor(positions + [stale] * 3))
    found = torch.zeros(len(rows), EXPERTS)
    with torch.no_grad():
        weights, experts = routing.choose_experts(
            rows, rows @ gate.weight.T, 3, True, bias=gate.expert_bias
        )
        found.scatter_(1, experts, weights)
        first = 0
        for each in requests:
            own = slice(first, first + len(each))
            expected = gate(rows[own])
            near = tolerances.softmax(EXPERTS, 3.0)
            tolerances.assert_within(found[own], expected, near)
            assert torch.equal(found[own] > 0, expected > 0)
            first += len(each)
    chosen = [set(experts[i : i + BLOCK].flatten().tolist()) for i in (0, 4, 8, 12)]
    assert max(map(len, chosen)) <= CONFIG.expert_capacity
