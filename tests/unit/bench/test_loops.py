"""Which instructions of machine code are a loop."""

from bench.codegen.loops import innermost
from bench.codegen.sass import main_loop, read_code

WAITS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0040*/                   FADD R2, R2, R3 ;
        /*0050*/                   BRA.U UP0, `(.L_x_0) ;
        /*0060*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0070*/                   UTCHMMA gdesc[UR8], gdesc[UR6], tmem[UR4], tmem[UR10] ;
        /*0080*/                   EXIT ;
.L_x_2:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*00a0*/              @!P0 BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
"""


NESTED = """
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def names(code: str, *wanted: str) -> list[list[str]]:
    return [[each.name for each in loop] for loop in innermost(read_code(code), wanted)]


def test_what_jumps_back_into_a_loop_does_not_make_one_of_the_code_behind_it() -> None:
    whole = ["UTCHMMA", "SYNCS", "BRA", "FADD", "BRA", "SYNCS", "BRA", "BRA"]
    assert names(WAITS, "UTCHMMA") == [whole]
    assert names(WAITS, "SYNCS") == [["SYNCS", "BRA"]]
    assert [each.name for each in main_loop(read_code(WAITS))] == whole


def test_a_loop_around_another_one_is_not_the_main_loop() -> None:
    """Of a pipelined loop, passes before and after it may stand in the loop around it."""
    assert [each.name for each in main_loop(read_code(NESTED))] == ["HMMA", "BRA"]


def test_code_without_a_loop_is_taken_whole() -> None:
    code = "/*0000*/ IADD3 R1, R1, 1 ;\n/*0010*/ EXIT ;\n"
    assert names(code, "IADD3") == []
    assert [each.name for each in main_loop(read_code(code))] == ["IADD3", "EXIT"]
