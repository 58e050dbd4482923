"""States of other loaders: how to recognize them, and what to do instead of resuming from one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniload.base.errors import StateError
from omniload.base.state import whole_number

__all__ = [
    "OF_DATASET",
    "OF_MIX",
    "SHOWN_KEYS",
    "TorchdataPlace",
    "is_of_torchdata",
    "place_of_torchdata",
    "refuse_others",
    "writer_of",
]

_OTHERS = {
    "sample_in_epoch": "Mosaic Streaming",
    "batches_processed": "OLMo-core",
    "_snapshot": "torchdata's StatefulDataLoader",
    "_num_yielded": "torchdata's StatefulDataLoader",
    "examples_iterable": "Hugging Face datasets",
}
"""Loader whose states contain a key."""
OF_MIX, OF_DATASET = "a mix", "a DataLoader over a dataset"
_OURS = {
    frozenset({"fingerprint", "carried"}): OF_MIX,
    frozenset({"shape", "stage"}): OF_DATASET,
}
"""Which of the two kinds of states of this package contain all of some keys."""
_INSTEAD = {
    "Mosaic Streaming": ", or leave out what it had drawn: omniload mix import --from llm-foundry --state",
    "torchdata's StatefulDataLoader": ", or leave out what it had drawn: omniload mix import --from torchdata --state",
}
_OF_WORKERS = {"_snapshot", "_steps_since_snapshot"}
_OF_ONE_PROCESS = {"_num_yielded", "_sampler_iter_yielded"}
_MOST = 1 << 62
_NEW_EPOCH = "begin a new epoch with the saved model"
_ENERGON = "megatron.energon"
"""Package that defines the classes of Energon's states."""
SHOWN_KEYS = 6
"""Number of keys of an invalid state that a message lists."""


def writer_of(state: object, *, own: str = OF_MIX) -> str | None:
    """Return the loader, other than ``own``, that evidently wrote a state; ``None`` if none is recognized."""
    # Recognized by the name of its module, because the package is installed where the state comes from, but not here.
    if type(state).__module__.startswith(_ENERGON):
        return "Megatron-Energon"
    if not isinstance(state, Mapping):
        return None
    if "version" in state:
        return next(
            (whose for keys, whose in _OURS.items() if keys <= state.keys() and whose != own), None
        )
    return next((tool for key, tool in _OTHERS.items() if key in state), None)


def refuse_others(state: object) -> None:
    """Refuse a state that evidently comes from another loader, and name that loader.

    Raises:
        StateError: The state comes from another loader; the message says what to do instead.
    """
    if (other := writer_of(state)) is None:
        return
    held = ""
    if isinstance(state, Mapping):
        held = f", and holds {', '.join(map(repr, list(state)[:SHOWN_KEYS])) or 'nothing'}"
    raise StateError(
        f"this is a state of {other}{held}: its order of samples is not that of a mix; begin with the saved model, and "
        f"without a state{_INSTEAD.get(other, '')}"
    )


def is_of_torchdata(state: Mapping[str, Any]) -> bool:
    """Whether a state comes from torchdata's ``StatefulDataLoader``, judged by its keys."""
    return "version" not in state and (
        state.keys() >= _OF_WORKERS or state.keys() >= _OF_ONE_PROCESS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchdataPlace:
    """A place of ``StatefulDataLoader`` in an epoch of a map dataset."""

    batches: int
    """Batches that were handed out."""
    main: Mapping[str, Any]
    """State that contains the place of the sampler; with workers, the state of the last snapshot."""
    is_over: bool
    """Whether the epoch had ended."""


def place_of_torchdata(state: Mapping[str, Any]) -> TorchdataPlace:
    """Return the place in a state of ``StatefulDataLoader``.

    Raises:
        StateError: The dataset is iterable, or has a state of its own.
        KeyError, TypeError, ValueError, AttributeError: The state is damaged.
    """
    if "_snapshot" not in state:
        _require_no_own(state)
        main, first, since = state, whole_number(state["_num_yielded"], below=_MOST), 0
    else:
        # With workers, the state has the place of the last snapshot and the number of batches since then.
        snapshot = state["_snapshot"]
        for worker in snapshot["_worker_snapshots"].values():
            _require_no_own(worker)
        main = snapshot["_main_snapshot"]
        first = whole_number(snapshot["_snapshot_step"], below=_MOST)
        since = whole_number(state["_steps_since_snapshot"], below=_MOST)
    drawn = whole_number(main["_sampler_iter_yielded"], below=_MOST)
    # Only workers draw ahead.
    if first > drawn or (first < drawn and main is state):
        raise ValueError(f"{first} batches were handed out, and {drawn} drawn")
    return TorchdataPlace(
        batches=first + since, main=main, is_over=state.get("_iterator_finished") is True
    )


def _require_no_own(of_dataset: Mapping[str, Any]) -> None:
    if of_dataset["dataset_state"] is not None:
        raise StateError(
            "the state is torchdata's and holds one of the dataset's own, which is of the sample that its worker read "
            f"last; {_NEW_EPOCH}"
        )
    if of_dataset.get("fetcher_state") is not None:
        raise StateError(
            "the state is torchdata's, of an iterable dataset, whose place lies in iterators of its workers; "
            + _NEW_EPOCH
        )
