"""What Triton makes of the kernels for Hopper and Blackwell, compiled where there is no GPU."""

import pytest
import triton

from attention_kernels import chunks, triton_fwd
from tests.triton_for_gpus import Case, check, compile_apart

SHAPES = {  # capability, head size, query heads a key head, page, cache dtype
    "sm_90 sliding": (90, 256, 2, 16, "bf16"),
    "sm_90 full": (90, 512, 8, 128, "bf16"),
    "sm_90 sliding fp8": (90, 256, 2, 64, "fp8e4nv"),
    "sm_100 sliding": (100, 256, 2, 128, "bf16"),
    "sm_100 full": (100, 512, 8, 16, "bf16"),
    "sm_80 sliding": (80, 256, 2, 16, "bf16"),
    "sm_80 full": (80, 512, 8, 16, "bf16"),
    "sm_89 sliding fp8": (89, 256, 2, 16, "fp8e4nv"),
    "sm_120 full": (120, 512, 8, 16, "bf16"),
    "sm_120 a large group": (120, 512, 128, 16, "bf16"),
    "sm_90 a large group": (90, 512, 128, 16, "bf16"),
}
POINTERS = {
    **dict.fromkeys(("query", "output"), "bf16"),
    **dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "causal", "symmetric"), "i32"),
    **dict.fromkeys(("key_scale", "value_scale", "partial_output", "partial_lse"), "fp32"),
    **dict.fromkeys(("chunk_start_loc", "chunk_seq_lens", "chunk_block_table", "bands"), "i32"),
}


def attend(capability: int, head_size: int, group: int, page: int, cache_dtype: str) -> Case:
    cache_size = 2 if cache_dtype == "bf16" else 1
    tiles = triton_fwd.Tiles.choose(head_size, group, 2, cache_size, divmod(capability, 10))
    constants = {
        "HQ": 2 * group,
        "GROUP": group,
        "HEADS": tiles.heads,
        "PARTS": triton.cdiv(group, tiles.heads),
        "D": head_size,
        "D_PADDED": triton.next_power_of_2(head_size),
        "PAGE": page,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_N": tiles.block_n,
        "LAGS": tiles.lags,
        "SPLITS": 4,
        "HAS_WINDOW": head_size < 512,
        "HAS_SOFTCAP": False,
        "HAS_KEY_SCALE": cache_dtype != "bf16",
        "HAS_VALUE_SCALE": cache_dtype != "bf16",
    }
    return Case(
        capability,
        triton_fwd._attention_kernel,
        POINTERS | dict.fromkeys(("key_cache", "value_cache"), cache_dtype),
        constants,
        floats=("scale", "softcap"),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        multiplies=True,
        loads_ahead=True,
    )


def join(capability: int, head_size: int, group: int) -> Case:
    padded = triton.next_power_of_2(head_size)
    sizes = {"HQ": 2 * group, "D": head_size, "D_PADDED": padded, "SPLITS": 4, "SPLITS_PADDED": 4}
    return Case(capability, triton_fwd._join_kernel, POINTERS, sizes)


def cut(capability: int, page: int) -> Case:
    constants = {"CHUNK": chunks.CHUNK, "PAGE": page, "PAGES_A_STEP": 128}
    return Case(capability, chunks._cut_kernel, POINTERS, constants)


CASES: dict[str, Case] = {}
for name, (capability, head_size, group, page, cache_dtype) in SHAPES.items():
    CASES[name] = attend(capability, head_size, group, page, cache_dtype)
    CASES[f"{name}, join"] = join(capability, head_size, group)
    CASES[f"{name}, cut"] = cut(capability, page)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.parametrize("case", CASES)
def test_uses_the_tensor_cores_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(CASES[case], compiled[case])
