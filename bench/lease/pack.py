"""What two uploads of at most 64 MiB carry to a GPU host without a network: OUT/a and OUT/b.

    bench/lease.sh --pack OUT        # here: a quarter of an hour, 600 MB of downloads

The host has x86-64, Python 3.12, PyTorch 2.11 or later for CUDA, its Triton and torchvision,
transformers 5, numpy, pytest. vLLM 0.33.0 is built for PyTorch 2.14, but the libraries that are
kept use the stable ABI alone. The CuTe DSL, FlashAttention-4's compiler, is NVIDIA's: carry it,
never publish it.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from bench.harness import ROOT
from bench.lease.repack import repack

VLLM = "vllm==0.33.0"
DSL = [
    f"nvidia-cutlass-dsl{part}==4.8.0" for part in ("", "-libs-base", "-libs-core", "-libs-cu13")
]
DSL += ["quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5"]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (5, 17, 24, 27, 28, 31, 34, 35, 39)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2014_x86_64"]
PRUNED = ["pycountry/locales", "nvidia_cutlass_dsl/*/iket"]
PROJECT = ["vllm_dllm", "attention_kernels", "bench", "tests", "checkpoints", "pyproject.toml"]
PROJECT += [":!checkpoints/diffusiongemma-tiny-tools", ":!checkpoints/held_out_tools.jsonl"]
UPLOAD = 64 << 20
# For programs x86 code and a long memory; xz on the host reads both by itself.
XZ = ["xz", "--x86", "--lzma2=preset=9e,dict=192MiB", "--threads=1", "--stdout"]


def download(requirements: Iterable[str], into: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(into)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    subprocess.run([*command, *requirements], check=True)
    return sorted(into.glob("*.whl"))


def compress(tar: Path) -> Path:
    packed = tar.with_suffix(".tar.xz")
    with tar.open("rb") as source, packed.open("wb") as target:
        subprocess.run(XZ, stdin=source, stdout=target, check=True)
    print(f"{packed.name}: {packed.stat().st_size / 2**20:.1f} MiB", flush=True)
    return packed


def unpacked(wheels: Iterable[Path], name: str, folder: Path) -> Path:
    """One archive of what the wheels install."""
    site = folder / name
    for wheel in wheels:
        shutil.unpack_archive(str(wheel), site, "zip")
    for pattern in PRUNED:
        for path in site.glob(pattern):
            shutil.rmtree(path)
    tar = folder / f"{name}.tar"
    with tarfile.open(tar, "w") as archive:
        archive.add(site, ".")
    return compress(tar)


def project(folder: Path) -> Path:
    """What is committed here."""
    tar = folder / "project.tar"
    command = ["git", "archive", "--output", str(tar), "HEAD", *PROJECT]
    subprocess.run(command, cwd=ROOT, check=True)
    return compress(tar)


def bundle(folder: Path) -> list[Path]:
    """The archives, in the order in which the host needs them."""
    (wheel,) = download([VLLM], folder / "wheel")
    tar = folder / "vllm.tar"
    with tarfile.open(tar, "w") as archive:
        repack(wheel, archive)
    packages = (Path(__file__).parent / "packages.txt").read_text().split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    flash = [each for each in extras.get("fa4", []) if each.startswith("flash-attn")]
    return [
        compress(tar),
        unpacked(download(packages, folder / "packages"), "site", folder),
        unpacked(download([*DSL, *flash], folder / "dsl-wheels"), "dsl", folder),
    ]


def split(archives: Iterable[Path], rooms: dict[Path, int]) -> None:
    """Cuts archives so that the uploads, folders with room for so many bytes, are full one after
    the other. NAME.parts says how many parts an archive has.

    Raises:
        ValueError: they do not fit.
    """
    rooms = dict(rooms)
    for archive in archives:
        name, data, parts = archive.name.removesuffix(".tar.xz"), archive.read_bytes(), 0
        for upload, room in rooms.items():
            if data and room > 0:
                upload.mkdir(parents=True, exist_ok=True)
                head, data = data[:room], data[room:]
                (upload / f"{archive.name}.{parts}").write_bytes(head)
                rooms[upload] -= len(head)
                parts += 1
        if data:
            raise ValueError(
                f"expected {name} to fit what is left of the uploads, got {len(data)} bytes too "
                f"many: leave some checkpoints out of PROJECT."
            )
        for upload in rooms:
            if list(upload.glob(f"{archive.name}.*")):
                (upload / f"{name}.parts").write_text(f"{parts}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vllm, site, dsl = bundle(Path(folder))
        code = project(Path(folder))
        (args.out / "a").mkdir(parents=True, exist_ok=True)
        shutil.copy(code, args.out / "a")  # whole: it has the program that unpacks the others
        spare = 1 << 16  # of file system and names
        left = UPLOAD - spare - code.stat().st_size
        split([vllm, site, dsl], {args.out / "a": left, args.out / "b": UPLOAD - spare})
    print(
        f"Bring {args.out}/a to the host, then there:\n"
        "  mkdir -p /tmp/project; tar xJf a/project.tar.xz -C /tmp/project; cd /tmp/project\n"
        "  bench/lease.sh --unpack .../a; bench/lease.sh --for 15\n"
        f"Then bring {args.out}/b:\n"
        "  bench/lease.sh --unpack .../b; bench/lease.sh --for 550 --bring RESULTS"
    )


if __name__ == "__main__":
    main()
