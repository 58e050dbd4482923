"""The turn of a process: it has one plane of several ranks at a time, because it is connected to one Ray at a time.

An evaluation that has the turn gives way to a training: its plane ends. Its next batch opens it anew where it was, by
then next to the training.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from omniload.base.errors import OmniloadError, StateError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject

__all__ = ["giving_way", "take_turn", "take_turn_to_train"]

_LOG = get_logger(__name__)
_TURN = threading.Lock()
_EVALUATIONS: list[Callable[[], None]] = []
"""What ends the plane of each open evaluation of several ranks, in the order of opening, the same on every rank."""


@contextmanager
def giving_way(
    state_of: Callable[[], JsonObject], end: Callable[[JsonObject | None], None]
) -> Iterator[None]:
    """Have a plane end when a training wants the turn. Also keeps the loader alive: other ranks may need it.

    Args:
        state_of: Asks the plane for the state.
        end: Ends the plane, given the state; ``None`` if it is lost.
    """

    def give_way() -> None:
        try:
            state = state_of()
        except OmniloadError as error:
            # Rank 0, which has the plane, waits for each rank only so long. The training needs nothing of it.
            _LOG.warning(
                "an evaluation gives way to a training, but where it was is lost, so it gets no batch any more: its "
                "data plane has ended (%s). Have ranks wait for one another before they open the training, as by "
                "torch.distributed.barrier()",
                error,
            )
            state = None
        end(state)

    _EVALUATIONS.append(give_way)
    try:
        yield
    finally:
        _EVALUATIONS.remove(give_way)


def take_turn(stack: ExitStack) -> None:
    """Refuse a second plane of several ranks in this process, before any rank waits for it.

    Raises:
        StateError: Such a plane is open; the message says what to do instead.
    """
    if not _TURN.acquire(blocking=False):
        raise StateError(
            "this process has a loader over several ranks open already; close it before you open another. In "
            "addition to it, you may open a loader of a split, for evaluation, after init_process_group; and, with "
            "rank=0 and world_size=1, loaders of this process alone"
        )
    stack.callback(_TURN.release)


def take_turn_to_train(stack: ExitStack) -> None:
    """Take the turn; an evaluation that has it gives way. All ranks do so together, because all have opened it.

    Raises:
        StateError: As for ``take_turn``: another training has the turn.
    """
    if _TURN.locked():
        for end in tuple(_EVALUATIONS):
            end()
    take_turn(stack)
