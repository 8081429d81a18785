"""Cache blocks that a step which vLLM has built gets in addition."""

from vllm.v1.core.sched.output import SchedulerOutput


def append_blocks(
    output: SchedulerOutput, request_id: str, block_ids: tuple[list[int], ...] | None
) -> None:
    """Tells the worker of more cache blocks [KV cache groups][blocks] for the request."""
    if block_ids is None:
        return
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            new.block_ids = _joined(new.block_ids, block_ids)
            return
    cached = output.scheduled_cached_reqs
    i = cached.req_ids.index(request_id)
    cached.new_block_ids[i] = _joined(cached.new_block_ids[i], block_ids)


def _joined(
    before: tuple[list[int], ...] | None, added: tuple[list[int], ...]
) -> tuple[list[int], ...]:
    if before is None:
        return added
    return tuple([*group, *more] for group, more in zip(before, added, strict=True))
