"""Sessions, whose inputs are streamed: each input continues after the answer to the one before."""

from vllm.v1.request import Request

from vllm_dllm.compat.scheduler import SchedulerHooks
from vllm_dllm.scheduling.families import CanvasFamily


class SessionScheduling(SchedulerHooks):
    """Mixed into a scheduler, which sets the attribute. Sessions keep their answers."""

    family: CanvasFamily

    def num_computed_of_session(self, session: Request) -> int:
        """Returns the number of tokens whose keys and values are a prefill's. vLLM would drop the
        last block of an answer, often all of it."""
        computed = min(session.num_computed_tokens, session.num_tokens)
        return computed - self.family.num_recomputed(computed)
