"""Handing batches to a training loop: their arrays, the copy to its device in advance, and the loop's reports on them.

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

from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.batch.arrays import Arrays, SideStream
from omniload.batch.losses import means_of_source
from omniload.batch.microbatch import Batch
from omniload.batch.stages import Stage, own_part
from omniload.front.arguments import require_whole, warn_of_no_label
from omniload.front.batches.rows import Fields, Labels, PackedRows
from omniload.front.batches.training_batch import TrainingBatch
from omniload.mix.edits.sources import require_known
from omniload.mix.journal.notes import RunNotes
from omniload.mix.journal.times import require_seconds

__all__ = ["BatchForm", "CopyAhead", "Observed", "Observer"]

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
    values_per_patch: int = 0
    """Values of a patch of the images of the mix; 0 if it has none."""

    def of(self, batch: Batch) -> TrainingBatch:
        """Return a batch of the data plane in the form that a training loop takes."""
        batch = own_part(batch, self.peer, self.ranks, self.stage)
        return TrainingBatch(batch, self.arrays, self.labels, self.device, self.values_per_patch)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """A report of a loop on some rows: the arguments of ``Loader.observe``.

    Raises:
        ConfigError: Two arguments exclude each other, or there is none.
    """

    losses: object
    document_losses: object
    source: str | None
    loss: object
    reward: object
    labels: int | None
    rewards: object
    seconds: object

    def __post_init__(self) -> None:
        """Refuse an impossible report."""
        of_rows = [each is not None for each in (self.losses, self.document_losses)]
        means = [each is not None for each in (self.loss, self.reward)]
        if not any((*of_rows, *means, self.rewards is not None, self.seconds is not None)):
            raise ConfigError("observe is given no losses, rewards or seconds; give one of them")
        if self.source is None and (self.reward is not None or self.labels is not None):
            raise ConfigError(
                "observe got a reward, or labels, without a source; name the source, or give the rewards "
                "of all answers as rewards=[K, G]"
            )
        if not isinstance(self.source, str | None):
            raise ConfigError(
                f"source is {self.source!r:.80}; give the name of one, as source_names has it"
            )
        if self.source is not None and not any(means):
            raise ConfigError(
                f"observe is given the source {self.source!r}, but no loss or reward; give one"
            )
        if sum((*of_rows, means[0])) > 1 or (self.source is not None and any(of_rows)):
            raise ConfigError(
                "observe is given losses in two ways, which would count twice; give one of losses, document_losses "
                "and loss, the last of them for a source too"
            )
        if self.labels is not None:
            require_whole("labels", self.labels, least=1)
        if self.seconds is not None:
            require_seconds(self.seconds)

    @property
    def row_losses(self) -> object:
        """Losses by label, by row or of all rows; ``None`` if they are of documents or a source."""
        return self.loss if self.source is None and self.losses is None else self.losses

    @property
    def sums(self) -> list[str]:
        """Names, for messages, of the values that are summed."""
        means = {"loss": self.loss, "reward": self.reward} if self.source is not None else {}
        found = [f"the {of} of {self.source}" for of, told in means.items() if told is not None]
        if self.row_losses is not None or self.document_losses is not None:
            found.append("losses")
        return found + ["rewards"] * (self.rewards is not None)


class Observer:
    """Notes a loop's reports on the last batch, each value once.

    Losses and rewards are summed for policies, so a repeated report would count twice, for example one of a microbatch
    after one of the whole batch. Every report of a time counts, because times are measurements.
    """

    def __init__(self, notes: RunNotes | None) -> None:
        """Note in the folder of a run; ``None`` only checks reports, and keeps nothing."""
        self.notes = notes
        self.handed: TrainingBatch | None = None
        """Batch of a report that names no rows; ``None`` before the first batch and after the last."""
        self._told: dict[tuple[str, int], object] = {}
        """Reported rows by value and ``id``; they are kept alive, because other objects would reuse their ids."""
        self._silent_is_told = False

    def begin(self, batch: TrainingBatch | None) -> None:
        """Begin with a batch that was handed out; ``None`` if there is no other."""
        self.handed = batch
        self._told.clear()

    def note(self, step: int, rows: PackedRows, names: Sequence[str], told: Observed) -> None:
        """Note a report on rows of a step; if any part of it is refused, note nothing.

        Args:
            step: The step.
            rows: The batch, or one of its microbatches.
            names: Names of the sources, by number.
            told: The report.

        Raises:
            ConfigError: A value has another shape than the rows, there is no such source, or it is a repetition.
        """
        self._require_new(step, rows, told)
        got = {} if told.rewards is None else rows.rewards_of_sources(told.rewards)
        counts = True
        if told.source is not None:
            counts = self._note_source(step, rows, names, told)
        elif told.row_losses is not None or told.document_losses is not None:
            found = rows.losses_by_document(told.row_losses, document_losses=told.document_losses)
            if self.notes is not None:
                of_pieces = names, found.keys_K4, found.sums_K, found.labels_K
                self.notes.losses.add(step, *of_pieces, over=found.over, columns=found.columns)
        if self.notes is not None and told.rewards is not None:
            self.notes.rewards.add(step, {names[source]: each for source, each in got.items()})
        if self.notes is not None and told.seconds is not None:
            self.notes.times.add(step, *rows.work(), require_seconds(told.seconds))
        if counts:
            self._told |= {(what, id(part)): part for what in told.sums for part in rows.parts()}

    def _require_new(self, step: int, rows: PackedRows, told: Observed) -> None:
        parts = rows.parts()
        for what in told.sums:
            if again := sum((what, id(part)) in self._told for part in parts):
                raise ConfigError(
                    f"observe is given {what} of step {step} again, of {again} of {len(parts)} microbatches, which "
                    "would count twice; tell it once of the batch, or once of each of its microbatches, by "
                    "observe(rows, ...)"
                )

    def _note_source(
        self, step: int, rows: PackedRows, names: Sequence[str], told: Observed
    ) -> bool:
        """Note the means of a source; return whether they count, which they do only with labels in the rows."""
        assert told.source is not None, "it is told of"
        means = means_of_source(told.loss, told.reward)
        require_known([told.source], names)
        found = rows.losses_by_document(0.0)
        own, first = found.of_source(names.index(told.source))
        if not (count := own if told.labels is None else told.labels) and not self._silent_is_told:
            self._silent_is_told = True
            warn_of_no_label(step, told.source)
        if self.notes is not None and count:
            # A report on the whole step counts once; a report on these rows counts for each cp peer with labels.
            told_of = (first, found.columns) if told.labels is None else (None, None)
            self.notes.add_means(step, told.source, means, count, *told_of)
        return count > 0
