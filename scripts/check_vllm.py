"""Checks whether another version of vLLM still has everything that this project needs.

    python scripts/check_vllm.py 0.33.0            # fetches its wheel, about 340 MB
    python scripts/check_vllm.py path/to/vllm      # or looks in a folder that is there

Its sources are read, not run, so this finds what is gone or has moved: imports, the lines that
`vllm_dllm/compat` depends on, and the parameters of kernels and methods. `scripts/try_vllm.py`
tests what they do.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vllm", help="a version, or the folder of the package")
    vllm = parser.parse_args().vllm
    with tempfile.TemporaryDirectory() as folder:
        package = Path(vllm)
        return check_sources(package if package.is_dir() else fetch_wheel(vllm, Path(folder)))


def check_sources(package: Path) -> int:
    """Prints what has changed in a copy of vLLM. Returns 1 if anything has to be looked at."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import vllm

    from scripts.vllm_seams import CHECKS, Sources, rewritten_kernels

    sources, installed = Sources(package), Sources(Path(vllm.__file__).parent)
    for kernel in rewritten_kernels(sources, installed):
        print(f"Read it: {kernel} differs from vLLM {installed.version}'s.")
    complaints = [(check, line) for check in CHECKS for line in check(sources)]
    for check, line in complaints:
        print(f"{check.__name__}: {line}")
    print(f"vLLM {sources.version}: {len(complaints) or 'nothing'} to look at.")
    return int(len(complaints) > 0)


def fetch_wheel(version: str, folder: Path) -> Path:
    """Downloads vLLM's wheel for GPUs and unpacks its Python files into `folder`. (pip would build
    the metadata of the source package, and need PyTorch and a compiler for that.)"""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *platforms]
    command += ["--only-binary=:all:", "--dest", str(folder), f"vllm=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    with ZipFile(wheel) as archive:
        kept = (".py", ".json", ".typed", "METADATA")
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(kept)])
    wheel.unlink()
    return folder / "vllm"


if __name__ == "__main__":
    sys.exit(main())
