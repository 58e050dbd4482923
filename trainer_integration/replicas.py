"""Batches for replicas of torchft, which die and come back: the global batch stays, no sample is lost or doubled.

torchft counts the committed steps and numbers the replicas of each quorum. A data plane started by ``omniload.serve``
deals each step to the replicas that are present::

    quorum 1   steps 0 to 16    replicas a b c d    dp 4
    quorum 2   step 17 again    replicas a b c      dp 3      d died in step 17
    quorum 3   from step 31     replicas a b c d'   dp 4      d came back
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, Self

import omniload
from omniload import ConfigError, Loader, StateError, TrainingBatch

__all__ = ["Quorum", "ReplicaLoader"]


class Quorum(Protocol):
    """The part of ``torchft.Manager`` that is used, after its ``start_quorum``."""

    def current_step(self) -> int:
        """Return the number of committed steps."""
        ...

    def num_participants(self) -> int:
        """Return how many replicas of the quorum take part in the step."""
        ...

    def participating_rank(self) -> int | None:
        """Return this replica's number among them; ``None`` while it takes no part."""
        ...


class ReplicaLoader:
    """Batches of a rank, for the step that its replica trains on next.

    A step that was not committed is taken again, by the replicas that are there then. The state that the manager saves
    is enough to continue: a replica that heals gets the step from its peers.
    """

    def __init__(
        self,
        manager: Quorum,
        address: str | Path,
        *,
        group_rank: int = 0,
        group_size: int = 1,
        quorum_id: Callable[[], int] | None = None,
        **keywords: Any,  # noqa: ANN401 -- the keywords of omniload.join
    ) -> None:
        """Take batches from the plane at ``address``.

        Args:
            manager: torchft's manager, with ``use_async_quorum=False``, so that a joining replica takes part in its
                first step.
            address: As given to ``omniload.serve``; replicas may be on any host that sees that folder or port.
            group_rank: Number of this rank in its replica, as the replica's own FSDP counts.
            group_size: Number of ranks of each replica.
            quorum_id: Returns the number of the quorum; by default, asks the manager.
            **keywords: Keywords of ``omniload.join``: ``arrays``, ``labels``, ``device``, ``timeout``.

        Raises:
            ConfigError: The group's numbers are refused, or the manager has no number of its quorum.
        """
        if not 0 <= group_rank < group_size:
            raise ConfigError(
                f"group_rank is {group_rank} and group_size {group_size}; ranks of a replica are numbered from 0"
            )
        self._manager, self._address, self._keywords = manager, address, keywords
        self._group = group_rank, group_size
        self._quorum_id = _id_of(manager) if quorum_id is None else quorum_id
        self._loader: Loader | None = None
        self._quorum = 0
        self._handed: tuple[int, TrainingBatch | None] | None = None

    def next_batch(self) -> TrainingBatch | None:
        """Return this rank's part of the step that is not yet committed; ``None`` when the data has ended.

        Call it once per step, after ``manager.start_quorum()``. In the same quorum, the same step gives the same batch.

        Raises:
            StateError: The replica takes no part in the step.
            OmniloadError: As for ``Loader.resize`` and ``Loader.next_batch``.
        """
        step, rank = self._manager.current_step(), self._manager.participating_rank()
        if rank is None:
            raise StateError(
                f"the replica takes no part in step {step}: it heals while others train; make the manager with "
                "use_async_quorum=False, and call start_quorum before next_batch"
            )
        quorum = self._quorum_id()
        # A step that was not committed is trained on again, with the batch that is already here.
        if quorum == self._quorum and self._handed is not None and self._handed[0] == step:
            return self._handed[1]
        loader = self._of(quorum, step, rank)
        if loader.next_step != step:
            raise StateError(
                f"the manager stands before step {step}, and this rank before step {loader.next_step} in the same "
                "quorum; call next_batch once for every step, in all ranks of the replica"
            )
        self._handed = step, loader.next_batch()
        return self._handed[1]

    def _of(self, quorum: int, step: int, rank: int) -> Loader:
        """Return the loader as one of the ranks of a quorum."""
        group_rank, group_size = self._group
        # The plane knows ranks, not replicas; the ranks of a replica are adjacent.
        rank, world_size = (
            rank * group_size + group_rank,
            self._manager.num_participants() * group_size,
        )
        if self._loader is None:
            with ExitStack() as stack:
                loader = omniload.join(
                    self._address,
                    rank=rank,
                    world_size=world_size,
                    step=step,
                    generation=quorum,
                    **self._keywords,
                )
                stack.callback(loader.close)
                # Joined now: a rank that is refused is another rank in the next quorum, and must not join as this one.
                loader.start()
                stack.pop_all()
            self._loader = loader
        elif quorum != self._quorum:
            self._loader.resize(rank, world_size, step=step, generation=quorum)
            # The old rank's batch is dropped. If the next one does not arrive, it is asked for again.
            self._handed = None
        # Set once the plane has accepted it, because a failed resize is asked for again.
        self._quorum = quorum
        return self._loader

    def close(self) -> None:
        """Leave the plane, which continues for the others."""
        if self._loader is not None:
            self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _id_of(manager: Quorum) -> Callable[[], int]:
    """Return a function that reads the number of a manager's quorum, which has no public name in torchft 0.2."""
    name = "_quorum_id"
    with suppress(AttributeError):
        # Asked now, so that a manager without it is reported when the loader is made, not in the first step.
        getattr(manager, name)
        return lambda: int(getattr(manager, name))
    raise ConfigError(
        f"{type(manager).__name__} does not say which quorum it is in; give quorum_id, which returns a number "
        "that rises with each one"
    )
