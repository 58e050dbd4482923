"""States of other loaders: whose one is, and what to do with it instead of resuming from it."""

from collections.abc import Mapping

from omniload.base.errors import StateError

__all__ = ["SHOWN_KEYS", "refuse_others", "writer_of"]

_OTHERS = {
    "sample_in_epoch": "Mosaic Streaming",
    "batches_processed": "OLMo-core",
    "_snapshot": "torchdata's StatefulDataLoader",
    "_num_yielded": "torchdata's StatefulDataLoader",
    "examples_iterable": "Hugging Face datasets",
}
"""Whose states hold a key."""
_INSTEAD = {
    "Mosaic Streaming": ", or leave out what it had drawn: omniload mix import --from llm-foundry --state"
}
_ENERGON = "megatron.energon"
"""Package of the classes that Energon's states are of."""
SHOWN_KEYS = 6
"""Keys that a message lists of what is no state."""


def writer_of(state: object) -> str | None:
    """Return which other loader a state shows to be of; ``None`` where it shows none."""
    # By the name of its module: whoever holds such a state has the package, and we have not.
    if type(state).__module__.startswith(_ENERGON):
        return "Megatron-Energon"
    if not isinstance(state, Mapping) or "version" in state:
        return None
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
