"""What can go wrong in the demo through no fault of its code."""


class DemoError(Exception):
    """Ends the demo; the message says what happened and what to do."""
