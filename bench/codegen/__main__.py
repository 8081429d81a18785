"""Writes `attention_kernels/CODEGEN.md` with the Triton that is imported, and keeps its other rows.

make codegen                                     # with each version that the file compares
python -m bench.codegen                          # what is out of date, for this Triton
python -m bench.codegen --all
python -m bench.codegen --print 'sm_90 attention, full layer, bf16'   # JSON, writes nothing
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the table is of the default

import triton

from bench.codegen import table
from bench.codegen.case import CHIPS, Case
from bench.codegen.kernels import cases
from bench.codegen.rules import broken
from bench.codegen.sass import facts
from bench.codegen.table import Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="what is up to date, too")
    parser.add_argument(
        "--print", nargs="+", metavar="NAME", help="'sm_90 attention, full layer, bf16'"
    )
    options = parser.parse_args()
    if options.print is None:
        update(options.all)
        return
    rows = [
        compiled(name, chip, case)
        for chip, name, case in _all()
        if f"sm_{chip} {name}" in options.print
    ]
    print(json.dumps([asdict(row) for row in rows]))


def update(anew: bool) -> None:
    """Written after each kernel: what is done is not lost."""
    known = {row.key: row for row in table.read()}
    order = {(name, chip): i for i, (chip, name, _) in enumerate(_all())}
    known = {key: row for key, row in known.items() if key[:2] in order}
    for chip, name, case in _all():
        key = (name, chip, triton.__version__)
        if not anew and key in known and known[key].source == case.source:
            continue
        row = known[key] = compiled(name, chip, case)
        print(f"sm_{chip} {name}: {row.facts}", file=sys.stderr)
        for reason in broken(case, chip, row.facts):
            print(f"  {reason}", file=sys.stderr)
        table.write(sorted(known.values(), key=lambda row: (order[row.key[:2]], row.triton)))


def compiled(name: str, chip: int, case: Case) -> Row:
    num_warps = case.options.get("num_warps", 4)
    found = facts(case.compile(chip), num_warps, case.loop_flops)
    return Row(name, chip, triton.__version__, case.source, found)


def _all() -> Iterator[tuple[int, str, Case]]:
    for chip in CHIPS:
        for name, case in cases(chip).items():
            yield chip, name, case


if __name__ == "__main__":
    main()
