"""What Triton makes of the sampler's kernels, compiled where there is no GPU."""

import pytest

from bench.codegen import kernels
from bench.codegen.case import Case
from tests.triton_for_gpus import check, compile_apart

CASES: dict[str, tuple[int, Case]] = {}
for chip in (80, 90, 100):
    CASES[f"sm_{chip} add_needed"] = chip, kernels.add_needed("bf16")
    CASES[f"sm_{chip} add_needed in fp32"] = chip, kernels.add_needed("fp32")
    CASES[f"sm_{chip} read_blocks"] = chip, kernels.read_blocks()
    CASES[f"sm_{chip} join_blocks"] = chip, kernels.join_blocks()
    CASES[f"sm_{chip} weigh"] = chip, kernels.weigh()
    CASES[f"sm_{chip} temperature and noise"] = chip, kernels.draw()
    CASES[f"sm_{chip} settle"] = chip, kernels.settle()
    CASES[f"sm_{chip} store_soft"] = chip, kernels.store_soft()
    CASES[f"sm_{chip} pre_norm"] = chip, kernels.pre_norm()
    CASES[f"sm_{chip} gate"] = chip, kernels.gate()
    CASES[f"sm_{chip} post_norm"] = chip, kernels.post_norm()


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    return compile_apart(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    check(*CASES[case], compiled[case])
