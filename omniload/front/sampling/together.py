"""What all ranks do at once: each gives its part, or why it has none, and all go on or all fail."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from omniload.base.errors import IntegrityError, StateError
from omniload.front.rendezvous import Failure
from omniload.front.sampling.exchange import Exchange

__all__ = ["Kind", "Together"]

Kind = Literal["round", "replayed round", "journal", "groups"]
"""What is exchanged: rewards of a step, its prompts alone, what was decided before, groups that go to other ranks."""


@dataclass(frozen=True, slots=True)
class Together:
    """Exchanges objects of JSON among ranks."""

    exchange: Exchange

    def gather(
        self, kind: Kind, batch: int, make: Callable[[], Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Make this rank's part, and return all ranks'.

        No rank waits for one that fails: that one's error is told in place of its part.

        Args:
            kind: What is exchanged.
            batch: Batch that it belongs to.
            make: Makes the part.

        Raises:
            OmniloadError: Another rank has failed; its number and message.
            StateError: Ranks are not at the same batch, or exchange other things.
            Exception: As ``make`` raises it.
        """
        failed: Exception | None = None
        try:
            part = orjson.dumps(
                {"kind": kind, "batch": batch, "part": make()}, option=orjson.OPT_SERIALIZE_NUMPY
            )
        except Exception as error:  # noqa: BLE001 -- raised below, once the others know
            failed = error
            part = Failure.of(error).model_dump_json().encode()
        parts = self.exchange.all_gather(part)
        if failed is not None:
            raise failed
        return [self._checked(rank, part, kind, batch) for rank, part in enumerate(parts)]

    def _checked(self, rank: int, part: bytes, kind: Kind, batch: int) -> Mapping[str, Any]:
        try:
            found = orjson.loads(part)
            if "failed" in found:
                raise Failure.model_validate(found).error(rank)
            told: Mapping[str, Any] = found["part"]
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"rank {rank} sent {part[:60]!r}, which is no part of an exchange ({error!r:.80}); install one release "
                "on all ranks"
            ) from error
        if (found["kind"], found["batch"]) != (kind, batch):
            raise StateError(
                f"rank {rank} gives the {found['kind']} of batch {found['batch']}, and rank {self.exchange.rank} the "
                f"{kind} of batch {batch}; ask for every batch on all ranks, all with a rollout or all without, and "
                "load one state on all"
            )
        return told
