"""States of other loaders: whose one is, and what to do with it instead of resuming from it."""

from collections.abc import Mapping

from omniload.base.errors import StateError

__all__ = ["OF_DATASET", "OF_MIX", "SHOWN_KEYS", "refuse_others", "writer_of"]

_OTHERS = {
    "sample_in_epoch": "Mosaic Streaming",
    "batches_processed": "OLMo-core",
    "_snapshot": "torchdata's StatefulDataLoader",
    "_num_yielded": "torchdata's StatefulDataLoader",
    "examples_iterable": "Hugging Face datasets",
}
"""Whose states hold a key."""
OF_MIX, OF_DATASET = "a mix", "a DataLoader over a dataset"
_OURS = {
    frozenset({"fingerprint", "carried"}): OF_MIX,
    frozenset({"shape", "stage"}): OF_DATASET,
}
"""Whose states, of the two that are written here, hold all of some keys."""
_INSTEAD = {
    "Mosaic Streaming": ", or leave out what it had drawn: omniload mix import --from llm-foundry --state"
}
_ENERGON = "megatron.energon"
"""Package of the classes that Energon's states are of."""
SHOWN_KEYS = 6
"""Keys that a message lists of what is no state."""


def writer_of(state: object, *, own: str = OF_MIX) -> str | None:
    """Return which loader other than ``own`` a state shows to be of; ``None`` where it shows none."""
    # By the name of its module: whoever holds such a state has the package, and we have not.
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
    """Refuse a state that another loader shows to have written, by the name of that.

    Raises:
        StateError: With what to do instead.
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
