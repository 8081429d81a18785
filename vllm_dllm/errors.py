"""Errors that a command prints for its user, without a traceback."""


class InputError(ValueError):
    """An argument or a file cannot be used; the message is one line for the user."""


class ServerError(Exception):
    """A server that a command needs did not start or has ended; the message says why and what to
    do."""
