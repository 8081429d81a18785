"""The dense products of a step of the 26B model: FP8 by each kernel that a server can choose, and
bf16.

    python -m bench.lease.linears

Weights of many layers take turns, so that none is read from a cache. A line of JSON for each.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator

import torch

from bench.dummy_checkpoint import SHAPE_26B
from bench.lease.timing import error, timed_ms

FP8 = torch.float8_e4m3fn
HIDDEN, MLP = SHAPE_26B["hidden_size"], SHAPE_26B["intermediate_size"]
HEADS = SHAPE_26B["num_attention_heads"]
PRODUCTS = {  # of a layer: outputs, inputs
    "qkv, sliding": (SHAPE_26B["head_dim"] * (HEADS + 16), HIDDEN),
    "qkv, full": (SHAPE_26B["global_head_dim"] * (HEADS + 2), HIDDEN),
    "out, sliding": (HIDDEN, SHAPE_26B["head_dim"] * HEADS),
    "out, full": (HIDDEN, SHAPE_26B["global_head_dim"] * HEADS),
    "gate and up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}
CACHE_BYTES = 100 << 20  # more than a GPU's


def candidates(
    states: torch.Tensor,  # [T, K] bf16
    weights: list[torch.Tensor],  # each [N, K] bf16
    device: str,
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    turns = itertools.cycle(range(len(weights)))
    yield "bf16", lambda: states @ weights[next(turns)].T
    if device == "cpu":
        return
    from vllm import _custom_ops as ops

    from vllm_dllm.compat.fp8_linears import Product
    from vllm_dllm.measured.fp8_linears import CANDIDATES

    rows, scale = states.to(FP8), torch.ones(len(states), 1, device=states.device)
    small = [weight.to(FP8) for weight in weights]
    one = torch.ones(weights[0].shape[0], 1, device=states.device)
    for name, multiply in CANDIDATES.items():

        def run(multiply: Callable[[Product], torch.Tensor] = multiply) -> torch.Tensor:
            b = small[next(turns)].T
            return multiply(Product(rows, scale, b, one, None, torch.bfloat16))

        yield f"{name} FP8", run
    scales = ops.scaled_fp8_quant(states, use_per_token_if_dynamic=True)[1]
    yield (
        "CUTLASS FP8 with quantising",
        lambda: ops.cutlass_scaled_mm(
            ops.scaled_fp8_quant(states, use_per_token_if_dynamic=True)[0],
            small[next(turns)].T, scales, one, torch.bfloat16,
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("linears: FP8 needs a GPU; one product in bf16")
    for name, tokens in itertools.product(PRODUCTS, (256, 4096) if device == "cuda" else (8,)):
        outputs, inputs = PRODUCTS[name]
        copies = CACHE_BYTES // (outputs * inputs) + 2 if device == "cuda" else 1
        torch.manual_seed(0)
        states = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * 0.02
        weights = [weight.clone() for _ in range(copies)]
        expected = states[:4].float() @ weight.float().T
        for kernel, run in candidates(states, weights, device):
            found = {"linear": name, "kernel": kernel, "tokens": tokens}
            try:
                found |= {"ms": timed_ms(run, device), "error": error(run()[:4], expected)}
            except Exception as failure:  # reported, and the others run
                found["failed"] = repr(failure)[:400]
            print(json.dumps(found), flush=True)
        if device == "cpu":
            return


if __name__ == "__main__":
    main()
