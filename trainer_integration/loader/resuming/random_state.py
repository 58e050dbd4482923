"""States of random generators as plain JSON, from which an order of samples was drawn."""

import base64
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject

__all__ = ["Ambient", "ambient_kept", "capture", "generator_states", "restore"]

Ambient = Literal["none", "torch", "all"]
"""Global generators that an order may draw from: none, torch's, or also Python's and numpy's."""


def generator_states(generators: Sequence[torch.Generator]) -> list[Json]:
    """Return the state of each generator, ``[G]``."""
    return [_text(generator.get_state()) for generator in generators]


def capture(generators: Sequence[torch.Generator], ambient: Ambient) -> JsonObject:
    """Return the present states of ``generators`` and of the global generators."""
    taken: JsonObject = {"generators": generator_states(generators)}
    if ambient != "none":
        # Only the CPU's generator, because no sampler of torch draws on a GPU.
        taken["torch"] = _text(torch.get_rng_state())
    if ambient == "all":
        # Over 600 numbers each, so they are kept only for orders that may draw from them.
        version, words, gauss = random.getstate()
        taken["python"] = [version, list(words), gauss]
        kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
        taken["numpy"] = [kind, keys.tolist(), *rest]
    return taken


def restore(taken: JsonObject, generators: Sequence[torch.Generator]) -> None:
    """Set generators to the result of ``capture``; global generators only if it contains them.

    Raises:
        StateError: It contains another number of generators, or a state that a generator refuses.
    """
    states = cast("list[str]", taken.get("generators"))
    if not isinstance(states, list) or len(states) != len(generators):
        found = len(states) if isinstance(states, list) else states
        raise StateError(
            f"the state holds {found!r} generators, the loader and its samplers have {len(generators)}; "
            "make the loader with the generators of the run that saved"
        )
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(_tensor(state))
        if "torch" in taken:
            torch.set_rng_state(_tensor(taken["torch"]))
        if "python" in taken:
            version, words, gauss = cast("list[Any]", taken["python"])
            random.setstate((version, tuple(words), gauss))
        if "numpy" in taken:
            kind, keys, *rest = cast("list[Any]", taken["numpy"])
            np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise StateError(
            f"a generator refuses the state saved for it ({error}); resume from an earlier checkpoint"
        ) from error


@contextmanager
def ambient_kept() -> Iterator[None]:
    """Leave torch's, Python's and numpy's global generators as they were."""
    ours, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(python)
        np.random.set_state(numpy)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: Json) -> torch.Tensor:
    if not isinstance(text, str):
        raise TypeError(f"{text!r:.40} is no text")
    # A writable copy, because torch warns of a tensor over bytes.
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
