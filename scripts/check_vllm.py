"""Says whether another version of vLLM still has everything that this project needs of it.

    python scripts/check_vllm.py 0.33.0            # fetches its wheel, about 340 MB
    python scripts/check_vllm.py path/to/vllm      # or looks in a folder that is there

Its sources are read, not run, so this finds what is gone or has moved: imports, the lines that
`vllm_dllm/compat` hangs on, and the parameters of kernels and methods. What they do is tested by
`scripts/try_vllm.py`.
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
        return check(package if package.is_dir() else fetch(vllm, Path(folder)))


def check(package: Path) -> int:
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


def fetch(version: str, folder: Path) -> Path:
    """Downloads vLLM's wheel for GPUs and unpacks what is not compiled into `folder`: of the source
    package, pip would want to build the metadata, and for that PyTorch and a compiler."""
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
