"""What a compiled kernel does on the chip, read from its machine code (SASS).

Registers that spill are seen here alone: Triton's PTX has registers without end, and it is ptxas
that runs out of them. `cuobjdump` and `nvdisasm` come with Triton.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a warp group on Hopper, of a CTA on data-centre Blackwell, of a warp elsewhere.
MULTIPLY = {"HGMMA": "wgmma", "QGMMA": "wgmma", "UTCHMMA": "tcgen05", "UTCQMMA": "tcgen05"}
MULTIPLY |= {"HMMA": "mma", "QMMA": "mma", "OMMA": "mma"}
ASYNCHRONOUS = ("LDGSTS", "UBLKCP", "UTMALDG")  # cp.async, bulk copies, TMA
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)(.*)")
_LABEL = re.compile(r"(\.L_x_\w+):")
_BRANCH_TARGET = re.compile(r"`\((\.L_x_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    name: str
    modifiers: str
    operands: str


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
    """Instructions, and labels as strings, in order."""
    code: list[Instruction | str] = []
    for line in disassembly.splitlines():
        if found := _INSTRUCTION.search(line):
            code.append(Instruction(*found.groups()))
        elif found := _LABEL.match(line.strip()):
            code.append(found[1])
    return code


def main_loop(code: Sequence[Instruction | str]) -> list[Instruction]:
    """The innermost loop that multiplies most; of loops without products the one that loads most.
    All of the code if it has no loop."""
    loops = list(_loops(code)) or [_instructions(code)]
    return max(loops, key=lambda loop: (*_weights(loop), -len(loop)))


def products(loop: Iterable[Instruction], num_warps: int) -> int:
    """Floating-point operations of a program's products in a pass of the loop; 0 for units whose
    shape the code does not say."""
    flops = 0
    for instruction in loop:
        if found := re.match(r"\.64x(\d+)x(\d+)", instruction.modifiers):
            # "HGMMA.64x256x16": rows, columns and depth of a warp group's
            flops += 2 * 64 * int(found[1]) * int(found[2]) * (num_warps // 4)
        elif found := re.match(r"\.(16|8)(8)(\d{1,2})\b", instruction.modifiers):
            # "HMMA.16816": of a warp
            rows, columns, depth = map(int, found.groups())
            flops += 2 * rows * columns * depth * num_warps
    return flops


def _loops(code: Sequence[Instruction | str]) -> Iterable[list[Instruction]]:
    """From each label to each branch back to it."""
    places = {item: i for i, item in enumerate(code) if isinstance(item, str)}
    for i, item in enumerate(code):
        if isinstance(item, str) or item.name not in ("BRA", "UBRA"):
            continue
        for label in _BRANCH_TARGET.findall(item.operands):
            if places.get(label, i) < i - 1:  # the code ends in a branch to itself
                yield _instructions(code[places[label] : i + 1])


def _instructions(code: Iterable[Instruction | str]) -> list[Instruction]:
    return [item for item in code if isinstance(item, Instruction)]


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
