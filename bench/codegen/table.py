"""`attention_kernels/CODEGEN.md`: a row for each kernel, chip and version of Triton."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench.codegen.sass import Facts

PATH = Path(__file__).parents[2] / "attention_kernels/CODEGEN.md"
KEYS = ("kernel", "chip", "Triton", "source")
HEADINGS = {
    "registers": "registers",
    "stack_bytes": "stack B",
    "shared_bytes": "shared B",
    "instructions": "instructions",
    "local_loads": "LDL",
    "local_stores": "STL",
    "multiplications": "MMA",
    "loads": "LDG",
    "asynchronous_loads": "async",
    "units": "units",
    "times_needed": "× needed",
}
assert tuple(HEADINGS) == tuple(field.name for field in fields(Facts))
_INTRODUCTION = """\
# What Triton makes of the kernels

Read from the machine code (SASS) of each kernel, compiled at the shapes of the 26B model. No GPU is
needed. `make codegen` writes this file; do not edit it. A test compiles some of the kernels anew,
compares them with it, and holds all rows to the rules of `bench/codegen/rules.py`.
sm_80 is the A100, sm_90 H100 and H200, sm_100 B200, sm_120 the RTX 50 and RTX PRO 6000.

Triton {triton} are compared: what `pip install 'vllm-dllm[cuda]'` brings, and the
Triton of the CPU environment.

- `source`: digest of what was compiled. A row with another digest than the code's is out of date.
- `stack B`: bytes of a thread that do not fit the registers; they cost little outside of the loop.
- From `instructions` on: of the main loop, or of the whole kernel if it has none. `LDL`, `STL`:
  loads and stores of what was spilled. `async`: loads that nobody waits for (LDGSTS, UBLKCP,
  UTMALDG); `LDG`: the others.
- `units`: that multiply. mma: a warp's registers; wgmma: a group of four warps; tcgen05: one thread
  for all warps.
- `× needed`: multiplications made by multiplications needed. Warps that repeat each other's work
  show as more than 1.

"""


@dataclass(frozen=True)
class Row:
    kernel: str
    chip: int
    triton: str
    source: str
    facts: Facts

    @property
    def key(self) -> tuple[str, int, str]:
        return self.kernel, self.chip, self.triton


def read(path: Path = PATH) -> list[Row]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("kernel", "---"):
            continue
        kernel, chip, triton, source, *values = cells
        found = dict(zip(HEADINGS, values, strict=True))
        ratio = found["times_needed"]
        facts = Facts(
            **{
                name: int(value)
                for name, value in found.items()
                if name not in ("units", "times_needed")
            },
            units=found["units"],
            times_needed=float(ratio) if ratio else None,
        )
        rows.append(Row(kernel, int(chip.removeprefix("sm_")), triton, source, facts))
    return rows


def write(rows: Iterable[Row], path: Path = PATH) -> None:
    """In the order given."""
    rows = list(rows)
    versions = sorted({row.triton for row in rows})
    headings = (*KEYS, *HEADINGS.values())
    lines = [_line(headings), _line(["---"] * len(headings))]
    for row in rows:
        values = ("" if value is None else value for value in asdict(row.facts).values())
        lines.append(_line((row.kernel, f"sm_{row.chip}", row.triton, row.source, *values)))
    text = _INTRODUCTION.format(triton=" and ".join(versions)) + "\n".join(lines) + "\n"
    path.write_text(text)


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
