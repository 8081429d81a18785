"""The buffer of drafted blocks: bounded, whole lines only, and never in the way."""

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.unit.config.test_files import room_for
from vllm_dllm.drafters.buffer import NUM_SHARDS, QUEUE_LENGTH, BlockBuffer
from vllm_dllm.drafters.scheduler import DraftWidthScheduler
from vllm_dllm.errors import InputError
from vllm_dllm.tools.drafter.sequences import KnownSequence, read_buffer

VOCAB_SIZE = 512


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl"))


def test_reads_back_what_was_added(tmp_path: Path) -> None:
    buffer = BlockBuffer(tmp_path, max_bytes=100_000)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    buffer.add_block(tokens, anchor=2, accepted=3)
    buffer.add_block(tokens, anchor=2, accepted=0)
    tokens[0] = 99  # the caller's list is the caller's
    buffer.close()
    assert read_buffer(tmp_path, VOCAB_SIZE) == [
        KnownSequence([5, 6, 7, 8, 9, 10, 11], 2),
        KnownSequence([5, 6, 7, 8], 2),
    ], "tokens behind the bonus token are not kept"
    assert buffer.dropped == 0


def test_keeps_one_block_in_so_many(tmp_path: Path) -> None:
    buffer = BlockBuffer(tmp_path, max_bytes=100_000, every=3)
    for n in range(9):
        buffer.add_block([n, n, n], anchor=1, accepted=0)
    buffer.close()
    assert [s.tokens[0] for s in read_buffer(tmp_path, VOCAB_SIZE)] == [2, 5, 8]


def test_oldest_shards_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    max_bytes = 4000
    buffer = BlockBuffer(tmp_path, max_bytes)
    for n in range(300):
        buffer.add_block([n] * 20, anchor=1, accepted=0)
    buffer.close()
    assert sum(shard.stat().st_size for shard in shards(tmp_path)) <= max_bytes
    kept = [s.tokens[0] for s in read_buffer(tmp_path, VOCAB_SIZE)]
    assert kept == list(range(300 - len(kept), 300)), "the newest are kept, in order"
    assert len(kept) > 30


def test_processes_share_a_folder(tmp_path: Path) -> None:
    buffers = [BlockBuffer(tmp_path, 100_000) for _ in range(2)]
    for n, buffer in enumerate(buffers):
        buffer.add_block([n, n, n], anchor=1, accepted=0)
        buffer.close()
    assert len(shards(tmp_path)) == 2
    assert [s.tokens[0] for s in read_buffer(tmp_path, VOCAB_SIZE)] == [0, 1]


def test_a_block_longer_than_a_shard_is_dropped(tmp_path: Path) -> None:
    buffer = BlockBuffer(tmp_path, max_bytes=100 * NUM_SHARDS)
    buffer.add_block([1] * 200, anchor=1, accepted=198)
    buffer.add_block([1, 2, 3], anchor=1, accepted=0)
    buffer.close()
    assert buffer.dropped == 1
    assert len(read_buffer(tmp_path, VOCAB_SIZE)) == 1


@pytest.mark.parametrize("room", [0, 10], ids=["nothing fits", "half a line fits"])
def test_full_disk_loses_blocks_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    buffer = BlockBuffer(tmp_path, max_bytes=100_000)
    buffer.add_block([1, 1, 1], anchor=1, accepted=0)
    buffer.close()
    with caplog.at_level(logging.WARNING), room_for(room):
        full = BlockBuffer(tmp_path, max_bytes=100_000)
        for _ in range(5):
            full.add_block([2, 2, 2], anchor=1, accepted=0)
        full.close()
    assert full.dropped == 5
    assert len(caplog.records) == 1, "said once"
    assert "File too large" in caplog.text
    assert read_buffer(tmp_path, VOCAB_SIZE) == [KnownSequence([1, 1, 1], 1)]
    assert all(s.read_bytes().endswith(b"\n") or not s.stat().st_size for s in shards(tmp_path))


def test_another_file_of_such_a_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "blocks-old.jsonl").write_text("")
    buffer = BlockBuffer(tmp_path, max_bytes=100_000)
    buffer.add_block([1, 1, 1], anchor=1, accepted=0)
    buffer.close()
    assert buffer.dropped == 0
    assert len(read_buffer(tmp_path, VOCAB_SIZE)) == 1


def test_a_slow_disk_does_not_hold_up_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = BlockBuffer(tmp_path, max_bytes=100_000)
    reached, released = threading.Event(), threading.Event()

    def wait(line: bytes) -> None:
        reached.set()
        released.wait()

    monkeypatch.setattr(buffer, "_append_line", wait)
    buffer.add_block([1, 2, 3], anchor=1, accepted=0)
    assert reached.wait(10)
    with caplog.at_level(logging.WARNING):
        for _ in range(QUEUE_LENGTH + 7):  # returns although nothing is written
            buffer.add_block([1, 2, 3], anchor=1, accepted=0)
    assert buffer.dropped == 7
    assert len(caplog.records) == 1
    assert "queue is full" in caplog.text
    released.set()
    buffer.close()


def test_a_torn_last_line_is_not_read(tmp_path: Path) -> None:
    whole = json.dumps({"tokens": [1, 2, 3], "anchor": 1, "accepted": 0})
    (tmp_path / "blocks-000000001-1.jsonl").write_text(f"{whole}\n{whole[:12]}")
    (tmp_path / "blocks-000000002-1.jsonl").write_text(f"{whole}\n")
    assert len(read_buffer(tmp_path, VOCAB_SIZE)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "holds no buffer: expected files blocks", id="no shards"),
        pytest.param("", "no block with a known token", id="nothing in them"),
        pytest.param("{}\n", 'line 1: expected {"tokens"', id="another file"),
        pytest.param("half\n", 'line 1: expected {"tokens"', id="not JSON"),
        pytest.param(
            '{"tokens": [1, 600], "anchor": 0}\n',
            "has token 600, the drafter's vocabulary has 512",
            id="another vocabulary",
        ),
    ],
)
def test_refuses_what_is_no_buffer(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "blocks-000000001-1.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        read_buffer(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("beside", "kept"),
    [
        pytest.param({}, True, id="tokens alone"),
        pytest.param({"prompt_embeds": torch.zeros(2, 4)}, False, id="embeddings"),
        pytest.param({"mm_features": ["an image"]}, False, id="an image"),
        pytest.param({"lora_request": "an adapter"}, False, id="an adapter"),
    ],
)
def test_blocks_that_their_tokens_do_not_explain_are_left_out(
    beside: dict[str, Any], kept: bool
) -> None:
    """Training computes the target's states from the tokens, which are 0 for embeddings."""
    plain = {"prompt_embeds": None, "mm_features": [], "lora_request": None}
    request = SimpleNamespace(request_id="a", num_tokens=5, all_token_ids=[1, 2, 3, 4, 5])
    vars(request).update(plain | beside)
    scheduler = DraftWidthScheduler.__new__(DraftWidthScheduler)
    scheduler._buffer, scheduler._just_verified = Mock(), "a"
    scheduler.block_emitted(request, 2)
    assert scheduler._buffer.add_block.called == kept
