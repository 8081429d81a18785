"""What the machine code of every kernel must be like."""

from attention_kernels.support import shared_bytes
from bench.codegen.case import Case
from bench.codegen.sass import Facts

UNITS = {90: "wgmma", 100: "tcgen05"}  # on others mma


def broken(case: Case, chip: int, facts: Facts) -> list[str]:
    """The rules that the code breaks, in words."""
    reasons = []
    if facts.local_loads + facts.local_stores and not case.spills:
        reasons.append(
            f"registers spill in the main loop: {facts.local_loads} loads, "
            f"{facts.local_stores} stores"
        )
    if facts.shared_bytes > (most := shared_bytes((chip // 10, chip % 10))):
        reasons.append(f"{facts.shared_bytes} bytes of shared memory, the chip has {most}")
    if case.multiplies and facts.units != (wanted := UNITS.get(chip, "mma")):
        reasons.append(f"expected {wanted} to multiply, got {facts.units}")
    if case.loads_ahead and not facts.asynchronous_loads:
        reasons.append(f"nothing is read ahead, {facts.loads} loads are waited for")
    times = facts.times_needed
    if times is not None and times > 1 and times != case.passes:
        reasons.append(f"warps repeat each other's work: {times} times what is needed")
    return reasons
