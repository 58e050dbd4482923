"""accelerate: its ``Accelerator``, with prepared loaders that keep our loader's state.

``prepare`` makes a new loader from the dataset, the sampler and torch's keywords. The ``Accelerator`` of this module
lets it do so, and then puts our loader below the new one. Sharding, dispatching, placement and gradient accumulation
remain accelerate's; the position is ours.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe
from typing_extensions import override

from omniload.base.errors import StateError
from trainer_integration.hosts.rank_states import has_states, load_states, save_states
from trainer_integration.loader.data_loader import DataLoader
from trainer_integration.loader.mixes import MixBatches

__all__ = ["Accelerator", "keep_place", "prepare_mix"]

_ITERATION = "iteration"
"""Key of accelerate's count of epochs, which it passes to samplers."""
_SEED = "initial_seed"
"""Key of the number to which accelerate's own sampler adds the epoch; by default, the seed of the process."""


class Accelerator(accelerate.Accelerator):
    """accelerate's own, with loaders that resume exactly.

    ``save_state`` and ``load_state`` keep the position of every prepared loader, one file per rank.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """Take accelerate's arguments."""
        super().__init__(*args, **keywords)
        self.register_save_state_pre_hook(self._save_places)
        self.register_load_state_pre_hook(self._load_places)

    __init__.__signature__ = inspect.signature(accelerate.Accelerator.__init__)  # type: ignore[attr-defined]

    @override
    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader as accelerate does, and keep its position."""
        # A loader that accelerate has wrapped shows our class, but has accelerate's own type.
        if issubclass(type(data_loader), DataLoader) and data_loader.is_mix:
            placed = self.device_placement if device_placement is None else device_placement
            prepared = prepare_mix(data_loader, self.device if placed else None)
            self._dataloaders.append(prepared)
            return prepared
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        keep_place(prepared)
        return prepared

    def _kept(self) -> list[Any]:
        return [
            each
            for each in self._dataloaders
            if isinstance(getattr(each, "base_dataloader", None), DataLoader)
        ]

    def _save_places(self, models: Any, weights: Any, folder: str) -> None:  # noqa: ARG002 -- accelerate's hook
        states = [_place_of(each) for each in self._kept()]
        if states:
            save_states(folder, states, rank=self.process_index, world_size=self.num_processes)

    def _load_places(self, models: Any, folder: str) -> None:  # noqa: ARG002 -- accelerate's hook
        kept = self._kept()
        if not kept or not has_states(folder):
            return
        states = load_states(
            folder,
            len(kept),
            rank=self.process_index,
            world_size=self.num_processes,
            elastic=all(each.base_dataloader.is_mix for each in kept),
        )
        for each, state in zip(kept, states, strict=True):
            if each.base_dataloader.is_held_out:
                continue
            each.load_state_dict(state)
            # accelerate returns this until it asks for a batch.
            each.dl_state_dict = dict(state)


def _place_of(prepared: Any) -> dict[str, Any]:
    """Return the position of a loader; empty for a split, because each evaluation begins anew."""
    return {} if prepared.base_dataloader.is_held_out else prepared.state_dict()


class _Hosted(DataLoader[Any]):
    """Our loader below one of accelerate's, which runs a batch ahead and changes the states it is given."""

    _is_accelerate_prepared = True
    _host: "weakref.ref[Any]"
    _group = 1
    """Batches that accelerate fetches before it hands out those fetched before."""

    @classmethod
    def below(cls, host: Any) -> "_Hosted":
        """Return a loader with the arguments of the loader made by ``host``."""
        made = cls(**_arguments_of(host.base_dataloader))
        # A weak reference: the host holds this loader, and a cycle would keep the workers until a collection.
        made._host = weakref.ref(host)
        return made

    @override
    def __iter__(self) -> Any:
        return self._fetched_ahead(super().__iter__())

    def _fetched_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches to accelerate; if one fails, return to the state of the batches that accelerate has handed out.

        Batches that it fetched before are lost with its loop.
        """
        host, number = self._host(), 0
        handed_out = begun = None if host is None else host.dl_state_dict
        while True:
            if number % self._group == 0 and host is not None:
                handed_out, begun = begun, host.dl_state_dict
            try:
                batch = next(batches)
            except StopIteration:
                return
            except BaseException:
                if host is not None:
                    host.dl_state_dict = handed_out
                raise
            yield batch
            number += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the number of epochs that accelerate has counted before it."""
        state, host = super().state_dict(), self._host()
        if host is not None and self._pending is None:
            state[_ITERATION] = host.iteration + (state["stage"] == "finished")
            if (sampler := _seedable(host)) is not None:
                state[_SEED] = sampler.initial_seed
        return state

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        host = self._host()
        if host is None or not state_dict:
            return
        count = state_dict.get(_ITERATION)
        if type(count) is not int or count < 0:
            raise StateError(
                f"the state counts {count!r} epochs of accelerate; load one that an accelerate run of ours has saved"
            )
        host.iteration = count
        if (sampler := _seedable(host)) is not None and type(state_dict.get(_SEED)) is int:
            sampler.initial_seed = state_dict[_SEED]


