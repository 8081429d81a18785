"""What an installation of this checkout would leave in a folder of packages, so that vLLM finds the
plugins and the program has a version.

    python -m bench.lease.install FOLDER
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def install(folder: Path) -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    info = folder / f"vllm_dllm-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [("console_scripts", project["scripts"]), *project["entry-points"].items()]
    lines = []
    for name, entries in groups:
        lines += [f"[{name}]", *(f"{entry} = {target}" for entry, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    install(Path(sys.argv[1]))
