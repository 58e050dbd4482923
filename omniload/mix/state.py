"""The state of a mix before a step: a handful of integers.

It says nothing of ranks, loaders or timing, so it resumes under any of them.

Shape suffixes:
    S  sources
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from omniload.base.errors import StateError
from omniload.base.state import Json, JsonObject, require_version
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.pieces import PieceTable

__all__ = ["STATE_VERSION", "Cursor", "MixState"]

STATE_VERSION = 1

Cursor = tuple[int, int, int]
"""The next token of a source: raw position, number of the sample within that record, token within that sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixState:
    """What the planner must know to plan step ``step`` and all that follow."""

    step: int
    """Next step."""
    cursors_S: tuple[Cursor, ...]
    """Next sample of each source."""
    credits_S: tuple[int, ...]
    """What each source is owed, from ``omniload.mix.deficit``."""
    drawn_S: tuple[int, ...]
    """What was drawn of each source so far, in the unit of the weights."""
    carried: PieceTable
    """Pieces drawn and not yet in a row, oldest first."""
    mix_revision: int = 0
    """Revision of the mix in force."""

    @classmethod
    def start(cls, num_sources: int) -> Self:
        """Return the state before step 0."""
        zeros = (0,) * num_sources
        return cls(
            step=0,
            cursors_S=((0, 0, 0),) * num_sources,
            credits_S=zeros,
            drawn_S=zeros,
            carried=PieceTable.empty(),
        )

    def after(
        self,
        *,
        cursors_S: Sequence[Cursor],
        served_S: Sequence[int],
        weights_S: Sequence[int],
        carried: PieceTable,
    ) -> Self:
        """Return the state after a step that drew ``served_S`` under ``weights_S``."""
        total = sum(served_S)
        return replace(
            self,
            step=self.step + 1,
            cursors_S=tuple(cursors_S),
            credits_S=tuple(
                credit + weight * total - WEIGHT_ONE * served
                for credit, weight, served in zip(self.credits_S, weights_S, served_S, strict=True)
            ),
            drawn_S=tuple(a + b for a, b in zip(self.drawn_S, served_S, strict=True)),
            carried=carried,
        )

    def floor_of(self, source: int) -> int:
        """Return the first raw position of ``source`` that is still needed."""
        carried = self.carried.positions_P[self.carried.sources_P == source]
        return min(
            self.cursors_S[source][0],
            int(carried.min()) if len(carried) else self.cursors_S[source][0],
        )

    def to_json(self, names: Sequence[str], fingerprint: Mapping[str, str]) -> JsonObject:
        """Return the state as plain JSON, keyed by source name."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "mix_revision": self.mix_revision,
            "fingerprint": dict(fingerprint),
            "sources": {
                name: {
                    "cursor": list(self.cursors_S[s]),
                    "credit": self.credits_S[s],
                    "drawn": self.drawn_S[s],
                }
                for s, name in enumerate(names)
            },
            "carried": self.carried.to_json(),
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Json], names: Sequence[str], fingerprint: Mapping[str, str]
    ) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            StateError: Another version, a damaged state, or a mix or data other than the state's; the
                message names every part that differs.
        """
        require_version(state, STATE_VERSION, of="mix")
        try:
            saved = state["fingerprint"]
            assert isinstance(saved, dict)
            changed = sorted(
                k for k in saved.keys() | fingerprint.keys() if saved.get(k) != fingerprint.get(k)
            )
            if changed:
                shown = "; ".join(
                    f"{k}: {saved.get(k, 'absent')} saved, {fingerprint.get(k, 'absent')} now"
                    for k in changed
                )
                raise StateError(
                    f"the mix is not the one the checkpoint was written with ({shown}); "
                    "resume with the old file and data, or start a new run"
                )
            sources = [state["sources"][name] for name in names]  # type: ignore[index, call-overload]
            return cls(
                step=int(state["step"]),  # type: ignore[arg-type]
                cursors_S=tuple(_cursor(s["cursor"]) for s in sources),  # type: ignore[index, call-overload]
                credits_S=tuple(int(s["credit"]) for s in sources),  # type: ignore[index, call-overload, arg-type]
                drawn_S=tuple(int(s["drawn"]) for s in sources),  # type: ignore[index, call-overload, arg-type]
                carried=PieceTable.from_json(state["carried"]),
                mix_revision=int(state["mix_revision"]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise StateError(
                f"the mix state is damaged ({error!r}); resume from an earlier checkpoint"
            ) from error


def _cursor(values: Json) -> Cursor:
    match values:
        case [int(position), int(sub), int(token)]:
            return position, sub, token
        case _:
            raise TypeError(f"a cursor is three integers, not {values!r}")
