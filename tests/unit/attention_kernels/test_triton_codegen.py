"""What Triton makes of the kernels for Hopper and Blackwell, compiled where there is no GPU."""

import pytest

from bench.codegen.attention import attend, cut
from bench.codegen.case import Case
from tests.triton_for_gpus import check, compile_apart

SHAPES = {  # chip, head size, query heads a key head, page, cache dtype
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
CASES: dict[str, tuple[int, Case]] = {}
for name, (chip, head_size, group, page, cache_dtype) in SHAPES.items():
    CASES[name] = chip, attend(chip, head_size, group, page, cache_dtype)
    CASES[f"{name}, cut"] = chip, cut(page)
    if not name.endswith(("fp8", "group")):
        CASES[f"{name}, images"] = (
            chip,
            attend(chip, head_size, group, page, cache_dtype, images=True),
        )
        CASES[f"{name}, cut, images"] = chip, cut(page, images=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_uses_the_tensor_cores_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(*CASES[case], compiled[case])