def _seedable(host: Any) -> Any:
    """Return accelerate's own sampler if it is in use, with the generator that it makes at its first epoch."""
    sampler = None if isinstance(host.dataset, IterableDataset) else host.get_sampler()
    if not isinstance(sampler, SeedableRandomSampler):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)
    return sampler


class _AsOfGroup:
    """The state of a loader that dispatches: rank 0 takes a batch per rank, one group ahead.

    accelerate asks for the state before each batch it takes. At that time, the group it hands out ends where the group
    it takes begins.
    """

    def __init__(self, host: Any, size: int) -> None:
        self._host, self._asked, self._size = weakref.ref(host), 0, size
        self._begin: dict[str, Any] = {}

    def __call__(self) -> None:
        host = self._host()
        if host is None or host.end_of_dataloader:
            self._asked = 0
            return
        if self._asked % self._size == 0:
            self._begin = host.dl_state_dict
        host.dl_state_dict = dict(self._begin)
        self._asked += 1


def keep_place(prepared: Any) -> None:
    """Put our loader below one that accelerate has prepared; a loader without a position stays as it is."""
    base = getattr(prepared, "base_dataloader", None)
    piped = isinstance(getattr(base, "dataset", None), IterDataPipe | MapDataPipe)
    if base is None or piped or isinstance(base, DataLoader):
        return
    prepared.base_dataloader = hosted = _Hosted.below(prepared)
    # Every rank would write the one file in which accelerate keeps such states.
    prepared.use_stateful_dataloader = False
    if isinstance(prepared, DataLoaderDispatcher):
        # A split batch is divided among all ranks, and ranks along tp share a batch; otherwise each rank has its own.
        one_for_all = prepared.split_batches or prepared.submesh_tp is not None
        hosted._group = 1 if one_for_all else prepared.state.num_processes
        prepared.adjust_state_dict_for_prefetch = _AsOfGroup(prepared, hosted._group)
    # accelerate returns this before the first batch; from then on it asks for the state itself.
    prepared.dl_state_dict = hosted.state_dict()


class _MixShard(DataLoaderShard):
    """accelerate's loader over a mix: it looks at the next batch to recognise the last one, but takes none ahead."""

    @override
    def __iter__(self) -> Iterator[Any]:
        # Begun by the first batch, as accelerate's own, because a Trainer makes iterators that it does not use.
        mix: MixBatches = self.base_dataloader.mix
        return mix.loop(self._made, self._begin_loop, self._end_loop)

    def _begin_loop(self) -> None:
        self.begin()
        iter(self.base_dataloader)  # a split begins anew

    def _made(self, batch: Any) -> Any:
        if self.device is not None:
            batch = send_to_device(batch, self.device, non_blocking=self._non_blocking)
        # If the next batch does not come, this one remains the next.
        self.end_of_dataloader = self.base_dataloader.mix.loader.is_at_end()
        return batch

    def _end_loop(self) -> None:
        self.iteration += 1
        self.end()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches handed out."""
        state: dict[str, Any] = self.base_dataloader.state_dict()
        return state


def prepare_mix(loader: DataLoader[Any], device: Any) -> Any:
    """Return a mix's loader as one of accelerate's: on the device, and known to gradient accumulation.

    Its batches already belong to this rank, so nothing is dealt again.
    """
    prepared = _MixShard(
        loader.dataset, device=device, batch_size=None, collate_fn=loader.collate_fn
    )
    # Replaces the loader made by accelerate's constructor, which is never iterated.
    prepared.base_dataloader = loader
    return prepared


def _arguments_of(base: Any) -> dict[str, Any]:
    """Return the keywords that make a loader like ``base``, which is torch's or torchdata's."""
    keywords = {
        name: getattr(base, name)
        for name in (
            "dataset",
            "num_workers",
            "collate_fn",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
            "generator",
            "prefetch_factor",
            "persistent_workers",
        )
    }
    keywords["in_order"] = getattr(base, "in_order", True)
    if base.batch_size is None and base.batch_sampler is not None:
        return keywords | {"batch_sampler": base.batch_sampler}
    if not isinstance(base.dataset, IterableDataset):
        keywords["sampler"] = base.sampler
    return keywords | {"batch_size": base.batch_size, "drop_last": base.drop_last}
