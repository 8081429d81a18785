"""Experts that CPUs compute, of one rank and of several."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from tests import tolerances
from tests.patched import patched
from vllm_dllm.cpu import experts
from vllm_dllm.cpu.compat import kernels
from vllm_dllm.cpu.compat.kernels import with_local_experts

H, INTERMEDIATE, EXPERTS, CHOICES = 32, 16, 5, 2


def drawn(rows: int) -> tuple[torch.Tensor, ...]:
    """x, weights and ids of choices, w13, w2; the second token's experts are of other ranks, and
    nobody chooses the last expert."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, H, generator=generator)
    weights = torch.rand(rows, CHOICES, generator=generator)
    ids = torch.rand(rows, EXPERTS - 1, generator=generator).topk(CHOICES).indices
    if rows > 1:
        ids[1] = -1
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, H, generator=generator) / H**0.5
    w2 = torch.randn(EXPERTS, H, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return x, weights, ids, w13, w2


def each_by_itself(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    formula = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    }[activation]
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            if expert >= 0:
                gate, up = (w13[expert] @ x[token]).chunk(2)
                out[token] += weight * (w2[expert] @ (formula(gate) * up))
    return out


@pytest.mark.numerics
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("activation", experts.ACTIVATIONS)
def test_equals_each_token_by_itself(activation: str, rows: int) -> None:
    x, weights, ids, w13, w2 = drawn(rows)
    found = experts.compute_experts(x, weights, ids.int(), activation, "bf16", [w13], [w2])
    doubles = x.double(), weights.double(), ids, activation, w13.double(), w2.double()
    allowed = 2 * tolerances.product(H) + tolerances.product(INTERMEDIATE) + tolerances.SHORT
    size = CHOICES * w2.abs().sum(-1).max().item()  # of the terms that may cancel
    torch.testing.assert_close(
        found.double(), each_by_itself(*doubles), **tolerances.within(allowed, size)
    )
    assert rows == 1 or not found[1].any()


@pytest.mark.numerics
def test_16_bits_where_nothing_is_rounded() -> None:
    """Gates of 8, whose tanh is 1 in 16 bits, and small whole numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (40, H), generator=generator).bfloat16()
    x[:, 0] = 1
    w13 = torch.randint(-1, 2, (EXPERTS, 2 * INTERMEDIATE, H), generator=generator).bfloat16()
    w13[:, :INTERMEDIATE] = 0
    w13[:, :INTERMEDIATE, 0] = 8
    w13[:, INTERMEDIATE:, 4:] = 0  # ups of at most 4
    w2 = torch.zeros(EXPERTS, H, INTERMEDIATE).bfloat16()
    w2[:, :, :2] = torch.randint(-1, 2, (EXPERTS, H, 2), generator=generator)
    ids = torch.rand(40, EXPERTS, generator=generator).topk(CHOICES).indices
    weights = torch.tensor([[1.0, 0.5]]).expand(40, 2)
    found = experts.compute_experts(x, weights, ids, "gelu_tanh", "bf16", [w13], [w2])
    assert found.dtype == torch.bfloat16
    exact = each_by_itself(x.float(), weights, ids, "gelu_tanh", w13.float(), w2.float())
    assert torch.equal(found.float(), exact.round(decimals=2)) and exact.any()


class Experts:
    """vLLM's FusedMoEConfig, as far as it is read: 267 million weights in bench/cores.py."""

    in_dtype = torch.bfloat16
    has_bias = False
    experts_per_token, num_experts = 4, 8
    hidden_dim, intermediate_size_per_partition = 1024, 512


@pytest.fixture
def zen(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A processor of AMD with bf16, and canvases of 256."""
    monkeypatch.setattr(experts, "cpu_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    config = VllmConfig()
    monkeypatch.setattr(config, "diffusion_config", type("Canvases", (), {"canvas_length": 256}))
    return config


BF16_SUPPORTED, AMX_SUPPORTED = "_is_avx512_bf16_supported", "_is_amx_tile_supported"


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("owner", "differences", "expected"),
    [
        (Experts, {}, True),
        (Experts, {"in_dtype": torch.float32}, False),
        (Experts, {"in_dtype": torch.float16}, False),
        (Experts, {"has_bias": True}, False),
        (Experts, {"num_experts": 64}, False),  # 16 rows of a canvas an expert
        (Experts, {"hidden_dim": 128, "intermediate_size_per_partition": 64}, False),
        (experts, {"cpu_vendor": lambda: "GenuineIntel"}, False),
        (torch.cpu, {AMX_SUPPORTED: lambda: True}, False),
        (torch.cpu, {BF16_SUPPORTED: lambda: False}, False),
        (VllmConfig, {"diffusion_config": None}, False),
    ],
)
def test_large_experts_in_bf16_on_zen_are_ours(
    zen: VllmConfig, monkeypatch: pytest.MonkeyPatch, owner: Any, differences: Any, expected: bool
) -> None:
    for name, value in differences.items():
        monkeypatch.setattr(zen if owner is VllmConfig else owner, name, value)
    with set_current_vllm_config(zen):
        assert experts.is_faster_than_stock(Experts) == expected


@pytest.mark.numerics
def test_vllm_asks_it_first() -> None:
    backends = unquantized.UnquantizedMoeBackend
    with patched("model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls"):
        stock = unquantized.backend_to_kernel_cls(backends.CPU)
        kernels.prefer_expert_kernel(experts.Bf16Experts)
        kernels.prefer_expert_kernel(experts.Bf16Experts)
        first, *others = unquantized.backend_to_kernel_cls(backends.CPU)
        assert first is experts.Bf16Experts
        assert others == [kernels.with_local_experts(each) for each in stock]
        assert experts.Bf16Experts not in unquantized.backend_to_kernel_cls(backends.TRITON)


T, HIDDEN, INNER, E, K = 5, 32, 64, 8, 3


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
    x = torch.randint(-3, 4, (T, HIDDEN), generator=generator).float()
    w1 = torch.randint(-3, 4, (E, HIDDEN, INNER), generator=generator).float()
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
