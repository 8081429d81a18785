"""Blocks a serving drafter got right and wrong, kept on disk to train it on later.

A bounded folder of shards, one JSON object per line. Serving hands over blocks and never waits: a
thread writes them, and what the queue or the disk cannot take is dropped, counted and logged once.
Above `max_bytes` the oldest shard is deleted. Half a line is never used: a failed write is undone,
and an unfinished line left by a killed process is not read.
"""

import json
import logging
import os
import queue
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from vllm_dllm.config.files import OWNER_ONLY_FOLDER, LineFile, check_folder

logger = logging.getLogger(__name__)

NUM_SHARDS = 8  # that share max_bytes; the oldest one is deleted as a whole
QUEUE_LENGTH = 1024  # blocks on their way to the disk
PATTERN = "blocks-*.jsonl"
_NUMBER = re.compile(r"blocks-(\d+)")


class BlockBuffer:
    """Where a drafter's blocks go while it serves. One writer thread; `add` may be called by one
    thread at a time."""

    def __init__(self, path: Path, max_bytes: int, every: int = 1):
        """Keeps one block in `every`. Several processes may share `path`. Raises ValueError where
        nothing can be kept."""
        if max_bytes < NUM_SHARDS or every < 1:
            raise ValueError(
                f"expected a buffer of at least {NUM_SHARDS} bytes that keeps one block in 1 or "
                f"more, got {max_bytes} bytes and one in {every}"
            )
        check_folder("drafter.buffer", path)
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        """Blocks that neither queue nor disk could take."""
        self._every = every
        self._seen = 0
        self._warned: set[str] = set()
        self._shard: LineFile | None = None
        self._shard_bytes = 0
        self._queue: queue.Queue[tuple[list[int], int, int] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._write, name="block-buffer", daemon=True)
        self._thread.start()

    def add(self, request_tokens: Sequence[int], start: int, accepted: int) -> None:
        """Takes a verified block. Neither waits nor raises.

        request_tokens: prompt and answer up to the bonus token, which the target put after the
        accepted tokens; later tokens are not kept. start: index of the block's anchor.
        accepted: drafted tokens that the target agreed with.
        """
        self._seen += 1
        if self._seen % self._every:
            return
        try:
            self._queue.put_nowait((list(request_tokens[: start + accepted + 2]), start, accepted))
        except queue.Full:
            self._drop("the queue is full: blocks come faster than they are written")

    def close(self) -> None:
        """Writes what is queued and stops."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (block := self._queue.get()) is not None:
            tokens, start, accepted = block
            row = {"tokens": tokens, "anchor": start, "accepted": accepted}
            line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
            if len(line) > self.max_bytes // NUM_SHARDS:
                self._drop(f"a block of {len(line)} bytes is longer than a shard")
                continue
            try:
                self._append(line)
            except OSError as error:
                self._drop(f"cannot write to {self.path}: {error}")

    def _append(self, line: bytes) -> None:
        shard_size = self.max_bytes // NUM_SHARDS
        shard = self._shard
        # A reader would stumble over a line that is not whole, unless it is a file's last.
        if shard is None or shard.is_cut or self._shard_bytes + len(line) > shard_size:
            shard = self._new_shard()
        shard.append(line)
        self._shard_bytes += len(line)

    def _new_shard(self) -> LineFile:
        self.path.mkdir(OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        found = (_NUMBER.match(shard.name) for shard in self.path.glob(PATTERN))
        number = max((int(match[1]) for match in found if match), default=0) + 1
        shard = LineFile(self.path / f"blocks-{number:09}-{os.getpid()}.jsonl")
        if self._shard is not None:
            self._shard.close()
        self._shard, self._shard_bytes = shard, 0
        self._delete_oldest()
        return shard

    def _delete_oldest(self) -> None:
        """Leaves room for the new shard to fill up."""
        shards = sorted(self.path.glob(PATTERN))
        used = sum(shard.stat().st_size for shard in shards) + self.max_bytes // NUM_SHARDS
        for shard in shards:
            if used <= self.max_bytes:
                return
            used -= shard.stat().st_size
            shard.unlink()

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        kind = reason.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("a drafted block was not kept, and more may follow: %s", reason)
