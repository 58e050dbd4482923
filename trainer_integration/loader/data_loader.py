"""``DataLoader``: torch's own loader with a state. With a mix as its dataset, the data plane provides batches."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal, Self, overload

import torch.utils.data
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _DatasetKind
from typing_extensions import TypeVar, override

from omniload.base.errors import StateError
from omniload.mix.other_states import is_of_torchdata
from trainer_integration.loader.balancing import cost_batches
from trainer_integration.loader.iterators import Noting, OneProcess
from trainer_integration.loader.mixes import Mix, MixBatches, is_mix, open_batches, refuse_loader
from trainer_integration.loader.resuming.loader_state import LoaderState, without_marks
from trainer_integration.loader.resuming.progress import Progress, check
from trainer_integration.loader.resuming.torchdata_states import from_torchdata
from trainer_integration.loader.samplers import Anatomy, shape_of
from trainer_integration.loader.shared.group import Share
from trainer_integration.loader.ways import Ways

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True, default=Any)
_REMADE = (
    "accelerate has made a new loader of this one, which was never iterated: ask the prepared loader. It has a state "
    "where the Accelerator is that of trainer_integration.hosts.accelerate"
)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """``torch.utils.data.DataLoader`` with ``state_dict`` and ``load_state_dict``.

    Arguments, batches, seeding and errors are those of torch. The state covers the batches handed out, whatever the
    workers have prefetched. For a map dataset, a resume loads no sample, and works with any number of workers. In place
    of a dataset, give a mix, with the keywords of ``omniload.open``. With ``split=``, each loop begins anew; without
    it, loops over a mix continue.
    """

    _pending: Mapping[str, Any] | None = None
    """State with which the next iterator begins."""
    _moved = False
    """Whether the next loop over a split continues at a place that was loaded."""
    _progress: Progress | None = None
    """Progress of the iterator that was made last."""
    _remade = False
    """Whether a framework has made another loader from this one."""
    _live: "weakref.ref[Noting] | None" = None
    _ways = Ways()
    _share: Share | None = None

    # For editors, type checkers and the reference; the real method takes the arguments of any release of torch.
    @overload
    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: Literal["process", "thread"] = "process",
        on_hang: Literal["raise", "replace"] = "raise",
        share: bool | str = False,
        cost_fn: Callable[[Any], float] | None = None,
        cost_counts: Literal["equal", "free"] = "equal",
    ) -> None: ...

    @overload
    def __init__(
        self, dataset: Mix, *, collate_fn: Callable[[Any], Any] | None = None, **keywords: Any
    ) -> None: ...

    def __init__(self, dataset: Any, *args: Any, **keywords: Any) -> None:
        """Make a loader from torch's arguments, or from a mix and the arguments of ``omniload.open``.

        Args:
            dataset: A dataset, as for torch; or a mix: its file, its contents as a mapping with ``sources``, or its
                model.
            *args: torch's arguments, by position.
            **keywords: torch's keywords and those below; for a mix, ``collate_fn`` and those of ``omniload.open``.

        Keyword Args:
            workers (str): ``"thread"`` makes batches in threads of this process.
            on_hang (str): ``"replace"`` starts another worker for one that dies or gives nothing within ``timeout=``.
            share (bool | str): ``True`` or a name, for workers that the ranks of a machine share.
            cost_fn (Callable[[Any], float] | None): Cost of an index, by which each global batch is dealt over the
                ranks of a ``DistributedSampler``.
            cost_counts (str): ``"equal"`` for the same number of samples on every rank, ``"free"`` for at least one.

        Raises:
            ConfigError: The dataset is a loader, or keywords do not go together.
        """
        refuse_loader(dataset)
        self._batches: MixBatches | None = None
        if is_mix(dataset):
            self._batches = open_batches(dataset, args, keywords)
            batches: Any = self._batches
            # Batches arrive complete, so torch must not collate them.
            super().__init__(batches, batch_size=None, collate_fn=self._batches.form)
            return
        self._ways = Ways.taken_from(keywords)
        cost_fn, counts = keywords.pop("cost_fn", None), keywords.pop("cost_counts", "equal")
        super().__init__(dataset, *args, **keywords)
        self._ways.check(self)
        self._share = self._ways.joining()
        if cost_fn is not None:
            # torch forbids setting this attribute later, and its arguments must show the user's sampler.
            vars(self)["batch_sampler"] = cost_batches(self, cost_fn, counts)

    # Frameworks read the arguments from the signature.
    __init__.__signature__ = inspect.signature(torch.utils.data.DataLoader.__init__)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last iterator after the batches that it has handed out.

        The state is plain JSON, except for the parts that come from datasets and samplers with states of their own.

        Raises:
            StateError: The position cannot be given exactly; the message says what would help.
        """
        if self._batches is not None:
            return self._batches.loader.state_dict()
        if self._pending is not None:
            return deepcopy(dict(self._pending))
        if self._remade and self._progress is None:
            raise StateError(_REMADE)
        return (self._progress or Progress(self, None)).state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where a state was taken: with the next ``iter``, or in the iterator that is in use.

        A state of a map dataset from torchdata's ``StatefulDataLoader`` can be read, too. An empty state changes
        nothing, as torch's trainers expect.

        Raises:
            StateError: It is not a state, or it belongs to other samples, batches, samplers or workers.
        """
        if self._batches is not None:
            wanted = without_marks(state_dict)
            moves = bool(wanted and self.is_held_out and self._batches.beginning)
            self._batches.loader.load_state_dict(wanted)
            self._moved |= moves
            return
        if not isinstance(state_dict, Mapping):
            raise StateError(
                f"the state is of type {type(state_dict).__name__}; pass the result of state_dict()"
            )
        if not state_dict:
            return
        anatomy = Anatomy(self._index_sampler, self.generator)
        shape = shape_of(self, anatomy)
        if is_of_torchdata(state_dict):
            iterable = self._dataset_kind == _DatasetKind.Iterable
            state_dict = from_torchdata(state_dict, anatomy, shape, iterable=iterable)
        # Checked before anything changes, so that a refused state leaves the loader where it is.
        check(self, LoaderState.of(state_dict), shape)
        # A copy, because datasets and samplers may change the state they are given, and a state may be loaded again.
        self._pending = deepcopy(dict(state_dict))
        if self._live is not None and (live := self._live()) is not None:
            live._moved = self

    @property
    def mix(self) -> MixBatches:
        """The loader of the mix that hands out the batches."""
        assert self._batches is not None, "a loader of a mix"
        return self._batches

    @property
    def is_mix(self) -> bool:
        """Whether the batches come from the data plane."""
        return self._batches is not None

    @property
    def is_held_out(self) -> bool:
        """Whether the batches come from a split of a mix, which each loop goes through from its beginning."""
        return self._batches is not None and self._batches.held_out

    def begin_anew(self) -> None:
        """Make the next loop over a mix begin where the first one began."""
        if self._batches is not None:
            self._batches.begin_anew()

    def loop(self, make: Callable[[Any], Any]) -> Iterator[Any]:
        """Return a loop like that of ``iter``, with ``make`` applied to each batch of a mix.

        If ``make`` fails for a batch, or Ctrl-C interrupts before the loop gets it, that batch stays the next one.
        Batches of a dataset are not changed.
        """
        if self._batches is None:
            return iter(self)
        self._begin_loop()
        return self._batches.loop(make)

    def _begin_loop(self) -> None:
        if self.is_held_out and not self._moved:
            self.begin_anew()
        self._moved = False

    @property
    def server_pid(self) -> int | None:
        """Process that owns the workers which this rank shares, once it has joined them."""
        return None if self._share is None else self._share.server_pid

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether accelerate is to save the state of this loader itself: true for a mix, which it does not rebuild.

        A held-out split has no position to keep, because each evaluation begins anew.
        """
        return self.is_mix and not self.is_held_out

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether accelerate must leave the loader as it is: a mix already deals each rank its batches.

        Only accelerate reads this property. It replaces any other loader by a new one.

        Raises:
            StateError: A state is loaded, which the new loader would lack.
        """
        if self._pending is not None:
            raise StateError(
                "a state was loaded before accelerate's prepare, which makes a new loader without it; prepare first, "
                "and load the state into the prepared loader"
            )
        self._remade = not self.is_mix
        return self.is_mix

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, _: bool) -> None:
        """Let accelerate set the property."""

    def close(self) -> None:
        """End the persistent workers, or the data plane of a mix."""
        if self._batches is not None:
            self._batches.loader.close()
        self._end_kept_workers()
        if self._share is not None:
            self._share.close()

    def _end_kept_workers(self) -> None:
        # torch keeps one iterator if workers are persistent, and would reset it instead of making another.
        kept: Any = self._iterator
        if isinstance(kept, Noting):
            kept._stop_making()
        self._iterator = None

    def _begin(self) -> Progress:
        """Return the progress of an iterator that begins now."""
        # Parsed again instead of kept from ``load_state_dict``: until now the state is plain, and may be asked for.
        state = None if self._pending is None else LoaderState.of(self._pending)
        self._progress = Progress(self, state)
        self._pending = None
        return self._progress

    @override
    def __iter__(self) -> Any:
        if self._pending is not None:
            # Persistent workers have positions of their own.
            self._end_kept_workers()
        self._begin_loop()
        return super().__iter__()

    @override
    def _get_iterator(self) -> Any:
        if self._batches is not None:
            return self._batches.loop()  # the mix keeps the position
        if self.num_workers == 0:
            made: Noting = OneProcess(self)
        else:
            self.check_worker_number_rationality()
            made = self._ways.kind(self)
        # A weak reference, so that an iterator which the trainer drops is collected, and its workers end.
        self._live = weakref.ref(made)
        return made

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process's iterators."""
        return {**vars(self), "_live": None, "_progress": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
