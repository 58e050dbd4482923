"""The differences of two mixes: keys, sources, amounts, and the first step with other shares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omniload.mix.config import MixConfig, Stage
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import by_epochs
from omniload.mix.schedule import boundaries, weights_at

__all__ = [
    "ROUNDING",
    "Difference",
    "MixDifference",
    "differences_of",
    "first_other",
    "other_leaves",
    "shares_differ",
    "shares_of",
    "shown",
]

ROUNDING = 1e-9
"""Largest difference of two shares that count as equal, where a user wrote them."""
_MOST_SHOWN = 160
_TELL_APART = 6
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key with different values in two mixes."""

    key: str
    """The key as in the file: ``sources.web.path``."""
    one: Any
    """Value in the first mix; ``None`` if the key is absent."""
    other: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MixDifference:
    """The differences of two mixes."""

    keys: tuple[Difference, ...]
    """Keys that differ, except for stages, whose effect is in the shares."""
    first_step: int | None
    """First step at which a source has another share; ``None`` if there is none."""
    shares: Mapping[str, tuple[float, float]]
    """Shares that differ at that step."""
    amounts: Mapping[str, tuple[str | None, str | None]]
    """Amounts that differ, by source; ``None`` if a mix gives weights or has no such source. Shares are not
    compared if a mix gives amounts."""
    left_out_step: int | None
    """First step at which edits leave out other shards."""
    left_out: Mapping[str, tuple[str | None, str | None]]
    """Numbers of the left-out shards at that step, for each source in which they differ."""


def differences_of(one: History, other: History) -> MixDifference:
    """Compare two mixes with their edits."""
    mixes = [_told_apart_by(history) for history in (one, other)]
    keys = sorted({*mixes[0], *mixes[1]})
    step, moved = _first_shares(one, other)
    left_out_step, left_out = _first_left_out(one, other)
    return MixDifference(
        keys=tuple(
            Difference(key=key, one=mixes[0].get(key), other=mixes[1].get(key))
            for key in keys
            if mixes[0].get(key) != mixes[1].get(key)
        ),
        first_step=step,
        shares=moved,
        amounts=_amounts(one, other),
        left_out_step=left_out_step,
        left_out=left_out,
    )


def _told_apart_by(history: History) -> dict[str, Any]:
    """Return the values of a mix by dotted key, including stages by epochs, whose steps are not known in advance."""
    told = _leaves_of(history.latest.model_dump(mode="json"))
    for i, (_, step, stage) in enumerate(by_epochs(history)):
        key, shares = f"mix.stages.from_epochs.{i}", shares_of(stage, history.latest.names)
        told[f"{key}.shares"] = {name: float(f"{share:.12g}") for name, share in shares.items()}
        told[f"{key}.ramp"] = f"{stage.ramp} over {stage.ramp_steps} steps"
        told[f"{key}.began"] = "not yet" if step is None else f"at step {step}"
    return told


def _first_shares(
    one: History, other: History
) -> tuple[int | None, dict[str, tuple[float, float]]]:
    """Return the first step at which a source has another share, and those shares."""
    if one.base.mix.amounts is not None or other.base.mix.amounts is not None:
        return None, {}
    edges = {
        edge
        for history in (one, other)
        for edge in (*boundaries(history.latest), *(edit.step for edit in history.edits))
    }
    # Between two edges, shares are linear or cosine curves; two curves that agree in this many steps are the same.
    for step in sorted({edge + k for edge in edges for k in range(_TELL_APART)}):
        shares = one.shares_at(step), other.shares_at(step)
        names = sorted({*shares[0], *shares[1]})
        pairs = {n: (shares[0].get(n, 0.0), shares[1].get(n, 0.0)) for n in names}
        moved = {n: (a, b) for n, (a, b) in pairs.items() if abs(a - b) > _ROUNDING}
        if moved:
            return step, moved
    return None, {}


def _amounts(one: History, other: History) -> dict[str, tuple[str | None, str | None]]:
    said = [
        {name: str(amount) for name, amount in (history.latest.mix.amounts or {}).items()}
        for history in (one, other)
    ]
    return _others(said[0], said[1])


def _first_left_out(
    one: History, other: History
) -> tuple[int | None, dict[str, tuple[str | None, str | None]]]:
    """Return the first step at which other shards are left out, and their sources."""
    for step in sorted({edit.step for history in (one, other) for edit in history.edits}):
        said = [
            {name: ", ".join(map(str, numbers)) for name, numbers in left_out.items()}
            for left_out in (one.left_out_at(step), other.left_out_at(step))
        ]
        if differ := _others(said[0], said[1]):
            return step, differ
    return None, {}


def _others(
    one: Mapping[str, str], other: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    names = sorted({*one, *other})
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def first_other(
    one: Iterator[tuple[int, str]], other: Iterator[tuple[int, str]]
) -> tuple[int, int | None]:
    """Compare the steps of two runs, each given with the digest of its samples, in order.

    Returns:
        The number of common steps, and the first of them with different samples.
    """
    common, found = 0, None
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        if a[0] < b[0]:
            a = next(one, None)
        elif b[0] < a[0]:
            b = next(other, None)
        else:
            if found is None and a[1] != b[1]:
                found = a[0]
            common += 1
            a, b = next(one, None), next(other, None)
    return common, found


def _leaves_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a mix from ``model_dump`` by dotted key; of stages, only the epochs that they wait for."""
    stages = content.get("mix", {}).get("stages", ())  # none where there are amounts
    waited = [stage["from_epochs"] for stage in stages if stage.get("from_epochs")]
    dates = ((f"mix.stages.from_epochs.{i}", epochs) for i, epochs in enumerate(waited))
    return dict((*_leaves(content, ""), *dates))


def other_leaves(one: MixConfig, other: MixConfig) -> Iterator[Difference]:
    """Yield the keys with different values in two mix files, in order."""
    now, then = (_leaves_of(mix.model_dump(mode="json")) for mix in (one, other))
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            yield Difference(key=key, one=now.get(key), other=then.get(key))


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "mix.stages":
            yield f"{prefix}{key}", value


def shares_of(stage: Stage, names: tuple[str, ...]) -> dict[str, float]:
    """Return the shares of a stage after its ramp, without sources whose share is 0."""
    ended = stage.model_copy(update={"from_step": 0, "ramp_steps": 0})
    every = tuple(dict.fromkeys((*names, *stage.weights)))
    found = zip(every, weights_at([ended], every, 0), strict=True)
    return {name: share for name, share in found if share > 0}


def shares_differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Return whether a source has another share, beyond rounding."""
    return any(
        abs(one.get(n, 0.0) - other.get(n, 0.0)) > ROUNDING for n in one.keys() | other.keys()
    )


def shown(value: object) -> str:
    """Return a value as written, with its middle left out if it is long, because paths differ at their ends."""
    if value is None:
        return "not given"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:60]} ... {text[-60:]}"
