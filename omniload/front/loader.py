"""The loader that ``omniload.open`` returns: batches of one rank, and the state to resume from."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NoReturn, Protocol, Self

from typing_extensions import override

from omniload.base.concurrency.held_signals import SignalsHeld
from omniload.base.concurrency.threads import close_dropped, wait_for_dropped
from omniload.base.concurrency.turns import EachBatch, ask_in_turn
from omniload.base.errors import ConfigError, StateError
from omniload.base.state import Json, JsonObject
from omniload.client import Client
from omniload.front.arguments import (
    check_first,
    check_steps_left,
    refuse_images_by_mesh,
    require_rank,
    state_from,
    warn_of_empty_loop,
    warn_of_no_batch,
)
from omniload.front.batches.rows import PackedRows
from omniload.front.batches.training_batch import TrainingBatch
from omniload.front.delivery import BatchForm, CopyAhead, Observed, Observer
from omniload.front.spec import MixFacts
from omniload.front.turn import giving_way
from omniload.mix.journal.notes import RunNotes

__all__ = ["Loader", "OpenClient"]

_COPIED = (
    "the loader of a mix was copied, or handed to another process, such as a worker of torch's DataLoader; each copy "
    "would hand out the same batches: iterate it directly, it prefetches by itself"
)
_UNFILLED = (
    "the state is the empty one that this loader returned before its first batch. torch's DCP loads only the "
    "keys that it finds there, so none of the checkpoint, and the run would begin at step 0: save and load the state "
    "as one text, json.dumps(loader.state_dict()); to begin at step 0, load no state"
)
_NO_DATASET = "It is no dataset for a DataLoader of torch: it makes batches already, so iterate over it as it is"


class OpenClient(Protocol):
    """Opens or joins a plane."""

    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        """Return this rank's client, continuing from ``state``; whatever must be closed goes on ``stack``."""
        ...


_UNKNOWN = MixFacts()


