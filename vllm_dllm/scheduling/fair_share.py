"""No HTTP request takes more than its share of a step.

The answers of one request (`n`, several prompts) are requests of their own to the scheduler. While
others run too, only some of a request's answers take part in a step, the oldest first; the others
keep their places and wait for them to end. And never do they take all places, so that there is one
for the next request that comes.

A client that asks one thing after the other is still there between two requests. If each gap were
filled with a step of all answers, its next request would wait for that step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.request import Request

from vllm_dllm.compat.scheduler import http_request_id
from vllm_dllm.config.extension import RequestLimits

_CANVASES_ON_CPUS = 2
REMEMBERED_STEPS = 32
"""How many steps after the last one that others shared a request takes no more than its share."""


class FairShare:
    def __init__(self, canvases: int, places: int) -> None:
        """`canvases`: most of one HTTP request in a step that others share; `places`: most that
        run at a time."""
        self.canvases, self.places = canvases, places
        self._steps_alone = REMEMBERED_STEPS

    @classmethod
    def from_config(cls, config: VllmConfig, limits: RequestLimits) -> "FairShare":
        most = config.scheduler_config.max_num_seqs
        default = _CANVASES_ON_CPUS if current_platform.is_cpu() else max(1, most // 4)
        canvases = limits.canvases or default
        return cls(canvases, max(canvases, most // 2))

    def sitting_out(self, running: Sequence[Request], waiting: Iterable[Request]) -> list[Request]:
        """Running requests that leave the next step to others. Call it once a step, first."""
        names = _names(running)
        is_shared = len({*names, *_names(waiting)}) > 1
        self._steps_alone = 0 if is_shared else self._steps_alone + 1
        return _beyond(self.canvases, running, names, Counter()) if self._is_shared else []

    def held_back(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[Request]:
        """Waiting requests that go on waiting while others come first."""
        counts, waiting = Counter(_names(running)), list(waiting)
        most = self.canvases if self._is_shared else self.places
        return _beyond(most, waiting, _names(waiting), counts)

    @property
    def _is_shared(self) -> bool:
        """Whether others share the step that is about to be scheduled, or may come any moment."""
        return self._steps_alone < REMEMBERED_STEPS


def _names(requests: Iterable[Request]) -> list[str]:
    return [http_request_id(request.request_id) for request in requests]


def _beyond(
    most: int, requests: Sequence[Request], names: Sequence[str], counts: Counter[str]
) -> list[Request]:
    """The requests of which there are `most` before in their order, by their names."""
    found = []
    for request, name in zip(requests, names, strict=True):
        counts[name] += 1
        if counts[name] > most:
            found.append(request)
    return found
