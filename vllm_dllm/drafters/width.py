"""How many of a request's drafts the target verifies: one class a policy.

A policy is asked for a width before each draft and told what became of it. Widths count drafts; 0
means that the request is served without them.
"""

from dataclasses import dataclass

from vllm_dllm.drafters.config import DrafterConfig


class WidthPolicy:
    """Always the widest; the others' base."""

    def __init__(self, widest: int) -> None:
        self.widest = widest

    def width(self, request_id: str, num_requests: int) -> int:
        """For the next draft of a request in a batch of `num_requests`."""
        return self.widest

    def step_scheduled(self) -> None:
        """A step is on its way; widths asked for from here on are for the next."""

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The target accepted `num_accepted` of `num_drafts` > 0."""

    def predicted(self, request_id: str, width: int) -> None:
        """A predictor has looked at the request's prefill."""

    def ended(self, request_id: str) -> None:
        """Nothing more will be asked about the request."""


class Predicted(WidthPolicy):
    """What the predictor says, once a request; the widest until it has."""

    def __init__(self, widest: int) -> None:
        super().__init__(widest)
        self._widths: dict[str, int] = {}

    def width(self, request_id: str, num_requests: int) -> int:
        return self._widths.get(request_id, self.widest)

    def predicted(self, request_id: str, width: int) -> None:
        # A request that is prefilled again after a preemption keeps its width.
        self._widths.setdefault(request_id, min(width, self.widest))

    def ended(self, request_id: str) -> None:
        self._widths.pop(request_id, None)


@dataclass
class _Course:
    """How a request's drafts have fared."""

    width: int
    share: float = 1.0
    """Of the last drafts, how many were accepted: each counts half as much as the one after it."""
    paused: bool = False


class ByAcceptance(WidthPolicy):
    """Narrower by a quarter, rounded up, while under `LOW` of a request's drafts are accepted,
    wider by as much over `HIGH`.

    A request that gets fewer than `least_accepted` tokens of a draft is paused: it is served
    without drafts, but for a try every `TRY_EVERY` steps, when all that are paused try at once. A
    new request starts as the last ones of all have fared.
    """

    LOW, HIGH = 0.6, 0.9
    TRY_EVERY = 64
    MEMORY = 0.8  # what all drafts so far count for against the next one

    def __init__(self, widest: int, least_accepted: float) -> None:
        super().__init__(widest)
        self._least_accepted = least_accepted
        self._courses: dict[str, _Course] = {}
        self._accepted_by_all = float(widest)
        self._num_steps = 0

    def step_scheduled(self) -> None:
        self._num_steps += 1

    def _course(self, request_id: str) -> _Course:
        if request_id not in self._courses:
            is_paused = self._accepted_by_all < self._least_accepted
            self._courses[request_id] = _Course(self.widest, paused=is_paused)
        return self._courses[request_id]

    def width(self, request_id: str, num_requests: int) -> int:
        course = self._course(request_id)
        return 0 if course.paused and self._num_steps % self.TRY_EVERY else course.width

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        course = self._course(request_id)
        self._accepted_by_all += (1 - self.MEMORY) * (num_accepted - self._accepted_by_all)
        last = num_accepted / num_drafts
        course.share = last if course.paused else (course.share + last) / 2
        change = -(-course.width // 4)
        if course.share < self.LOW:
            course.width = max(course.width - change, 1)
        elif course.share > self.HIGH:
            course.width = min(course.width + change, self.widest)
        course.paused = course.share * num_drafts < self._least_accepted

    def ended(self, request_id: str) -> None:
        self._courses.pop(request_id, None)


class ByLoad(WidthPolicy):
    """As many drafts as keep the step within `num_rows` tokens, shared evenly."""

    def __init__(self, widest: int, num_rows: int) -> None:
        super().__init__(widest)
        self.num_rows = num_rows

    def width(self, request_id: str, num_requests: int) -> int:
        return min(max(self.num_rows // num_requests - 1, 0), self.widest)


def make_policy(config: DrafterConfig, num_drafted: int) -> WidthPolicy:
    """The policy of `config` for a drafter of `num_drafted` tokens."""
    widest = config.widest(num_drafted)
    match config.width_policy:
        case "fixed":
            return WidthPolicy(widest)
        case "blockpilot":
            return Predicted(widest)
        case "acceptance":
            return ByAcceptance(widest, config.least_accepted)
        case "load":
            return ByLoad(widest, config.load_rows)
