"""Converts states of torchdata's ``StatefulDataLoader`` to states of ours: a place in an epoch of a map dataset.

The remaining batches of the epoch are those that torchdata would hand out, with any number of workers. If a state does
not determine these exactly, it is refused with the reason.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import RandomSampler

from omniload.base.errors import StateError
from omniload.base.state import JsonObject, whole_number
from omniload.base.units import counted
from omniload.mix.other_states import place_of_torchdata
from trainer_integration.loader.resuming.loader_state import LoaderState, sealed_order
from trainer_integration.loader.resuming.order import Place
from trainer_integration.loader.resuming.random_state import generator_states
from trainer_integration.loader.samplers import Anatomy

__all__ = ["from_torchdata"]

_MOST = 1 << 62
_INSTEAD = "begin a new epoch with the saved model"


def from_torchdata(
    state: Mapping[str, Any], anatomy: Anatomy, shape: JsonObject, *, iterable: bool
) -> dict[str, Any]:
    """Return our state before the same batch.

    Args:
        state: State from torchdata's ``state_dict``.
        anatomy: Parts of the index sampler of the loader that is to continue.
        shape: ``shape_of`` that loader.
        iterable: Whether its dataset is iterable.

    Raises:
        StateError: The place is of an iterable dataset or of a sampler whose order the state does not tell, the dataset
            has a state of its own, or the state is damaged.
    """
    if iterable:
        raise StateError(
            "the state is torchdata's, of an iterable dataset, whose place lies in iterators of its workers; "
            + _INSTEAD
        )
    try:
        found = place_of_torchdata(state)
        drawn = _drawn_in(found.main, anatomy, shape)
    except KeyError as error:
        raise StateError(f"torchdata's state has no {error}; {_INSTEAD}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StateError(f"torchdata's state is damaged: {error}; {_INSTEAD}") from error
    over = found.is_over
    place = Place(
        batches=0 if over else found.batches,
        epochs=anatomy.epochs(),
        drawn=None if over else drawn,
        now={"generators": generator_states(anatomy.generators)} if over else None,
    )
    read = LoaderState(
        kind="map", stage="finished" if over else "running", shape=shape, place=place
    )
    return read.as_dict(sealed_order(place))


def _drawn_in(main: Mapping[str, Any], anatomy: Anatomy, shape: JsonObject) -> JsonObject:
    """Return the states of generators before the epoch's first index.

    Raises:
        StateError: The order cannot be derived from the state, or is of another batch size.
    """
    kept = main["_sampler_iter_state"] or {}
    if main["_index_sampler_state"] is not None or "sampler_state" in kept or anatomy.keeper:
        raise StateError(
            f"the state is torchdata's and holds one of a sampler's own ({anatomy.names[-1]}); {_INSTEAD}"
        )
    if not anatomy.known or anatomy.ambient == "all":
        raise StateError(
            f"the state is torchdata's, which does not say the order of the sampler {anatomy.names[-1]}; {_INSTEAD}"
        )
    _require_batch_size(main, kept, anatomy, shape)
    # A sequential order draws nothing.
    if not (anatomy.generators or anatomy.ambient == "torch"):
        return {"generators": []}
    inner = anatomy.parts[-1]
    # torchdata replaces only this sampler by its own, which keeps the generator.
    if type(inner) is not RandomSampler:
        if anatomy.ambient == "none" and "sampler_iter_state" not in kept:
            return {"generators": generator_states(anatomy.generators)}
        raise StateError(
            f"the state is torchdata's, which does not say what {anatomy.names[-1]} had drawn; {_INSTEAD}"
        )
    if inner.replacement:
        raise StateError(
            f"the state is torchdata's, which draws other indices with replacement=True than torch; {_INSTEAD}"
        )
    if inner.generator is None or len(anatomy.generators) != 1:
        raise StateError(
            "the state is torchdata's, which shuffles by a generator that it keeps; make the DataLoader with "
            "generator=torch.Generator(), which the state sets"
        )
    generator = torch.Generator()
    generator.set_state(kept["sampler_iter_state"]["generator"])
    return {"generators": generator_states([generator])}


def _require_batch_size(
    main: Mapping[str, Any], kept: Mapping[str, Any], anatomy: Anatomy, shape: JsonObject
) -> None:
    size = shape["batch_size"]
    drawn = whole_number(main["_sampler_iter_yielded"], below=_MOST)
    if "samples_yielded" not in kept or not isinstance(size, int):
        return
    seen = whole_number(kept["samples_yielded"], below=_MOST)
    # Only the last batch of an epoch may be short; any other short batch is a full one of another size.
    if seen != min(drawn * size, len(anatomy.parts[-1])) and seen:
        raise StateError(
            f"the state is torchdata's, after {counted(seen, 'sample')} in {counted(drawn, 'batch', 'batches')}, and "
            f"batch_size is {size}; use that of the run that saved"
        )
