"""The error of input that cannot be used: a command's, or a checkpoint's files."""


class InputError(ValueError):
    """What was given cannot be used; the message is one line for the user."""
