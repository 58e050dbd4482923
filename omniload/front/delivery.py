"""How batches are handed to a training loop: as which arrays, and copied in advance to the loop's device.

::

    trainer's stream   compute 5 ............ │ copy of 6 is there │ compute 6 ............ │
    side stream        └ copy 6 ┘                                    └ copy 7 ┘

The fields that the loop used of the previous batch are copied in advance. If the loop asks for another field, that
field is copied at that moment. One batch is copied in advance, and takes up its size of the device's memory. The
loader's state covers the batches handed out, so it does not include the batch copied in advance.
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
    """Form in which a loader hands out batches."""

    arrays: Arrays
    labels: Labels = "shifted"
    device: object = None
    """Device of the tensors; ``None`` leaves them where they are made."""
    peer: int = 0
    """Number of this rank among the ranks that take the same batch."""
    ranks: tuple[int, ...] = ()
    """Numbers of all ranks by place, as in ``Place.ranks``; set if images are dealt to them."""
    stage: Stage | None = None
    """Stage of this rank along pp, whose columns alone it gets; ``None`` without several stages."""

    def of(self, batch: Batch) -> TrainingBatch:
        """Return a batch of the data plane in the form that a training loop takes."""
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
    """Converts batches of the data plane into batches of a training loop, one batch in advance."""

    def __init__(self, form: BatchForm, stream: SideStream) -> None:
        self._form, self._stream = form, stream
        self._ahead: _Ahead | None = None
        self._last: TrainingBatch | None = None
        self._fields = Fields()
        self._has_warned = False

    def hand_over(self, batch: Batch) -> TrainingBatch:
        """Return a batch that the trainer may use now, with its copies if they were started in advance."""
        ahead, self._ahead = self._ahead, None
        # Compared by identity, because after a load or a resize another batch may have the same step.
        if ahead is not None and ahead.of is batch:
            self._stream.arrive(ahead.copies, ahead.mark)
            handed = ahead.rows
        else:
            handed = self._form.of(batch)
        # The step of the last batch is over, so the loop has asked it for all fields that it uses.
        self._fields = Fields() if self._last is None else self._last.fields_asked()
        self._last = handed
        return handed

    def begin(self, batch: Batch | None) -> None:
        """Begin to copy the next batch; ``None`` if it is not built yet.

        If the device has no memory for it, nothing is copied in advance, and each field is copied when it is read.
        """
        if batch is None:
            return
        copies: list[Any] = []

        def put(tensor: Any) -> Any:  # noqa: ANN401
            copies.append(self._stream.copied(tensor))
            return copies[-1]

        # Before the first batch has been used, no fields are copied, because the loop's fields are unknown.
        rows = self._form.of(batch)
        try:
            rows.fill(self._fields, put)
            mark = self._stream.mark()
        except RuntimeError as error:  # ``torch.OutOfMemoryError`` is one
            # The error is not raised here, because it would also lose the previous batch, which is handed out already.
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
        """Discard the copies under way, because the loader continues at another step or as another rank."""
        self._ahead = self._last = None
