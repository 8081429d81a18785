"""vLLM's CUDA wheel without what a Hopper GPU does not need, so that it fits an upload.

All Python, the stable-ABI libraries and FlashAttention-3 stay. Of each library's device code what
this chip runs stays; where there is none, its PTX, which the driver compiles when it is first used
(Marlin). Fat binaries are compacted in place: their addresses do not move. Licences stay, in
*.dist-info.
"""

import fnmatch
import io
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

CHIP = 90  # sm_90
DROPPED = [
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/_qutlass_C*",
    "vllm/_flashmla*",
    "vllm/_deepselect_C*",
    "vllm/_flashkda_C*",
    "vllm/_rust_tool_parser*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    "*/_vllm_fa2_C*",  # has no code for Hopper
]
CONTAINER, IMAGE, PTX = 0xBA55ED50, 2, 1


def repack(wheel: Path, archive: tarfile.TarFile) -> None:
    """Adds what stays of the wheel."""
    with zipfile.ZipFile(wheel) as packed:
        for member in packed.infolist():
            if member.is_dir() or any(fnmatch.fnmatch(member.filename, d) for d in DROPPED):
                continue
            data, mode = packed.read(member), 0o644
            if member.filename.endswith(".so"):
                data, mode = _stripped(_for_chip(bytearray(data))), 0o755
            info = tarfile.TarInfo(member.filename)
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))


def _stripped(library: bytes) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        subprocess.run(["strip", file.name], check=True)
        return Path(file.name).read_bytes()


def _section(library: bytearray) -> tuple[int, int] | None:
    """Where `.nv_fatbin` is, and its size."""
    (headers,) = struct.unpack_from("<Q", library, 40)
    size, number, names = struct.unpack_from("<HHH", library, 58)

    def header(i: int) -> tuple[int, ...]:
        return struct.unpack_from("<IIQQQQIIQQ", library, headers + i * size)

    first_name = header(names)[4]
    for i in range(number):
        found = header(i)
        name = first_name + found[0]
        if library[name : library.index(0, name)] == b".nv_fatbin":
            return found[4], found[5]
    return None


def _for_chip(library: bytearray) -> bytes:
    if (section := _section(library)) is None:
        return bytes(library)
    at, end = section[0], sum(section)
    spare: bytes | None = None  # a container is never left empty: the smallest image of others
    containers = []
    while at + 16 <= end:
        magic, _, head, body = struct.unpack_from("<IHHQ", library, at)
        if magic != CONTAINER:
            at += 8
            continue
        entries, entry = [], at + head
        while entry + 64 <= at + head + body:
            kind, _, entry_head, size = struct.unpack_from("<HHIQ", library, entry)
            (chip,) = struct.unpack_from("<I", library, entry + 28)
            entries.append((kind, chip, bytes(library[entry : entry + entry_head + size])))
            entry += entry_head + size
        kept = [e for e in entries if e[0] == IMAGE and e[1] // 10 == CHIP // 10 and e[1] <= CHIP]
        if not kept:
            kept = sorted((e for e in entries if e[0] == PTX and e[1] <= CHIP), key=lambda e: e[1])
            kept = kept[-1:]
        for image in entries:
            if (
                image not in kept
                and image[0] == IMAGE
                and (not spare or len(image[2]) < len(spare))
            ):
                spare = image[2]
        containers.append((at, head, body, b"".join(e[2] for e in kept)))
        at += head + body
    for at, head, room, kept_bytes in containers:
        data = kept_bytes or spare or b""
        if len(data) > room:
            raise ValueError(f"expected at most {room} bytes for a container, got {len(data)}")
        library[at + head : at + head + room] = data + bytes(room - len(data))
        struct.pack_into("<Q", library, at + 8, len(data))
    return bytes(library)
