"""Progress of a run besides its tensors and the data's position: kept in every checkpoint as JSON."""

from collections.abc import Mapping
from typing import Self

from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject
from trainer_integration.config import SpikeGuardConfig
from trainer_integration.training.spike_guard import SpikeGuard

__all__ = ["TrainingProgress"]


class _Kept(StrictModel):
    """The form on storage."""

    version: int = Field(default=1, ge=1, le=1)
    # All fields have defaults, because checkpoints of older releases contain an empty object.
    tokens: int = Field(default=0, ge=0)
    # As many as the largest window has.
    norms: tuple[float, ...] = Field(default=(), max_length=10_000)
    spikes_in_a_row: int = Field(default=0, ge=0)


class TrainingProgress:
    """Tokens so far, which a schedule may use, and the norms with which the spike guard judges."""

    def __init__(self, guard: SpikeGuardConfig, tokens: int = 0) -> None:
        self.tokens = tokens
        """Tokens trained on, over all ranks, without padding."""
        self.guard = SpikeGuard(guard)

    @classmethod
    def of(cls, guard: SpikeGuardConfig, kept: Mapping[str, Json]) -> Self:
        """Continue from the result of ``to_json``; from the beginning if a checkpoint of an older release has none.

        Raises:
            StateError: The value is something else.
        """
        try:
            state = _Kept.model_validate(kept)
        except ValidationError as error:
            raise StateError(
                f"the progress of training in the checkpoint is not of this release: {error.errors()[0]['msg']}; "
                "resume with the release that wrote it"
            ) from error
        progress = cls(guard, state.tokens)
        progress.guard = SpikeGuard(guard, state.norms, state.spikes_in_a_row)
        return progress

    def to_json(self) -> JsonObject:
        """Return plain JSON; equal on all ranks."""
        guard = self.guard
        kept = _Kept(tokens=self.tokens, norms=guard.norms, spikes_in_a_row=guard.in_a_row)
        return kept.model_dump(mode="json")
