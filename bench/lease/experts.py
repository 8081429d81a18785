"""The experts of a layer of the 26B model under even routing, by every kernel that may run them.

    python -m bench.lease.experts

Every result is compared
with fp32 products. Ours is timed with all that a layer does, as vLLM's Triton kernel is. A line of
JSON for each; on a CPU, ours and the definition, in a small shape and in fp32.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attention_kernels.interpreter import interpret_kernels
from bench.lease.timing import error, timed_ms
from vllm_dllm.experts import definition, mixture_triton, quantise_triton
from vllm_dllm.experts.definition import FP8, Assignment, Experts
from vllm_dllm.experts.quantise_triton import quantise_rows

ACTIVATION = "gelu_tanh"
Run = Callable[[], torch.Tensor]
MOST_OFF = 0.1  # share of the size of what fp32 gives, for rows and weights rounded to FP8


@dataclass
class Problem:
    """Rows of tokens that are sorted by expert, and the weights."""

    tokens: int
    top_k: int
    states: torch.Tensor  # [T, K] bf16
    ids: torch.Tensor  # [T, top_k] int32
    gate_up: torch.Tensor  # [E, 2 * N, K] bf16
    down: torch.Tensor  # [E, K, N] bf16

    @property
    def weights(self) -> torch.Tensor:  # [T, top_k]
        shape = (self.tokens, self.top_k)
        return torch.full(shape, 1 / self.top_k, device=self.states.device)

    def expected(self, num_tokens: int) -> torch.Tensor:  # [num_tokens, K]
        """Returns the first tokens' results, in fp32."""
        states, weights, ids = (each[:num_tokens] for each in (self.states, self.weights, self.ids))
        experts = Experts(self.gate_up, self.down)
        return definition.mix_experts(states.float(), experts, weights, ids, ACTIVATION)


def draw(tokens: int, shape: tuple[int, int, int, int], device: str) -> Problem:
    experts, width, hidden, top_k = shape
    torch.manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16) * scale

    ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=-1).indices.int()
    gate_up = normal(experts, 2 * width, hidden, scale=0.02)
    return Problem(
        tokens, top_k, normal(tokens, hidden), ids, gate_up,
        normal(experts, hidden, width, scale=0.02),
    )  # fmt: skip


def triton_experts(problem: Problem, is_fp8: bool, tuned: bool) -> Run:
    """vLLM's Triton kernel with its default tiles, or with those that we ship."""
    from vllm.model_executor.layers.fused_moe import MoEActivation, override_config
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    from vllm_dllm.config import tiles

    weights, quant = (problem.gate_up, problem.down), None
    if is_fp8:
        weights = tuple(each.to(FP8) for each in weights)
        scales = [torch.ones(*each.shape[:2], 1, device=each.device) for each in weights]
        quant = fp8_w8a8_moe_quant_config(
            w1_scale=scales[0],
            w2_scale=scales[1],
            per_act_token_quant=True,
            per_out_ch_quant=True,
        )
    scores = problem.weights

    def run() -> torch.Tensor:
        return fused_experts(
            problem.states,
            *weights,
            scores,
            problem.ids,
            activation=MoEActivation.GELU_TANH,
            quant_config=quant,
        )

    if not tuned:
        return run
    (file,) = tiles.FOLDER.glob("E=128,N=704,*dtype=fp8_w8a8.json")
    table = json.loads(file.read_text())
    table.pop("triton_version")
    nearest = min(table, key=lambda rows: abs(int(rows) - problem.tokens))

    def run_tuned() -> torch.Tensor:
        with override_config(table[nearest]):
            return run()

    return run_tuned


def our_experts(problem: Problem, is_fp8: bool, device: str) -> Run:
    """Our Triton kernel with what is around it; on a CPU in Triton's interpreter, in fp32."""
    assign: Callable[..., Any] = definition.sort_by_expert
    quantise: Callable[[torch.Tensor], Any] = definition.quantise
    dtype = torch.float32
    if device == "cpu":
        interpret_kernels(mixture_triton)
        interpret_kernels(quantise_triton)
    else:
        from vllm.model_executor.layers.fused_moe import moe_align_block_size as align

        assign = partial(align.moe_align_block_size, pad_sorted_ids=True)
        quantise = quantise_rows
        dtype = problem.states.dtype

    num_experts, hidden, width = problem.down.shape
    size = mixture_triton.block_size(problem.tokens, problem.top_k, num_experts)
    states, scores = problem.states.to(dtype), problem.weights
    weights = [each.to(FP8 if is_fp8 else dtype) for each in (problem.gate_up, problem.down)]
    scales = [
        torch.ones(each.shape[:2], device=each.device) if is_fp8 else None for each in weights
    ]
    inner, rows = (states.new_empty(problem.ids.numel(), n) for n in (width, hidden))
    output = torch.empty_like(states)

    def run() -> torch.Tensor:
        given, state_scale = quantise(states) if is_fp8 else (states, None)
        assignment = Assignment(*assign(problem.ids, size, num_experts))
        mixture_triton.mix_experts(
            given, state_scale, Experts(*weights, *scales), scores, assignment, size,
            ACTIVATION, inner, rows, output,
        )  # fmt: skip
        return output

    return run


