"""The proof of exact resume, for anything that hands out items and can save its state."""

import json
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from omniload.base.state import JsonObject

__all__ = ["Resumable", "assert_resumes_exactly"]

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


class Resumable(Protocol[Item_co]):
    """Items one after another, and the state before the next item."""

    def __next__(self) -> Item_co:
        """Return the next item; ``StopIteration`` when there is none."""
        ...

    def state_dict(self) -> JsonObject:
        """Return the state before the next item as plain JSON."""
        ...


def assert_resumes_exactly(
    make: Callable[[JsonObject | None], AbstractContextManager[Resumable[Item]]],
    digest: Callable[[Item], Hashable],
    *,
    num_items: int,
) -> list[Hashable]:
    """Save before every item; from each state, read the rest again and compare it.

    Args:
        make: Returns the tested object, new or from a state, in a ``with``.
        digest: Returns a value that distinguishes items.
        num_items: Items to read; there may be fewer of them.

    Returns:
        The digests of the whole sequence.
    """
    states: list[str] = []
    whole: list[Hashable] = []
    with make(None) as fresh:
        for _ in range(num_items):
            states.append(json.dumps(fresh.state_dict()))
            try:
                whole.append(digest(next(fresh)))
            except StopIteration:
                break
    assert whole, "nothing was handed out, so nothing was tested"
    for at, saved in enumerate(states):
        with make(json.loads(saved)) as resumed:
            rest = []
            for _ in range(len(whole) - at):
                again = json.dumps(resumed.state_dict())
                assert json.loads(again) == json.loads(states[at + len(rest)]), (
                    f"resumed before item {at}: the state before item {at + len(rest)} differs"
                )
                rest.append(digest(next(resumed)))
        assert rest == whole[at:], f"resumed before item {at}: the rest differs"
    return whole
