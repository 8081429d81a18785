"""The table that `vllm-dllm quantize --dry-run` prints."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from vllm_dllm.quantization.schemes import GROUP_SIZE, INT4_GROUP_SIZE
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize.plan import Linear, Plan


def quantized_bytes(linear: Linear, scheme: str) -> int:
    """Counts the bytes of a linear's tensors in the quantised checkpoint."""
    out, width = linear.shape
    if scheme in ("fp8-dynamic", "int8"):
        return out * width + 4 * out  # weight, fp32 scale for each row
    if scheme == "w4a16":
        return out * width // 2 + 2 * out * (width // INT4_GROUP_SIZE) + 16  # bf16 scales, shape
    return out * width // 2 + out * width // GROUP_SIZE + 4 + 4  # and the two global scales


def describe(plan: Plan, tensors: Mapping[str, TensorInfo]) -> str:
    """Makes a table of what is quantised, what is left and why, with sizes before and after."""
    lines = [f"{'quantised to ' + plan.scheme:52} {'linears':>8} {'before':>10} {'after':>10}"]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in plan.quantized:
        kinds[re.sub(r"layers\.\d+", "layers.*", name)].append(name)
    before = after = 0
    for kind, names in sorted(kinds.items()):
        linears = [linear for name in names for linear in plan.quantized[name]]
        old = sum(tensors[name].num_bytes for name in names)
        new = sum(quantized_bytes(linear, plan.scheme) for linear in linears)
        before, after = before + old, after + new
        layers = _ranges(int(name.partition("layers.")[2].partition(".")[0]) for name in names)
        label = kind.removesuffix(".weight").replace("*", layers)
        lines.append(f"  {label:50} {len(linears):8} {_size(old)} {_size(new)}")
    lines.append(f"  {'total':50} {'':8} {_size(before)} {_size(after)} {after / before:7.3f}x")
    lines += ["", f"{'left as it is':52} {'tensors':>8} {'size':>10}"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.kept.items():
        reasons[reason].append(name)
    rest = 0
    for reason, names in sorted(reasons.items()):
        size = sum(tensors[name].num_bytes for name in names)
        rest += size
        lines.append(f"  {reason:50} {len(names):8} {_size(size)}")
    before, after = before + rest, after + rest
    lines += ["", f"{'checkpoint':61} {_size(before)} {_size(after)} {after / before:7.3f}x"]
    return "\n".join(lines)


def _ranges(numbers: Iterable[int]) -> str:
    """Writes 0, 1, 3 as {0-1,3}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs) + "}"


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:6.4g} {units[0]:3}"