def cutlass_products(problem: Problem) -> tuple[Run, Callable[[], float]]:
    """Both products of CUTLASS in FP8, without what is around them, and their error."""
    from vllm import _custom_ops as ops

    experts, double, hidden = problem.gate_up.shape
    width, device = double // 2, problem.states.device
    counts = torch.bincount(problem.ids.flatten().long(), minlength=experts)
    first = torch.zeros(experts + 1, device=device, dtype=torch.int64)
    first[1:] = counts.cumsum(0)
    rows = problem.tokens * problem.top_k
    inputs = [torch.randn(rows, size, device=device).to(FP8) for size in (hidden, width)]
    weights = [problem.gate_up.to(FP8), problem.down.to(FP8)]
    scales = [torch.ones(experts, each.shape[1], device=device) for each in weights]
    row_scales = torch.ones(rows, 1, device=device)
    sizes = [torch.empty(experts, 3, device=device, dtype=torch.int32) for _ in range(2)]
    ops.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(first, *sizes, width, hidden, False)
    outputs = [
        torch.full((rows, each.shape[1]), float("nan"), device=device, dtype=torch.bfloat16)
        for each in weights
    ]
    strides = [
        tuple(
            torch.full((experts,), stride, device=device, dtype=torch.int64)
            for stride in (weight.shape[2], weight.shape[2], weight.shape[1])
        )
        for weight in weights
    ]

    def run() -> torch.Tensor:
        for i in range(2):
            ops.cutlass_moe_mm(
                outputs[i], inputs[i], weights[i], row_scales, scales[i], first[:-1], sizes[i],
                *strides[i], True, True,
            )  # fmt: skip
        return outputs[1]

    def off() -> float:
        expert = int(counts.argmax())
        here = slice(int(first[expert]), int(first[expert + 1]))
        return max(
            error(outputs[i][here], inputs[i][here].float() @ weights[i][expert].float().T)
            for i in range(2)
        )

    return run, off


def quantised_rows(problem: Problem, is_ours: bool) -> tuple[Run, Callable[[], float]]:
    """Quantisation of the tokens' rows, and its error: what rounding to FP8 costs."""
    from vllm import _custom_ops as ops

    theirs = partial(ops.scaled_fp8_quant, use_per_token_if_dynamic=True)
    quantise = quantise_rows if is_ours else theirs

    def off() -> float:
        rows, scale = quantise(problem.states)
        return error(rows.float() * scale, problem.states)

    return lambda: quantise(problem.states)[0], off


def candidates(problem: Problem, device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By name: what makes the function to time, or that and its error."""
    yield "ours FP8", lambda: our_experts(problem, True, device)
    yield (
        "ours bf16" if device != "cpu" else "ours fp32",
        lambda: our_experts(problem, False, device),
    )
    if device == "cpu":
        yield "definition, fp32", lambda: lambda: problem.expected(4)
        return
    yield "CUTLASS FP8, products, as vLLM has it", lambda: cutlass_products(problem)
    yield "quantising rows, vLLM", lambda: quantised_rows(problem, False)
    yield "quantising rows, ours", lambda: quantised_rows(problem, True)
    yield "Triton FP8, vLLM's tiles", lambda: triton_experts(problem, True, False)
    yield "Triton FP8, our tiles", lambda: triton_experts(problem, True, True)
    yield "Triton bf16, vLLM's tiles", lambda: triton_experts(problem, False, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, counts = (128, 704, 2816, 8), [256, 512, 1024, 2048, 4096, 8192, 16384]
    if device == "cpu":
        shape, counts = (16, 64, 128, 4), [8]
        print("experts: CUTLASS and Triton's kernel need a GPU; ours and the definition")
    wrong: list[str] = []
    for tokens in counts:
        problem = draw(tokens, shape, device)
        expected = problem.expected(min(4, tokens))
        for name, make in candidates(problem, device):
            found: dict[str, Any] = {"experts": name, "tokens": tokens}
            # One that does not run here is reported, and the others run. The exit status says so.
            try:
                made = make()
                run, off = made if isinstance(made, tuple) else (made, None)
                found["ms"] = timed_ms(run, device)
                if off is not None:
                    found["error"] = off()
                else:
                    found["error"] = error(run()[: len(expected)], expected)
            except Exception as failure:
                found["failed"] = repr(failure)[:400]
            print(json.dumps(found), flush=True)
            if "failed" in found or not found.get("error", 0.0) <= MOST_OFF:  # a NaN is also wrong
                wrong.append(f"{name}, {tokens} tokens")
    if wrong:
        sys.exit(f"experts that failed or computed something else: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
