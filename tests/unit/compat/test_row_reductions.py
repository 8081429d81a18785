"""Which reductions a compiled graph makes in one pass."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from vllm.config.utils import normalize_value

from vllm_dllm.compat import row_reductions
from vllm_dllm.compat.row_reductions import SETTING, RowsInRegisters, read_rows_once

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


@pytest.fixture
def before() -> Iterator[InductorChoices]:
    """The choices of an earlier compilation in this thread."""
    earlier = InductorChoices()
    with V.set_choices_handler(earlier):
        yield earlier


def config(**settings: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=settings))


def test_an_earlier_compilation_does_not_keep_its_choices(
    before: InductorChoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config()
    read_rows_once(given)
    assert V.choices is before, "on a CPU"
    monkeypatch.setattr(row_reductions, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    read_rows_once(given)
    assert isinstance(V.choices, RowsInRegisters)
    settings = given.compilation_config.inductor_compile_config
    assert settings == {SETTING: RowsInRegisters}
    # vLLM's and Inductor's keys know a graph that was compiled so.
    assert normalize_value(settings) != normalize_value({})
    plain = torch._inductor.config.save_config_portable()
    with torch._inductor.config.patch(settings):
        assert torch._inductor.config.save_config_portable() != plain


def test_a_user_s_choices_stay(before: InductorChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reductions, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    given = config(inductor_choices_class=InductorChoices)
    read_rows_once(given)
    assert V.choices is before
    with torch._inductor.config.patch("triton.persistent_reductions", False):
        graph = SimpleNamespace(sizevars=SizeVarAllocator())
        with V.set_graph_handler(graph):
            row = features(2816, INNER)
            assert not RowsInRegisters().should_use_persistent_reduction(row, False)
