"""How many of a request's drafts the target verifies: one class per policy.

A policy is asked for a width before each draft and told the outcome. Widths count drafts; 0 means
that the request is served without drafts.
"""

from dataclasses import dataclass

from vllm_dllm.config.drafter import DrafterConfig
from vllm_dllm.drafters.step_costs import Step, StepCosts


class WidthPolicy:
    """Always the widest. Base class of the others."""

    def __init__(self, widest: int) -> None:
        self.widest = widest

    def width(self, request_id: str, num_requests: int) -> int:
        """The width of the next draft of a request in a batch of `num_requests`."""
        return self.widest

    def step_scheduled(self, request_ids: list[str], num_requests: int) -> None:
        """A step of `num_requests` is on its way, after which `request_ids` could be drafted for.
        Widths asked for from now on are for that draft."""

    def step_timed(self, step: Step, seconds: float) -> None:
        """How long a step took."""

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The target accepted `num_accepted` of `num_drafts` > 0."""

    def predicted(self, request_id: str, width: int) -> None:
        """A predictor has looked at the request's prefill."""

    def ended(self, request_id: str) -> None:
        """Nothing more will be asked about the request."""


class Predicted(WidthPolicy):
    """What the predictor says, once per request; the widest until then."""

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
    """How a request's drafts have done: each counts half as much as the next one."""

    width: int
    accepted: float
    """Tokens of a draft."""
    share: float = 1.0
    """Of the drafted tokens."""

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.accepted = (self.accepted + num_accepted) / 2
        self.share = (self.share + num_accepted / num_drafts) / 2


class ByAcceptance(WidthPolicy):
    """Drafts for those requests with which the batch makes the most tokens per second, judging by
    how many of their drafts were accepted and how long steps with and without drafts took.

    A request's width shrinks by a quarter, rounded up, while under `LOW` of its drafts are
    accepted, and grows by as much over `HIGH`. A new request is expected to do as well as recent
    ones. Requests left out are tried again every `TRY_EVERY` steps, and less and less often while
    nothing is drafted at all.
    """

    LOW, HIGH = 0.6, 0.9
    MEMORY = 0.8  # weight of all drafts so far against the next one
    TRY_EVERY, TRY_LEAST = 64, 512  # steps
    LEARN_EVERY, PLAIN_EVERY = 8, 256  # steps between steps without drafts, at first and later

    def __init__(self, widest: int) -> None:
        super().__init__(widest)
        self._courses: dict[str, _Course] = {}
        self._accepted_by_all = float(widest)
        self._costs = StepCosts()
        self._chosen: set[str] = set()
        self._judged: tuple[list[str], int, int] | None = None
        self._judgement: set[str] = set()
        self._since_try = self._since_plain = 0
        self._pause = self.TRY_EVERY

    def step_scheduled(self, request_ids: list[str], num_requests: int) -> None:
        self._since_try += 1
        self._since_plain += 1
        if not request_ids:
            return
        self._chosen = self._choose(request_ids, num_requests)
        if not self._chosen:
            self._since_plain = 0

    def _choose(self, request_ids: list[str], num_requests: int) -> set[str]:
        few = self._costs.lacks_steps_without_drafts
        if self._since_plain >= (self.LEARN_EVERY if few else self.PLAIN_EVERY):
            return set()
        paying = self._paying(request_ids, num_requests)
        if paying:
            self._pause = self.TRY_EVERY
        if len(paying) < len(request_ids):
            if self._since_try < self._pause:
                return paying
            if not paying:
                self._pause = min(2 * self._pause, self.TRY_LEAST)
            for request_id in set(request_ids) - paying:
                self._course(request_id).width = self.widest
            self._judged = None
        self._since_try = 0
        return set(request_ids)

    def _paying(self, request_ids: list[str], num_requests: int) -> set[str]:
        """The requests worth drafting for; all of them while the costs are unknown."""
        judged = (request_ids, num_requests, self._costs.num_fits)
        if judged != self._judged:  # nor has anything been verified since
            self._judged, self._judgement = judged, self._judge(request_ids, num_requests)
        return self._judgement

    def _judge(self, request_ids: list[str], num_requests: int) -> set[str]:
        if not self._costs.known:
            return set(request_ids)
        courses = [(self._course(request_id), request_id) for request_id in request_ids]
        courses.sort(key=lambda course: -course[0].accepted)
        # Plain Python: caches are cold between steps, and loading numpy's code takes 0.4 ms.
        num_rows = num_tokens = float(num_requests)
        best_rate, num_best = num_tokens / self._costs.seconds(num_rows, 0), 0
        for num_drafted, (course, _) in enumerate(courses, start=1):
            num_rows += course.width
            num_tokens += course.accepted
            rate = num_tokens / self._costs.seconds(num_rows, num_drafted)
            if rate > best_rate:
                best_rate, num_best = rate, num_drafted
        return {request_id for _, request_id in courses[:num_best]}

    def step_timed(self, step: Step, seconds: float) -> None:
        self._costs.add(step, seconds)

    def _course(self, request_id: str) -> _Course:
        if request_id not in self._courses:
            self._courses[request_id] = _Course(self.widest, self._accepted_by_all)
        return self._courses[request_id]

    def width(self, request_id: str, num_requests: int) -> int:
        return self._course(request_id).width if request_id in self._chosen else 0

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self._accepted_by_all += (1 - self.MEMORY) * (num_accepted - self._accepted_by_all)
        self._judged = None
        course = self._course(request_id)
        course.verified(num_drafts, num_accepted)
        change = -(-course.width // 4)
        if course.share < self.LOW:
            course.width = max(course.width - change, 1)
        elif course.share > self.HIGH:
            course.width = min(course.width + change, self.widest)

    def ended(self, request_id: str) -> None:
        self._courses.pop(request_id, None)
        self._judged = None


class ByLoad(WidthPolicy):
    """Gives as many drafts as keep the step within `num_rows` tokens, shared evenly."""

    def __init__(self, widest: int, num_rows: int) -> None:
        super().__init__(widest)
        self.num_rows = num_rows

    def width(self, request_id: str, num_requests: int) -> int:
        return min(max(self.num_rows // num_requests - 1, 0), self.widest)


def make_policy(config: DrafterConfig, num_drafted: int) -> WidthPolicy:
    """The policy of `config` for a drafter of `num_drafted` tokens."""
    widest = config.max_width(num_drafted)
    match config.width_policy:
        case "fixed":
            return WidthPolicy(widest)
        case "blockpilot":
            return Predicted(widest)
        case "acceptance":
            return ByAcceptance(widest)
        case "load":
            return ByLoad(widest, config.load_rows)
