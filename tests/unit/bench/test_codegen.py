"""The table of what the GPU kernels compile to: it is of this code, keeps the rules, and is what
the Triton installed here makes. No GPU is needed."""

import json
from dataclasses import replace

import pytest
import triton

from bench.codegen import sass, table
from bench.codegen.case import CHIPS, Case
from bench.codegen.kernels import cases
from bench.codegen.rules import broken
from tests.paths import ROOT
from tests.processes import output_of

ROWS = table.read()
CASES = {(name, chip): case for chip in CHIPS for name, case in cases(chip).items()}
VERSIONS = sorted({row.triton for row in ROWS})
# Seconds each; the rest is held by their digests.
COMPILED_HERE = (
    "sm_80 self-conditioning, add_needed, bf16",
    "sm_90 attention, sliding layer, fp8",
    "sm_100 vocabulary, read_blocks",
    "sm_120 attention, full layer, bf16",
)


def compile_apart(*arguments: str) -> str:
    """In a process of its own: this one may have Triton's functions in the interpreter."""
    return output_of(*arguments, variables={"PYTHONPATH": str(ROOT)})


def test_each_version_has_a_row_for_each_kernel_and_chip() -> None:
    assert len(VERSIONS) == 2 and triton.__version__ in VERSIONS
    assert {row.key for row in ROWS} == {(*key, v) for key in CASES for v in VERSIONS}
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_rows_are_of_this_code() -> None:
    stale = [row.key for row in ROWS if row.source != CASES[row.kernel, row.chip].source]
    assert not stale, "run `make codegen`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(map(str, row.key)))
def test_the_code_keeps_the_rules(row: table.Row) -> None:
    assert not broken(CASES[row.kernel, row.chip], row.chip, row.facts)


@pytest.mark.slow
def test_the_table_is_what_triton_makes_here() -> None:
    printed = compile_apart("-m", "bench.codegen", "--print", *COMPILED_HERE)
    made = {(row["kernel"], row["chip"]): row["facts"] for row in json.loads(printed)}
    assert len(made) == len(COMPILED_HERE)
    written = {row.key: row.facts for row in ROWS}
    for (kernel, chip), facts in made.items():
        assert sass.Facts(**facts) == written[kernel, chip, triton.__version__], kernel


SPILLING = """
import json
from dataclasses import replace
from bench.codegen.kernels import cases
from bench.codegen.rules import broken
from bench.codegen.sass import facts

case = replace(cases(90)["vocabulary, read_blocks"], options={"maxnreg": 32})
compiled = case.compile(90)
found = facts(compiled, 4, case.loop_flops)
print(json.dumps([broken(case, 90, found), compiled.asm["ptx"].count("ld.local")]))
"""


@pytest.mark.slow
def test_a_kernel_that_spills_is_found_though_its_ptx_does_not_say_so() -> None:
    (reason, *_), in_ptx = json.loads(compile_apart("-c", SPILLING))
    assert reason.startswith("registers spill in the main loop")
    assert in_ptx == 0


CODE = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
.L_x_2:
        /*0030*/                   STL [R1], R2 ;
.L_x_1:
        /*0040*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0070*/                   LDL.LU R2, [R1] ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/               @P2 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
"""


def test_the_main_loop_is_the_innermost_that_multiplies() -> None:
    loop = sass.main_loop(sass.read_code(CODE))
    assert [each.name for each in loop] == ["LDGSTS", "HGMMA", "HMMA", "LDL", "BRA"]


def test_products_are_counted_for_all_warps() -> None:
    loop = sass.main_loop(sass.read_code(CODE))
    assert sass.products(loop, 8) == 2 * 64 * 256 * 16 * 2 + 2 * 16 * 8 * 16 * 8


TCGEN05 = """
        /*0000*/  UMOV UR5, 0x8400490 ;
        /*0010*/  UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR9], tmem[UR4], idesc[UR5], !UPT ;
        /*0020*/  UMOV UR5, 0x4080490 ;
        /*0030*/  UTCHMMA tmem[UR7], gdesc[UR6], tmem[UR9], tmem[UR4], idesc[UR5], UPT ;
"""


def test_the_shape_of_a_product_of_tcgen05_is_in_a_register() -> None:
    """The descriptor holds rows / 16 from bit 24 and columns / 8 from bit 17 on."""
    loop = sass.main_loop(sass.read_code(TCGEN05))
    assert sass.products(loop, 8) == 2 * 128 * 256 * 16 + 2 * 64 * 32 * 16


@pytest.mark.parametrize("other", ["R2UR UR5, R7 ;", "UIADD3 UR5, UR5, 0x1, URZ ;"])
def test_a_shape_that_is_no_constant_is_not_guessed(other: str) -> None:
    code = TCGEN05.replace("UMOV UR5, 0x4080490 ;", other)
    assert sass.products(sass.main_loop(sass.read_code(code)), 8) == 0


def facts(**changes: object) -> sass.Facts:
    good = sass.Facts(128, 0, 1024, 500, 0, 0, 16, 0, 8, "wgmma", 1.0)
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"stack_bytes": 8}, None),
        ({"local_loads": 1}, "registers spill in the main loop: 1 loads, 0 stores"),
        ({"shared_bytes": 228 * 1024}, "233472 bytes of shared memory, the chip has 232448"),
        ({"units": "mma"}, "expected wgmma to multiply, got mma"),
        ({"asynchronous_loads": 0}, "nothing is read ahead, 0 loads are waited for"),
        ({"times_needed": 1.5}, "warps repeat each other's work: 1.5 times what is needed"),
    ],
)
def test_rules(changes: dict[str, object], reason: str | None) -> None:
    case = Case(None, {}, {}, multiplies=True, loads_ahead=True)
    assert broken(case, 90, facts(**changes)) == ([] if reason is None else [reason])


def test_what_may_spill_does() -> None:
    spilling = {row.key[:2] for row in ROWS if row.facts.local_loads + row.facts.local_stores}
    assert {key for key, case in CASES.items() if case.spills} <= spilling


def test_a_table_is_read_as_it_was_written(tmp_path) -> None:
    rows = [
        table.Row("one", 90, "3.9.0", "abcd1234", facts()),
        table.Row("one", 90, "3.7.1", "abcd1234", facts(times_needed=None, units="none")),
    ]
    table.write(rows, tmp_path / "table.md")
    assert table.read(tmp_path / "table.md") == rows
