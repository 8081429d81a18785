"""The C++ norm against vLLM's definition, on the layouts a Gemma4 layer hands it."""

import pytest
import torch
from vllm import ir
from vllm.platforms import current_platform

from tests import tolerances
from vllm_dllm.cpu import compilation

pytestmark = pytest.mark.numerics

current_platform.import_kernels()
compilation.register_cpp_norm()

LAYOUTS = {
    "rows": torch.randn(64, 128),
    "one-row": torch.randn(1, 96),
    "slice-of-qkv": torch.randn(64, 96)[:, 32:64].unflatten(-1, (1, 32)),
    "transposed": torch.randn(3, 4, 32).transpose(0, 1),
}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_definition(name: str, weighted: bool) -> None:
    x = LAYOUTS[name]
    weight = torch.rand(x.shape[-1]) if weighted else None
    implementations = ir.ops.rms_norm.impls
    ours = implementations[compilation.NORM_PROVIDER]
    assert ours.supports_args(x, weight, 1e-6)
    expected = implementations["native"].impl_fn(x, weight, 1e-6)
    allowed = tolerances.within(2 * tolerances.norm(x.shape[-1]))  # of either of the two
    torch.testing.assert_close(ours.impl_fn(x, weight, 1e-6), expected, **allowed)


def test_16_bit_types_are_left_to_the_definition() -> None:
    x = LAYOUTS["rows"].bfloat16()
    assert not ir.ops.rms_norm.impls[compilation.NORM_PROVIDER].supports_args(x, None, 1e-6)
