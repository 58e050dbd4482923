"""What two mixes have different: keys, sources, and the first step at which they draw other shares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omniload.mix.edits.history import History
from omniload.mix.schedule import boundaries

__all__ = ["Difference", "MixDifference", "differences_of", "first_other"]

_TELL_APART = 6
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key that two mixes give different values."""

    key: str
    """As in the file: ``sources.web.path``."""
    one: Any
    """``None`` where it is not there."""
    other: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MixDifference:
    """What two mixes have different."""

    keys: tuple[Difference, ...]
    """All but stages: shares say what those come to."""
    first_step: int | None
    """First step at which a source has another share; ``None`` where there is none."""
    shares: Mapping[str, tuple[float, float]]
    """Shares that differ at that step."""


def differences_of(one: History, other: History) -> MixDifference:
    """Compare two mixes with their edits."""
    mixes = [_flat(history.latest.model_dump(mode="json")) for history in (one, other)]
    keys = sorted({*mixes[0], *mixes[1]})
    edges = {
        edge
        for history in (one, other)
        for edge in (*boundaries(history.latest), *(edit.step for edit in history.edits))
    }
    # Between two edges shares are lines or waves: two of them that agree in as many steps are one.
    for step in sorted({edge + k for edge in edges for k in range(_TELL_APART)}):
        shares = one.shares_at(step), other.shares_at(step)
        names = sorted({*shares[0], *shares[1]})
        pairs = {n: (shares[0].get(n, 0.0), shares[1].get(n, 0.0)) for n in names}
        moved = {n: (a, b) for n, (a, b) in pairs.items() if abs(a - b) > _ROUNDING}
        if moved:
            break
    else:
        step, moved = -1, {}
    return MixDifference(
        keys=tuple(
            Difference(key=key, one=mixes[0].get(key), other=mixes[1].get(key))
            for key in keys
            if mixes[0].get(key) != mixes[1].get(key)
        ),
        first_step=step if moved else None,
        shares=moved,
    )


def first_other(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the first step that both runs have and that held other samples in them; by digests of their steps."""
    return next((s for s in sorted(one.keys() & other.keys()) if one[s] != other[s]), None)


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_leaves(content, ""))


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "mix.stages":
            yield f"{prefix}{key}", value
