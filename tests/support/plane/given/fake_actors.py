"""Fakes of Ray actors: their methods, and answers that may be errors."""

from functools import partial

__all__ = ["Method", "value_of"]


class Method:
    """A method of an actor; its answer is made when it is waited for."""

    def __init__(self, call):
        self.call = call

    def remote(self, *arguments, **named):
        return partial(self.call, *arguments, **named)


def value_of(answer):
    """Return an answer, or raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer
