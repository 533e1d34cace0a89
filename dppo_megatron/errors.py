"""The one base of errors that a user can act on."""


class ExpectedError(Exception):
    """What went wrong is said in full by the message: what, where, and the remedy. Shown without a traceback."""
