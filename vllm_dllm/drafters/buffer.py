"""Keeps the verified blocks of a serving drafter on disk, to train the drafter on them later.

The buffer is a folder of shards, with one JSON object per line. Serving never waits: a thread
writes the blocks. Blocks that the queue or the disk cannot take are dropped, counted and logged
once. Above `max_bytes` the oldest shard is deleted. No reader sees half a line: a failed write is
undone, and readers skip the last line of a process that was killed.
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

NUM_SHARDS = 8  # shards that share max_bytes; the oldest one is deleted as a whole
QUEUE_LENGTH = 1024  # the most blocks that wait for the thread
PATTERN = "blocks-*.jsonl"
_NUMBER = re.compile(r"blocks-(\d+)")


class BlockBuffer:
    """Writes blocks to a folder in a thread of its own. One thread at a time calls `add_block`."""

    def __init__(self, path: Path, max_bytes: int, every: int = 1):
        """Makes the folder `path` and starts the thread. One block in `every` is kept. Several
        processes may share `path`. Raises ValueError if the folder cannot be written."""
        check_folder("drafter.buffer", path)
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        """How many blocks neither the queue nor the disk could take."""
        self._every = every
        self._seen = 0
        self._warned: set[str] = set()
        self._drop_lock = threading.Lock()  # guards `dropped` and `_warned`
        self._shard: LineFile | None = None
        self._shard_bytes = 0
        self._queue: queue.Queue[tuple[list[int], int, int] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._write_blocks, name="block-buffer", daemon=True)
        self._thread.start()

    def add_block(
        self,
        request_tokens: Sequence[int],  # prompt and answer; tokens after the block are left out
        anchor: int,  # index of the block's anchor in `request_tokens`
        accepted: int,  # number of drafted tokens that the target accepted
    ) -> None:
        """Queues every `every`-th verified block, and ignores the others. A block is queued as the
        tokens up to the bonus token, which the target put after the accepted ones. Neither waits
        nor raises: a block that the full queue cannot take is counted in `dropped`."""
        self._seen += 1
        if self._seen % self._every:
            return
        end = anchor + 1 + accepted + 1  # anchor, accepted tokens, bonus token
        try:
            self._queue.put_nowait((list(request_tokens[:end]), anchor, accepted))
        except queue.Full:
            self._count_dropped("the queue is full: blocks come faster than they are written")

    def close(self) -> None:
        """Waits until all queued blocks are written, and stops the thread."""
        self._queue.put(None)
        self._thread.join()

    def _write_blocks(self) -> None:
        """Writes queued blocks until `close`. The thread runs this function."""
        while (block := self._queue.get()) is not None:
            tokens, anchor, accepted = block
            row = {"tokens": tokens, "anchor": anchor, "accepted": accepted}
            line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
            if len(line) > self.max_bytes // NUM_SHARDS:
                self._count_dropped(f"a block of {len(line)} bytes is longer than a shard")
                continue
            try:
                self._append_line(line)
            except OSError as error:
                self._count_dropped(f"cannot write to {self.path}: {error}")

    def _append_line(self, line: bytes) -> None:
        """Writes a line to the current shard, or to a new one if it does not fit. Raises OSError if
        the disk does not take it."""
        shard_size = self.max_bytes // NUM_SHARDS
        shard = self._shard
        # Only the last line of a file may be cut.
        if shard is None or shard.is_cut or self._shard_bytes + len(line) > shard_size:
            self.path.mkdir(OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
            found = (_NUMBER.match(shard.name) for shard in self.path.glob(PATTERN))
            number = max((int(match[1]) for match in found if match), default=0) + 1
            shard = LineFile(self.path / f"blocks-{number:09}-{os.getpid()}.jsonl")
            if self._shard is not None:
                self._shard.close()
            self._shard, self._shard_bytes = shard, 0
            self._delete_oldest_shards()
        shard.append(line)
        self._shard_bytes += len(line)

    def _delete_oldest_shards(self) -> None:
        """Deletes the oldest shards until there is room for one more full shard."""
        shards = sorted(self.path.glob(PATTERN))
        used = sum(shard.stat().st_size for shard in shards) + self.max_bytes // NUM_SHARDS
        for shard in shards:
            if used <= self.max_bytes:
                return
            used -= shard.stat().st_size
            shard.unlink()

    def _count_dropped(self, reason: str) -> None:
        """Counts a dropped block, and logs the first block of each reason. Both threads call it."""
        kind = reason.split(":")[0]
        with self._drop_lock:
            self.dropped += 1
            is_first = kind not in self._warned
            self._warned.add(kind)
        if is_first:
            logger.warning(
                "A block was not written to drafter.buffer, and more may be lost: %s.", reason
            )
