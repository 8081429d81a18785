"""What a step trains on: anchors with a known next token, every sequence once an epoch."""

from vllm_dllm.tools.drafter.training.blocks import KnownSequence
from vllm_dllm.tools.drafter.training.feed import batches, draw_anchors
from vllm_dllm.tools.drafter.training.options import Options


def test_anchors_lie_where_the_next_token_is_known() -> None:
    rows = [KnownSequence(list(range(20)), 6), KnownSequence(list(range(9)), 7)]
    options = Options(block_size=16, steps=1, blocks_per_sequence=4)
    seen: set[int] = set()
    widths_seen: set[int] = set()
    for step in range(200):
        anchors, widths = draw_anchors(rows, options, step)
        assert anchors[1] == [7, -1, -1, -1]
        assert len(set(anchors[0])) == 4
        seen |= set(anchors[0])
        widths_seen |= set(widths[0])
    assert seen == set(range(6, 19))
    assert widths_seen == set(range(2, 17))


def test_every_epoch_holds_every_sequence() -> None:
    sequences = [KnownSequence(list(range(n)), 2) for n in range(5, 45)]
    feed = batches(sequences, Options(tokens_per_batch=400, steps=1), num_blocks=4)
    for _ in range(3):
        epoch: list[int] = []
        while len(epoch) < len(sequences):
            rows = next(feed)
            longest = max(len(row.tokens) for row in rows)
            assert len(rows) * (longest + 4 * 16) <= 400 or len(rows) == 1
            epoch += [len(row.tokens) for row in rows]
        assert sorted(epoch) == list(range(5, 45))
