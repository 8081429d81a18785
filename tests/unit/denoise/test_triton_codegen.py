"""What Triton makes of the sampler's kernels, compiled where there is no GPU."""

import pytest

from tests.triton_for_gpus import Case, check, compile_apart
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

POINTERS = {
    "output": "bf16",
    "logits": "bf16",
    "embeddings": "bf16",
    "best": "i64",
    "candidate": "i64",
    "needed": "i32",
    **dict.fromkeys(("temperature", "within", "maximum", "total", "weighted"), "fp32"),
    **dict.fromkeys(("sums", "totals"), "fp32"),
}
BLOCK = {"BLOCK": vocabulary.BLOCK}
TILES = {"ROWS": embedding._ROWS, "HIDDEN": embedding._HIDDEN, "TOKENS": embedding._TOKENS}


def add_needed(capability: int, dtype: str) -> Case:
    return Case(
        capability,
        embedding._add_needed_kernel,
        POINTERS | dict.fromkeys(("logits", "embeddings"), dtype),
        BLOCK | TILES,
        floats=("softcap",),
        multiplies=dtype == "bf16",
    )


def read_blocks(capability: int) -> Case:
    constants = BLOCK | {"HAS_SOFTCAP": True}
    return Case(
        capability, vocabulary._read_blocks_kernel, POINTERS, constants, floats=("softcap",)
    )


CASES: dict[str, Case] = {}
for capability in (80, 90, 100):
    CASES[f"sm_{capability} add_needed"] = add_needed(capability, "bf16")
    CASES[f"sm_{capability} add_needed in fp32"] = add_needed(capability, "fp32")
    CASES[f"sm_{capability} read_blocks"] = read_blocks(capability)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(CASES[case], compiled[case])
