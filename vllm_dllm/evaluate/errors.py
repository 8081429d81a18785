"""What can go wrong in an evaluation through no fault of its code."""


class EvaluateError(ValueError):
    """Ends the evaluation; the message says what was expected, what came and what to do."""
