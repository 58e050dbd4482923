"""How batches are handed to a training loop: as which arrays, and copied to its device ahead of it.

::

    trainer's stream   compute 5 ............ │ copy of 6 is there │ compute 6 ............ │
    side stream        └ copy 6 ┘                                    └ copy 7 ┘

Copied ahead are the fields that the batch before was asked for; a field that is asked for besides is copied then.
One batch is ahead, and takes its size of the device's memory. What the loader's state says is of
batches handed out: the one that is ahead is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import DEBUG, WARNING
from typing import Any

from omniload.base.log import get_logger
from omniload.batch.arrays import Arrays, SideStream
from omniload.batch.microbatch import Batch
from omniload.batch.stages import Stage, own_part
from omniload.front.batches.rows import Fields, Labels
from omniload.front.batches.training_batch import TrainingBatch

__all__ = ["BatchForm", "CopyAhead"]

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForm:
    """How a loader hands batches over."""

    arrays: Arrays
    labels: Labels = "shifted"
    device: object = None
    """``None`` leaves tensors where they are made."""
    peer: int = 0
    """Number of this rank among those that take the same batch."""
    ranks: tuple[int, ...] = ()
    """Numbers of all ranks by place, as ``Place.ranks``, where images are dealt to them."""
    stage: Stage | None = None
    """Stage of this rank along pp, whose columns alone it has; ``None`` without several."""

    def of(self, batch: Batch) -> TrainingBatch:
        """Return a batch of the data plane as a training loop takes it."""
        batch = own_part(batch, self.peer, self.ranks, self.stage)
        return TrainingBatch(batch, self.arrays, self.labels, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A batch whose copies are under way."""

    of: Batch
    rows: TrainingBatch
    copies: Sequence[Any]
    mark: object


class CopyAhead:
    """Makes batches of the data plane batches of a training loop, one ahead of it."""

    def __init__(self, form: BatchForm, stream: SideStream) -> None:
        self._form, self._stream = form, stream
        self._ahead: _Ahead | None = None
        self._last: TrainingBatch | None = None
        self._fields = Fields()
        self._has_warned = False

    def hand_over(self, batch: Batch) -> TrainingBatch:
        """Return a batch that the trainer may use now, with the copies under way where they are of this batch."""
        ahead, self._ahead = self._ahead, None
        # By identity: behind a load or a resize another batch may have the same step.
        if ahead is not None and ahead.of is batch:
            self._stream.arrive(ahead.copies, ahead.mark)
            handed = ahead.rows
        else:
            handed = self._form.of(batch)
        # By now the loop has asked the last batch for whatever it uses: its step is over.
        self._fields = Fields() if self._last is None else self._last.fields_asked()
        self._last = handed
        return handed

    def begin(self, batch: Batch | None) -> None:
        """Begin to copy the next batch; ``None`` where it is not built yet.

        One that the device has no memory for is not copied ahead: its fields are, as they are read.
        """
        if batch is None:
            return
        copies: list[Any] = []

        def put(tensor: Any) -> Any:  # noqa: ANN401
            copies.append(self._stream.copied(tensor))
            return copies[-1]

        # Without the fields of a first batch nothing is copied: what a loop uses is not known yet.
        rows = self._form.of(batch)
        try:
            rows.fill(self._fields, put)
            mark = self._stream.mark()
        except RuntimeError as error:  # ``torch.OutOfMemoryError`` is one
            # Raised here, it would take the batch before along, which is handed out already.
            _LOG.log(
                DEBUG if self._has_warned else WARNING,
                "step %d is not copied ahead of its turn, but as its fields are read: %s; leave the device room for "
                "two batches, or open the mix without device= and copy by batch.to()",
                *(batch.step, error),
            )
            self._has_warned = True
            return
        self._ahead = _Ahead(of=batch, rows=rows, copies=copies, mark=mark)

    def drop(self) -> None:
        """Forget the copies under way: the loader goes on at another step, or as another rank."""
        self._ahead = self._last = None
