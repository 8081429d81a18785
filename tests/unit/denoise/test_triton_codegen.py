"""What Triton makes of the sampler's kernels, compiled where there is no GPU."""

import pytest

from bench.codegen.case import Case
from bench.codegen.kernels import SAMPLER
from tests.triton_for_gpus import check, compile_apart
from vllm_dllm.denoise import expected_embedding_triton as embedding
from vllm_dllm.denoise import vocab_stream_triton as vocabulary

POINTERS = SAMPLER | dict.fromkeys(("logits", "embeddings"), "bf16")
BLOCK = {"BLOCK": vocabulary.BLOCK}
TILES = {"ROWS": embedding._ROWS, "HIDDEN": embedding._HIDDEN, "TOKENS": embedding._TOKENS}


def add_needed(dtype: str) -> Case:
    return Case(
        embedding._add_needed_kernel,
        POINTERS | dict.fromkeys(("logits", "embeddings"), dtype),
        BLOCK | TILES,
        floats=("softcap",),
        multiplies=dtype == "bf16",
    )


def read_blocks() -> Case:
    constants = BLOCK | {"HAS_SOFTCAP": True}
    return Case(vocabulary._read_blocks_kernel, POINTERS, constants, floats=("softcap",))


CASES: dict[str, tuple[int, Case]] = {}
for chip in (80, 90, 100):
    CASES[f"sm_{chip} add_needed"] = chip, add_needed("bf16")
    CASES[f"sm_{chip} add_needed in fp32"] = chip, add_needed("fp32")
    CASES[f"sm_{chip} read_blocks"] = chip, read_blocks()


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(*CASES[case], compiled[case])
