"""Pictures as bytes and URLs."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    with BytesIO() as buffer:
        image.save(buffer, form, **options)
        return buffer.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def png_header(width: int, height: int) -> bytes:
    """A PNG whose header says so, and that has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        check = struct.pack(">I", zlib.crc32(kind + body))
        chunks += struct.pack(">I", len(body)) + kind + body + check
    return b"\x89PNG\r\n\x1a\n" + chunks
