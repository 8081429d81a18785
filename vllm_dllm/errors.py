"""The errors that a command says in a few lines, for its user."""


class InputError(ValueError):
    """What was given cannot be used; the message is one line for the user."""


class ServerError(Exception):
    """A server that a command needs did not start or has ended; the message says why and what to
    do."""
