"""Which reductions a compiled graph makes in one pass."""

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from vllm.config.utils import normalize_value

from vllm_dllm.compat.row_reductions import SETTINGS, RowsInRegisters

INNER, OUTER = ReductionHint.INNER, ReductionHint.OUTER


def features(length: int, hint: ReductionHint) -> SIMDKernelFeatures:
    kernel = SIMDKernelFeatures([], sympy.Symbol("rows"), sympy.Integer(length))
    kernel.get_reduction_hint = lambda *_: hint
    return kernel


@pytest.mark.parametrize(
    ("length", "hint", "ours", "inductor_s"),
    [
        (1024, INNER, True, True),
        (2816, INNER, True, False),
        (4096, INNER, True, False),
        (8192, INNER, False, False),
        (2816, OUTER, False, False),  # columns: a block would hold several
    ],
)
def test_rows_that_fit_registers(
    length: int, hint: ReductionHint, ours: bool, inductor_s: bool
) -> None:
    graph = SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(graph):
        for choices, expected in ((RowsInRegisters(), ours), (InductorChoices(), inductor_s)):
            found = choices.should_use_persistent_reduction(features(length, hint), False)
            assert found == expected


def test_settings_count_in_the_keys_of_caches() -> None:
    """vLLM's and Inductor's, which would else return graphs that were compiled without them."""
    assert normalize_value(SETTINGS) != normalize_value({"inductor_choices_class": None})
    before = torch._inductor.config.save_config_portable()
    with torch._inductor.config.patch(SETTINGS):
        assert torch._inductor.config.save_config_portable() != before
