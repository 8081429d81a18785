"""What canvases change for prompts: where parts of them end, what their last step gets and says."""

from collections.abc import Container, Sequence
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


class HeldPromptScores:
    """A prompt's log-probabilities, held back until the request's first block: vLLM expects them
    with the first tokens, which other models sample in the prompt's last step."""

    def __init__(self) -> None:
        self._by_request: dict[str, tuple[Any, Any]] = {}

    def hold(self, output: ModelRunnerOutput, requests: Container[str]) -> None:
        """Takes the scores out of a step's output, and puts those of requests into it that get
        their first tokens with it. `requests`: those that are not over."""
        scores = (output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict)
        for request_id in {*scores[0], *scores[1]}:
            self._by_request[request_id] = tuple(s.pop(request_id, None) for s in scores)
        for request_id in list(self._by_request):
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids[index]:
                held = self._by_request.pop(request_id)
                for by_request, of_request in zip(scores, held, strict=True):
                    if of_request is not None:
                        by_request[request_id] = of_request
            elif request_id not in requests:  # aborted
                del self._by_request[request_id]


def before_image(features: Sequence[MultiModalFeatureSpec], end: int) -> int:
    """`end`, a position in a prompt, or the start of the image or frame that it is inside of; the
    marks around its tokens belong to it. Its tokens see each other both ways, so they are computed
    in one piece: no step and no prefix of the cache ends inside."""
    for feature in features:
        position = feature.mm_position
        if position.offset < end < position.offset + position.length:
            for first, last in position.extract_embeds_range():
                if first - 1 < end < last + 2:
                    return first - 1
    return end


def append_blocks(
    output: SchedulerOutput, request_id: str, block_ids: tuple[list[int], ...] | None
) -> None:
    """Tells the worker of more cache blocks [KV cache groups][blocks] for the request, in a step
    that vLLM has built."""
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
