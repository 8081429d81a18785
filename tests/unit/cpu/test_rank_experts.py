"""Each rank's part of a layer of experts on CPUs."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from vllm_dllm.cpu.compat.kernels import with_local_experts

T, H, INNER, E, K = 5, 32, 64, 8, 3


def test_the_ranks_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, each with the experts that the map says."""

    def sum_of_experts(
        output: torch.Tensor,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_bias: None,
        w2_bias: None,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *_: object,
    ) -> None:
        assert ids.min() >= 0 and ids.max() < len(w1)
        each = torch.einsum("tkio,ti->tko", w1[ids.long()], x)
        output.copy_((each * weights[..., None]).sum(1))

    monkeypatch.setattr(cpu_moe, "cpu_fused_moe", sum_of_experts)
    kernel: Any = with_local_experts(cpu_moe.CPUUnquantizedExperts)
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, whose sums are exact.
    x = torch.randint(-3, 4, (T, H), generator=generator).float()
    w1 = torch.randint(-3, 4, (E, H, INNER), generator=generator).float()
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).int()
    weights = torch.randint(1, 4, (T, K), generator=generator).float()

    def run(own: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
        layer = kernel.__new__(kernel)
        layer._use_zentorch, layer.isa = False, ""
        layer.quant_config = FusedMoEQuantConfig.make()
        output = torch.empty(T, INNER)
        layer.apply(
            output=output,
            hidden_states=x,
            w1=own,
            w2=own,
            topk_weights=weights,
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=E,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=output,
            workspace2=output,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return output

    none = torch.full((E // 2,), -1)
    first = torch.cat((torch.arange(E // 2), none))
    parts = run(w1[: E // 2], first) + run(w1[E // 2 :], torch.cat((none, torch.arange(E // 2))))
    assert torch.equal(parts, run(w1, None))
