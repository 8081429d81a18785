"""The error of a command's input."""


class InputError(ValueError):
    """What a command was given cannot be used; the message is one line for the user."""
