"""What Triton makes of the drafters' kernels, compiled where there is no GPU."""

import pytest

from attention_kernels.support import FIRST_FP8_CAPABILITY, shared_bytes
from bench.codegen.case import Case
from tests.triton_for_gpus import check, compile_apart
from vllm_dllm.drafters import context_kv_triton as kernels

TUPLES = {"tokens": kernels.Tokens, "heads": kernels.Head, "caches": kernels.Caches}
POINTERS = {
    **dict.fromkeys(("states", "hidden_norm", "projection", "bias", "projected"), "bf16"),
    **dict.fromkeys(("heads.k_norm", "caches.like"), "bf16"),
    **dict.fromkeys(("heads.cos_sin", "caches.scales"), "fp32"),
    **dict.fromkeys(("tokens.positions", "tokens.slots", "caches.addresses"), "i64"),
}
FLOATS = ("heads.eps", "heads.value_factor")
HEAD = {"NUM_HEADS": 8, "SIZE": 128, "ROTATING": 128, "HALF": 64, "IS_NEOX": True}
WIDE = HEAD | {"SIZE": 256, "ROTATING": 64, "HALF": 128, "IS_NEOX": False}


def of_heads(head: dict[str, int]) -> dict[str, object]:
    return {f"heads.{name}": value for name, value in head.items()}


def fused(chip: int, num_tokens: int, head: dict[str, int] = HEAD) -> Case:
    shared_memory = shared_bytes(divmod(chip, 10))
    tiles = kernels.fused_tiles(num_tokens, head["SIZE"], 2, shared_memory)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    return Case(
        kernels._project_and_store_kernel,
        POINTERS,
        {**of_heads(head), "HIDDEN_SIZE": 4096, "HAS_BIAS": False, **tiles},
        FLOATS,
        TUPLES,
        options,
        multiplies=num_tokens == 64,  # a tile of 16 rows is too small for Hopper's own
        loads_ahead=True,
    )


def after_gemm(cache: str = "bf16") -> Case:
    return Case(
        kernels._store_projected_kernel,
        POINTERS | {"caches.like": cache},
        {**of_heads(HEAD), "ROWS": kernels._ROWS},
        FLOATS,
        TUPLES,
    )


CASES: dict[str, tuple[int, Case]] = {}
for chip in (80, 90, 100):
    CASES[f"sm_{chip} fused, 64 tokens"] = chip, fused(chip, 64)
    CASES[f"sm_{chip} fused, 16 tokens"] = chip, fused(chip, 16)
    CASES[f"sm_{chip} fused, heads of 256"] = chip, fused(chip, 64, WIDE)
    CASES[f"sm_{chip} after a GEMM"] = chip, after_gemm()
    if divmod(chip, 10) >= FIRST_FP8_CAPABILITY:
        CASES[f"sm_{chip} after a GEMM, fp8 cache"] = chip, after_gemm("fp8e4nv")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(*CASES[case], compiled[case])