class Loader:
    """Gives one rank its batches in step order, and the state to resume from; fits torch's ``Stateful``.

    Its state covers the batches handed out, whatever was prefetched after them, and is the same for any number of
    ranks. Load it on every rank, before or during iteration.
    """

    def __init__(
        self,
        open_client: OpenClient,
        form: BatchForm,
        facts: MixFacts = _UNKNOWN,
        *,
        state: Mapping[str, Json] | None = None,
        notes: RunNotes | None = None,
    ) -> None:
        self._facts, self._observer = facts, Observer(notes)
        self._open_client, self._form, self._state = open_client, form, state_from(state)
        stream = None if form.device is None else form.arrays.side_stream(form.device)
        self._ahead = None if stream is None else CopyAhead(form, stream)
        check_steps_left(self._state, facts.num_steps)
        begun = (self._state or {}).get("step", facts.first_step)
        self._begun = begun if isinstance(begun, int) else 0
        self.source_names = facts.names
        """Names of the sources; ``source_ids`` are indices into this list."""
        tags = facts.tags
        self.source_tags = () if tags is None else tuple(tags.get(name, {}) for name in facts.names)
        """Tags of each source, in the order of ``source_names``; after ``join``, known from the first batch on."""
        self.vocab_size = facts.vocab_size
        """Number of tokens of the tokenizer; ``None`` for a mix of token columns alone."""
        self.run_dir = None if notes is None else notes.run_dir
        """Folder of the run; ``None`` without one."""
        self.leads = facts.leads
        """Whether this rank, the first with labels, reports for its peers along tp, pp and ep with the same batches."""
        self.num_ranks = facts.num_ranks
        """Number of ranks along dp, each of which gets different samples."""
        self.peers = facts.peers
        """Numbers of the ranks along tp, pp and ep that have the same batches, this one among them; none without."""
        # Nothing is opened here: each of several ranks would wait in its constructor for the others.
        self._client: Client | None = None
        self._stack = ExitStack()
        self._dropped: weakref.finalize[..., Loader] | None = None
        self._closed = self._first_is_checked = False
        self._take_back: Callable[[], None] | None = None
        self._pid, self._loops_ended = os.getpid(), 0
        self._turn, self._one_opens = threading.RLock(), threading.RLock()
        self._unfilled: JsonObject | None = None  # returned before the plane was open

    @property
    def next_step(self) -> int:
        """Step of the next batch."""
        return self._open_once().next_step

    @property
    def last_wait_s(self) -> float:
        """Seconds that the loop waited for the last batch."""
        return self._open_once().last_wait_s

    def start(self) -> None:
        """Open or join the plane now, and prefetch. Without this call, the first batch does so."""
        self._open_once()

    def next_batch(self, timeout: float | None = None) -> TrainingBatch | None:
        """Return the next batch; ``None`` once the data or the steps of the run have ended.

        Args:
            timeout: Longest wait in seconds; ``None`` for the mix's ``runtime.batch_timeout``.

        Raises:
            UnavailableError: The time has passed; the message says which role is late, and why.
            OmniloadError: The data plane has failed; this is the error that was raised there.
            StateError: The loader is closed.
        """
        self._refuse_copy()
        return ask_in_turn(self._turn, timeout, self._next_batch)

    def _next_batch(
        self, timeout: float | None, take_back: list[Callable[[], None]]
    ) -> TrainingBatch | None:
        client = self._open_once()
        batch = client.wait_for_batch(timeout)
        if batch is None:
            self._observer.begin(
                None
            )  # the last may lie on a device, which an evaluation wants for itself
            # Not for a rank that joins a plane at its end, because it begins at a later step.
            if self._state is None and not self.next_step and not self._first_is_checked:
                self._first_is_checked = True
                warn_of_no_batch()
            return None
        if not self._first_is_checked:
            check_first(batch, self.vocab_size, assumed_alone=self._facts.assumed_alone)
            self._first_is_checked = True
        if len(batch.tokens_by_source) > len(self.source_tags):  # an edit of the mix added some
            self.source_names = tuple(batch.tokens_by_source)
            self.source_tags = tuple(batch.source_tags.get(name, {}) for name in self.source_names)
        handed = self._form.of(batch) if self._ahead is None else self._ahead.hand_over(batch)
        # The batch is handed out only once it is made. If making it fails or is interrupted, it remains the next batch.
        back = partial(client.take_back, batch)
        client.hand_out()
        take_back.append(back)  # no call between the two
        self._take_back = back
        self._observer.begin(handed)
        if self._ahead is not None:
            # This comes after the batch is handed out, so that its step does not wait for the copies of the next.
            self._ahead.begin(client.peek())
        return handed

    def is_at_end(self, timeout: float | None = None) -> bool:
        """Whether no batch follows those handed out. Waits for the next batch, which stays the next.

        Args, Raises: as for ``next_batch``.
        """
        waited = ask_in_turn(self._turn, timeout, lambda s, _: self._open_once().wait_for_batch(s))
        return waited is None

    def take_back(self) -> None:
        """Make the last batch the next one again, because its loop ended before using it."""
        back, self._take_back = self._take_back, None
        self._observer.begin(None)
        if back is not None:
            back()

    def observe(  # noqa: PLR0913 -- one for each thing that a loop may know
        self,
        rows: PackedRows | None = None,
        losses: object = None,
        *,
        document_losses: object = None,
        source: str | None = None,
        loss: object = None,
        reward: object = None,
        labels: int | None = None,
        rewards: object = None,
        seconds: object = None,
    ) -> None:
        """Report losses, for ``omniload mix audit`` and ``mix show``, or rewards; policies use both. Or report a time.

        A call copies the values to the host and writes a line in the run's folder, which keeps the latest 64 MiB of
        each rank; without ``run_dir=`` nothing is kept. A mean counts once for each of its labels when the reports of
        ranks are averaged. ``DynamicSampler`` reports the rewards of its rollouts itself.

        Args:
            rows: The batch that was handed out last (the default), or one of its microbatches.
            losses: Loss of each label, ``[R, T]``, any value where the label is -100; or the mean of each row, ``[R]``.
                If cp peers share the rows, each peer reports the labels that it holds.
            document_losses: Mean of each of the ``pieces()`` of the rows, ``[K]``.
            source: Name of a source; ``loss`` or ``reward`` is then the mean over its labels in the rows.
            loss: A mean, over a source or over all the rows.
            reward: A mean over ``source``, for policies, in any scale.
            labels: Number of labels of the mean of ``source``, if it covers the whole step; then only one rank reports.
            rewards: Reward of each answer of each of the ``pieces()``, ``[K, G]``; above 0 for a right answer.
            seconds: Compute time of this rank for the rows, forward and backward, without waits for other ranks;
                ``balance.fit_every`` and ``omniload mix show`` fit the cost of documents to it.

        Raises:
            ConfigError: Values have a wrong shape, none or several that exclude each other are given, rows were
                reported before, the source does not exist, or no batch was handed out.
            StateError: The loader is closed.
        """
        told = Observed(
            losses=losses,
            document_losses=document_losses,
            source=source,
            loss=loss,
            reward=reward,
            labels=labels,
            rewards=rewards,
            seconds=seconds,
        )
        if self._closed:
            raise StateError("the loader is closed; observe a batch before that")
        if (rows := self._observer.handed if rows is None else rows) is None:
            raise ConfigError("observe tells of the batch handed out last; ask for one first")
        # Of the batch handed out last. All is checked even where nothing is kept: a try-out is told of wrong ones too.
        step = 0 if self._observer.notes is None else self._open_once().next_step - 1
        self._observer.note(step, rows, self.source_names, told)

    def state_dict(self) -> JsonObject:
        """Return the state after the batches handed out so far, as plain JSON; empty at the start of a new run."""
        # Trainers ask for a state before they load one. Opened at step 0 for that, a resumed run would repeat steps.
        if self._client is None and not self._closed:
            self._refuse_copy()
            self._unfilled = dict(self._state or {})
            return self._unfilled
        return self._open_once().state_dict()

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Continue where ``state`` was taken; an empty state changes nothing, as torch's trainers expect.

        Raises:
            StateError: It is not a state, or the empty one that this loader itself returned. The next batch shows
                whether it fits the mix and the data.
        """
        if state is self._unfilled and not state:
            raise StateError(_UNFILLED)
        wanted = state_from(state)  # first, because an invalid state must not end the plane
        if self._closed:
            raise StateError("the loader is closed; load the state into one that is open")
        if wanted is None:
            return
        check_steps_left(wanted, self._facts.num_steps)
        self._end_plane()
        self._state, self._loops_ended = wanted, 0

    def resize(
        self, rank: int, world_size: int, *, step: int | None = None, generation: int | None = None
    ) -> None:
        """Become another rank among others, from the next step on. Each rank that stays calls this at the same step.

        Ranks that arrive give the same numbers to ``join``. The samples of a step stay; they are dealt anew. The mix
        must be opened with ``elastic=True``, or by ``serve``.

        Args:
            rank: Number of this rank along dp, from 0.
            world_size: Number of ranks along dp.
            step: First step of these ranks: the next one, or the last one again if a rank died in it.
            generation: Number of these ranks, which rises with each change; ``None`` for the one after this loader's.

        Raises:
            ConfigError: An argument is refused, or the mix was not opened as elastic.
            StateError: Other ranks disagree, or the step cannot be dealt to others; this rank does not change.
            UnavailableError: The plane does not answer.
        """
        require_rank(rank, world_size, step, generation)
        if self._form.ranks:
            refuse_images_by_mesh()
        self._open_once().resize(rank, world_size, step=step, generation=generation)
        # only now, because this rank stays what it was if the plane refuses
        self.num_ranks, self._take_back = world_size, None
        if self._ahead is not None:
            self._ahead.drop()  # it is this rank's share in the earlier world

    def close(self) -> None:
        """End the plane, or leave it if another rank brought it up. A second call, or one in a fork, does nothing."""
        self._closed = True  # first, so that a concurrent call is refused and opens no other plane
        if self._pid == os.getpid():  # a fork that leaves ``with`` ends nothing
            self._end_plane()

    def _open_once(self) -> Client:
        """Return this rank's client; the first call opens or joins the plane, and other threads wait for it."""
        self._refuse_copy()
        client = self._client
        if client is None and not self._closed:
            client = ask_in_turn(self._one_opens, None, lambda *_: self._opened())
        if client is None or self._closed:
            raise StateError("the loader is closed; open the mix again")
        return client

    def _opened(self) -> Client | None:
        if self._client is None and not self._closed:
            # When a cell of a notebook runs again, folder and Ray still belong to the loader that this one replaces.
            wait_for_dropped("the data plane of a loader that was dropped without close()")
            # If something fails, the open parts are closed here; otherwise the loader closes them later.
            with SignalsHeld(), ExitStack() as stack:
                self._client = self._open_client(stack, self._state)
                if self._facts.gives_way:
                    stack.enter_context(giving_way(self._client.state_dict, self._give_way))
                self._stack = stack.pop_all()
            if self._facts.is_alone:
                self._dropped = weakref.finalize(self, close_dropped, self._pid, self._stack.close)
                self._dropped.atexit = False  # threads end with the process anyway
            if self._closed:  # closed meanwhile by another thread, which found nothing to end
                self._end_plane()  # type: ignore[unreachable]
        return self._client

    def _give_way(self, state: JsonObject | None) -> None:
        """End the plane; the next batch opens it anew at ``state``, and is refused if that is lost."""
        if self._pid == os.getpid():  # a fork ends nothing of its parent's
            self._state, self._closed = state, self._closed or state is None
            self._end_plane()

    def _refuse_copy(self) -> None:
        if self._pid != os.getpid():  # a fork, in which ``__getstate__`` never ran
            raise ConfigError(_COPIED)

    def _end_plane(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
        if self._dropped is not None:
            self._dropped.detach()
        # The references are dropped first: even if closing raises an error, the next batch opens a new plane.
        stack, self._stack, self._client = self._stack, ExitStack(), None
        self._take_back = None
        self._observer.begin(None)
        with SignalsHeld(to_the_end=True):
            stack.close()

    def __len__(self) -> int:
        """Return the number of batches from where it was opened to ``steps``, however many were handed out since."""
        # With a length that is too large, Lightning would wait for a last batch that never comes.
        num_steps = self._facts.num_steps
        if num_steps is None or not self._facts.repeats:
            raise TypeError(
                "this loader has no length: steps= gives it one, where stop of the mix is never; count batches as they "
                f"come. {_NO_DATASET}"
            )
        return num_steps - self._begun

    def __getitem__(self, index: object) -> NoReturn:
        """Refuse the indexing that torch's ``DataLoader`` needs of a dataset."""
        raise TypeError(
            f"a loader has no batch number {index!r:.20}: it hands them out in turn. {_NO_DATASET}"
        )

    def __bool__(self) -> bool:
        return True  # otherwise ``if loader:`` would ask for its length

    def __iter__(self) -> Iterator[TrainingBatch]:
        return EachBatch(self.next_batch, self.end_loop)

    def end_loop(self, handed_out: int) -> None:
        """Note that a loop over the batches has reached their end, and how many batches it got."""
        self._loops_ended += 1
        if self._loops_ended == 2 and not handed_out:  # as in ``for epoch in range(3)``
            warn_of_empty_loop()

    @override
    def __repr__(self) -> str:
        opened = "not opened" if self._client is None else f"next_step={self._client.next_step}"
        return f"Loader(sources={list(self.source_names)}, {'closed' if self._closed else opened})"

    @override
    def __getstate__(self) -> NoReturn:
        """Refuse to leave this process, because a copy would hand out the same batches again."""
        raise ConfigError(_COPIED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
