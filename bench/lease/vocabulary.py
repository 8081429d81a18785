"""The pass over a tile of the LM head's output, by the number of warps of a program.

    python -m bench.lease.vocabulary

A program reads 1,024 logits of a row and reduces them six times. With several warps each reduction
waits for all of them; one has 32 logits for each thread, which take registers. A line of JSON for
each; on a CPU, one in Triton's interpreter.
"""

import argparse
import json
import sys
from functools import partial

import torch
import triton

from attention_kernels.interpreter import interpret_kernels
from bench.lease.timing import timed_ms
from vllm_dllm.denoise import vocab_stream_triton
from vllm_dllm.denoise.vocab_stream import BLOCK

SOFTCAP = 30.0
SERVED = 1  # warps
MOST_OFF = 1e-5  # share of a sum of 1,024 weights, added in another order


class Pass:
    """Over a tile of `rows` canvas rows and `width` tokens."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.given = torch.randn(rows, width, device=device, dtype=dtype)
        self.logits = self.given.clone()
        self.temperature = torch.ones(rows, device=device)
        self.uniform = torch.rand(rows, device=device, dtype=torch.float64)
        blocks = triton.cdiv(width, BLOCK)
        floats = torch.zeros(3, rows, blocks, device=device)
        tokens = torch.zeros(2, rows, blocks, device=device, dtype=torch.int64)
        maximum, total, weighted = floats
        best, candidate = tokens
        self.blocks = (maximum, best, total, weighted, candidate)

    def run(self, num_warps: int) -> tuple[torch.Tensor, ...]:
        rows, width = self.logits.shape
        num_blocks = self.blocks[0].shape[1]
        vocab_stream_triton._read_blocks_kernel[rows, num_blocks](
            self.logits, self.temperature, self.uniform, *self.blocks, width,
            self.logits.stride(0), num_blocks, 0, 0, SOFTCAP,
            HAS_SOFTCAP=True, BLOCK=BLOCK, num_warps=num_warps,
        )  # fmt: skip
        return self.blocks

    def found(self, num_warps: int) -> list[torch.Tensor]:
        """What it finds in the logits that were given. It overwrites them."""
        self.logits.copy_(self.given)
        return [column.clone() for column in self.run(num_warps)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        interpret_kernels(vocab_stream_triton)
    cells = ((256, 262_144), (4096, 16_384)) if device == "cuda" else ((2, 2000),)
    for rows, width in cells:
        tile = Pass(rows, width, device)
        expected = tile.found(SERVED)
        for num_warps in (SERVED, 2, 4):
            found = tile.found(num_warps)
            pairs = zip(found, expected, strict=True)
            same = [float((one == other).float().mean()) for one, other in pairs]
            off = (found[2] / expected[2] - 1).abs().max()
            line = {
                "vocabulary": [rows, width],
                "num_warps": num_warps,
                "ms": timed_ms(partial(tile.run, num_warps), device),
                "same": {"best": same[1], "candidate": same[4]},
                "error": float(off),
            }
            print(json.dumps(line), flush=True)
            if same[1] < 1 or not float(off) <= MOST_OFF:
                sys.exit(f"vocabulary: {num_warps} warps find something else: {line}")


if __name__ == "__main__":
    main()
