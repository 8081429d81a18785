"""Writes the table of `vllm_dllm/compat/patches.py` into `docs/upstream/README.md`.

python scripts/upstream_table.py
"""

from pathlib import Path

from vllm_dllm.compat.patches import PATCHES, ROOMS, Patch

PAGE = Path(__file__).parents[1] / "docs" / "upstream" / "README.md"
BEGIN, END = "<!-- patches -->", "<!-- end of patches -->"


def main() -> None:
    PAGE.write_text(replace_table(PAGE.read_text()))


def replace_table(page: str) -> str:
    """Returns `page` with the current table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def table() -> str:
    """Returns the table in Markdown."""
    lines = [f"{len(PATCHES)} names:", ""]
    lines += ["| We replace | Needed for | Ends with |", "|---|---|---|"]
    for room, patches in ROOMS.items():
        lines += [f"| **{room}** | | |", *map(row, patches)]
    return "\n".join(lines) + "\n"


def row(patch: Patch) -> str:
    """Returns a patch's row."""
    module, _, name = patch.target.partition(":")
    entry = "an entry of " if name.endswith("[]") else ""
    versions = f" (from {patch.since})" if patch.since != "0" else ""
    versions += f" (before {patch.until})" if patch.until else ""
    place = f"{entry}`{name.removesuffix('[]')}` in `{module}`{versions}"
    return f"| {place} | {patch.why} | {patch.upstream} |"


if __name__ == "__main__":
    main()
