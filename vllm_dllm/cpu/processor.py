"""What Linux says of the machine's processor."""

from pathlib import Path

import torch


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the names of this processor's extensions, sorted. `cpuinfo`: Linux' file of them."""
    if names := _value_of_first_processor(cpuinfo, ("flags", "Features")):  # on x86 and Arm
        return " ".join(sorted(names.split()))
    return str(sorted(torch.cpu.get_capabilities().items()))


def cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the vendor, `AuthenticAMD` or `GenuineIntel`; "" if unknown, as on Arm."""
    return _value_of_first_processor(cpuinfo, ("vendor_id",)) or ""


def _value_of_first_processor(cpuinfo: Path, names: tuple[str, ...]) -> str | None:
    """Returns the value in the first line of `cpuinfo` that is about one of `names`, or None."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return None
