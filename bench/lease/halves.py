"""The two halves of a layer of the 26B model in FP8, one after the other and on two CUDA streams.

    python -m bench.lease.halves

The dense MLP reads 18 MB, the experts 761 MB in kernels of which a dozen are small. A line of JSON
for each number of tokens; on a CPU, the dense half alone, in fp32.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F

from bench.dummy_checkpoint import SHAPE_26B
from bench.lease import experts
from bench.lease.timing import error, timed_ms

FP8 = torch.float8_e4m3fn
HIDDEN, MLP = SHAPE_26B["hidden_size"], SHAPE_26B["intermediate_size"]
Run = Callable[[], torch.Tensor]


def dense_half(states: torch.Tensor, is_fp8: bool) -> Run:
    """As vLLM runs it: quantise, gate and up, activation, quantise, down."""
    gate_up = torch.randn(2 * MLP, HIDDEN, device=states.device, dtype=states.dtype) * 0.02
    down = torch.randn(HIDDEN, MLP, device=states.device, dtype=states.dtype) * 0.02
    if not is_fp8:

        def run_plain() -> torch.Tensor:
            gate, up = F.linear(states, gate_up).chunk(2, dim=-1)
            return F.linear(F.gelu(gate, approximate="tanh") * up, down)

        return run_plain
    from vllm import _custom_ops as ops

    weights = [each.to(FP8).T for each in (gate_up, down)]
    scales = [torch.ones(1, each.shape[1], device=states.device) for each in weights]

    def product(rows: torch.Tensor, i: int) -> torch.Tensor:
        quantised, scale = ops.scaled_fp8_quant(rows, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(quantised, weights[i], scale, scales[i], states.dtype)

    def run() -> torch.Tensor:
        inner = states.new_empty(len(states), MLP)
        torch.ops._C.gelu_tanh_and_mul(inner, product(states, 0))
        return product(inner, 1)

    return run


def in_turns(first: Run, second: Run) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (first(), second())


def at_once(first: Run, second: Run) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """`first` is launched first, on the second stream."""
    stream = torch.cuda.Stream()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = first()
        other = second()
        torch.cuda.current_stream().wait_stream(stream)
        return found, other

    return run


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not torch.cuda.is_available():
        print("halves: streams need a GPU; the dense half alone")
        states = torch.randn(8, HIDDEN)
        print(json.dumps({"halves": 8, "dense": timed_ms(dense_half(states, False), "cpu")}))
        return
    for tokens in (256, 512, 1024, 2048, 4096, 8192):
        problem = experts.draw(tokens, (128, 704, 2816, 8), "cuda")
        dense = dense_half(problem.states, True)
        mixes = {"Triton": experts.triton_experts(problem, True, True)}
        if tokens <= 1024:
            mixes["ours"] = experts.our_experts(problem, True, "cuda")
        for name, mix in mixes.items():
            both = at_once(mix, dense)
            expected, found = (mix().clone(), dense().clone()), both()
            line = {
                "halves": tokens,
                "experts": name,
                "ms": {
                    "dense": timed_ms(dense, "cuda"),
                    "experts": timed_ms(mix, "cuda"),
                    "one after the other": timed_ms(in_turns(mix, dense), "cuda"),
                    "at once": timed_ms(both, "cuda"),
                },
                "error": max(error(*pair) for pair in zip(found, expected, strict=True)),
            }
            print(json.dumps(line), flush=True)
            if line["error"] != 0:  # the same kernels
                sys.exit(f"halves: at once they compute something else: {line}")


if __name__ == "__main__":
    main()
