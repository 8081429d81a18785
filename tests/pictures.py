"""Pictures and videos as bytes and URLs."""

import base64
import struct
import zlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
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


CODECS = {"mp4": "mp4v", "avi": "MJPG", "mkv": "FFV1", "webm": "VP80", "mpg": "MPG1"}


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float = 10.0) -> bytes:
    """Writes frames [height, width, 3] uint8, RGB, by the codec for the file's suffix."""
    frames = list(frames)
    height, width, _ = frames[0].shape
    codec = cv2.VideoWriter_fourcc(*CODECS[path.suffix[1:]])
    writer = cv2.VideoWriter(str(path), codec, fps, (width, height))
    for frame in frames:
        writer.write(frame[:, :, ::-1].copy())
    writer.release()
    return path.read_bytes()


def grey_frames(count: int, size: tuple[int, int] = (64, 48)) -> list[np.ndarray]:
    """Of which frame i has the brightness i."""
    return [np.full((*reversed(size), 3), i, dtype=np.uint8) for i in range(count)]
