"""How prompts are scheduled differently for canvases: where chunks end, which blocks their last
step gets, and when their log-probabilities are sent."""

from collections.abc import Container, Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


class HeldPromptScores:
    """Holds a prompt's log-probabilities back until the request's first block. vLLM expects them
    with the first tokens, which other models sample in the prompt's last step."""

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[Any, Any]] = {}

    def delay(self, output: ModelRunnerOutput, requests: Container[str]) -> None:
        """Takes prompt log-probabilities out of a step's `output`, in place. Puts earlier ones back
        for requests that get their first tokens with this output. `requests`: ids of requests that
        are not over; the log-probabilities of others are dropped."""
        scores = (output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict)
        for request_id in {*scores[0], *scores[1]}:
            self._by_request[request_id] = tuple(s.pop(request_id, None) for s in scores)
        for request_id in list(self._by_request):
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids[index]:
                held_scores = self._by_request.pop(request_id)
                for by_request, of_request in zip(scores, held_scores, strict=True):
                    if of_request is not None:
                        by_request[request_id] = of_request
            elif request_id not in requests:  # aborted
                del self._by_request[request_id]


def end_before_image(features: Sequence[MultiModalFeatureSpec], end: int) -> int:
    """Returns `end`, a position in a prompt, or the first position of the image or frame that it is
    inside of, marks included. An image's tokens see each other both ways, so they are computed in
    one piece: no step and no cached prefix may end inside."""
    for feature in features:
        position = feature.mm_position
        if position.offset < end < position.offset + position.length:
            for first, last in position.extract_embeds_range():
                if first - 1 < end < last + 2:
                    return first - 1
    return end


def append_canvas(
    output: SchedulerOutput, request_id: str, width: int, block_ids: tuple[list[int], ...] | None
) -> None:
    """Adds a canvas to what a planned step tells the worker of a request, in place. `block_ids`,
    [KV cache groups][blocks]: its new cache blocks, if there are any. Raises ValueError if the step
    does not schedule the request."""
    output.num_scheduled_tokens[request_id] += width
    output.total_num_scheduled_tokens += width
    output.scheduled_spec_decode_tokens[request_id] = [-1] * width
    if block_ids is None:
        return
    for new in output.scheduled_new_reqs:
        if new.req_id == request_id:
            new.block_ids = _join_block_ids(new.block_ids, block_ids)
            return
    cached = output.scheduled_cached_reqs
    i = cached.req_ids.index(request_id)
    cached.new_block_ids[i] = _join_block_ids(cached.new_block_ids[i], block_ids)


def _join_block_ids(
    before: tuple[list[int], ...] | None, added: tuple[list[int], ...]
) -> tuple[list[int], ...]:
    """Returns the block ids of each KV cache group: `before`, if there were any, and `added`."""
    if before is None:
        return added
    return tuple([*group, *more] for group, more in zip(before, added, strict=True))
