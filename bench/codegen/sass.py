"""What a compiled kernel does on the chip, read from its machine code (SASS).

Registers that spill are seen here alone: Triton's PTX has registers without end, and it is ptxas
that runs out of them. `cuobjdump` and `nvdisasm` come with Triton.
"""

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.codegen.loops import Code, Instruction, innermost

# Of a warp group on Hopper, of a CTA on data-centre Blackwell, of a warp elsewhere.
MULTIPLY = {"HGMMA": "wgmma", "QGMMA": "wgmma", "UTCHMMA": "tcgen05", "UTCQMMA": "tcgen05"}
MULTIPLY |= {"HMMA": "mma", "QMMA": "mma", "OMMA": "mma"}
ASYNCHRONOUS = ("LDGSTS", "UBLKCP", "UTMALDG")  # cp.async, bulk copies, TMA
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)(.*)")
_LABEL = re.compile(r"(\.L_x_\w+):")
# tcgen05 finds rows, columns and types in a register: PTX ISA, "Instruction descriptor".
_DESCRIPTOR = re.compile(r"idesc\[(UR\d+)\]")
_CONSTANT = re.compile(r"\s*(UR\d+), (0x[0-9a-f]+) ;")


@dataclass(frozen=True)
class Facts:
    registers: int  # of a thread
    stack_bytes: int  # of a thread, for what does not fit the registers
    shared_bytes: int
    instructions: int  # here and below: of the main loop, or of a kernel without one
    local_loads: int
    local_stores: int
    multiplications: int
    loads: int  # from global memory, that a thread waits for
    asynchronous_loads: int
    units: str  # that multiply: wgmma, tcgen05, mma, none
    times_needed: float | None  # products made by products needed; None: not known


def facts(compiled: Any, num_warps: int, loop_flops: int) -> Facts:
    """Of what `triton.compile` returns."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = read_code(_run("nvdisasm", "-c", file.name))
    loop = main_loop(code)
    counts = Counter(instruction.name for instruction in loop)
    units = {MULTIPLY[name] for name in counts if name in MULTIPLY}
    made = products(loop, num_warps)
    return Facts(
        registers=_number(r"REG:(\d+)", usage),
        stack_bytes=_number(r"STACK:(\d+)", usage),
        shared_bytes=compiled.metadata.shared,
        instructions=len(loop),
        local_loads=counts["LDL"],
        local_stores=counts["STL"],
        multiplications=sum(counts[name] for name in MULTIPLY),
        loads=counts["LDG"],
        asynchronous_loads=sum(counts[name] for name in ASYNCHRONOUS),
        units=" and ".join(sorted(units)) or "none",
        times_needed=round(made / loop_flops, 2) if made and loop_flops else None,
    )


def read_code(disassembly: str) -> list[Instruction | str]:
    """Instructions, and labels as strings, in order. Those of tcgen05 get the shape that they
    multiply as a modifier, as Hopper's have it, where it is a constant."""
    code: list[Instruction | str] = []
    constants: dict[str, int] = {}  # of registers
    for line in disassembly.splitlines():
        if found := _INSTRUCTION.search(line):
            predicate, name, modifiers, operands = found.groups()
            if name == "UMOV" and (constant := _CONSTANT.match(operands)):
                constants[constant[1]] = int(constant[2], 16)
            elif MULTIPLY.get(name) == "tcgen05":
                modifiers += _shape(name, constants.get(_described(operands)))
            else:
                constants.pop(operands.strip().partition(",")[0], None)
            code.append(Instruction(name, modifiers, operands, predicate or ""))
        elif found := _LABEL.match(line.strip()):
            code.append(found[1])
    return code


def _described(operands: str) -> str:
    """The register with the descriptor; "" if there is none."""
    found = _DESCRIPTOR.search(operands)
    return found[1] if found else ""


def _shape(name: str, descriptor: int | None) -> str:
    if descriptor is None:
        return ""
    rows, columns = (descriptor >> 24 & 31) << 4, (descriptor >> 17 & 63) << 3
    return f".{rows}x{columns}x{32 if name == 'UTCQMMA' else 16}"


def main_loop(code: Code) -> list[Instruction]:
    """The innermost loop that multiplies most; of loops without products the one that loads most.
    All of the code if it has no loop."""
    whole = [item for item in code if isinstance(item, Instruction)]
    loops = innermost(code, MULTIPLY) or innermost(code, ("LDG", *ASYNCHRONOUS)) or [whole]
    return max(loops, key=lambda loop: (*_weights(loop), -len(loop)))


def products(loop: Iterable[Instruction], num_warps: int) -> int:
    """Floating-point operations of a program's products in a pass of the loop; 0 if the code does
    not say their shape."""
    flops = 0
    for instruction in loop:
        if found := re.match(r"\.(\d+)x(\d+)x(\d+)", instruction.modifiers):
            # "HGMMA.64x256x16": rows, columns and depth of a warp group's; tcgen05: of a CTA's
            times = num_warps // 4 if MULTIPLY.get(instruction.name) == "wgmma" else 1
            flops += 2 * math.prod(map(int, found.groups())) * times
        elif MULTIPLY.get(instruction.name) == "tcgen05":
            return 0
        elif found := re.match(r"\.(16|8)(8)(\d{1,2})\b", instruction.modifiers):
            # "HMMA.16816": of a warp
            rows, columns, depth = map(int, found.groups())
            flops += 2 * rows * columns * depth * num_warps
    return flops


def _weights(loop: Sequence[Instruction]) -> tuple[int, int]:
    names = Counter(instruction.name for instruction in loop)
    loads = names["LDG"] + sum(names[name] for name in ASYNCHRONOUS)
    return sum(names[name] for name in MULTIPLY), loads


def _run(tool: str, *arguments: str) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    process = subprocess.run([folder / tool, *arguments], capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{tool} of Triton {triton.__version__} failed: {process.stderr}")
    return process.stdout + process.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"expected {pattern} in what cuobjdump prints, got {text!r}")
    return int(found[1])
