"""What two mixes have different, and the changes that lead from one that holds to one that a file says.

Differences are of keys, sources, amounts, and of the first step at which other shares are drawn. Changes are those
that can be typed, one after the other: sources that are added, sources that are retired, weights of the next step and
of stages to come, or amounts. What no change can do is refused by its key.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, SourceConfig, Stage
from omniload.mix.edits.edit import AddSource, Change, RetireSource, SetAmounts, SetWeights
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import by_epochs, dated
from omniload.mix.schedule import boundaries, stages_from, weights_at
from omniload.mix.schema.stages import said_epochs

__all__ = [
    "Asked",
    "Difference",
    "MixDifference",
    "Refused",
    "Wanted",
    "differences_of",
    "first_other",
    "later_keys",
    "leaves_of",
    "wanted_of",
]

_TELL_APART = 6
_ROUNDING = 1e-12
Asked: TypeAlias = tuple[Change, int | None]
"""A change, and the step that it is to hold at; ``None`` for the next."""
_LATER = ("runtime.", "balance.", "loader.", "batch.micro_tokens")
"""Keys that may differ in every start of a run."""
_LATER_OF_SOURCE = {"tags", "on_error", "max_repetition", "max_fraction"}
_SAME = 1e-9
"""Shares that are closer are one."""


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
    amounts: Mapping[str, tuple[str | None, str | None]]
    """Amounts that differ, by source; ``None`` where a mix gives weights, or has no such source. Of a mix that gives
    amounts no shares are compared."""
    left_out_step: int | None
    """First step at which edits leave out other shards."""
    left_out: Mapping[str, tuple[str | None, str | None]]
    """Sources with other shards left out at that step, by their numbers."""


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
    """Return the values of a mix by dotted key, with all that stages by epochs come to: no step tells it before."""
    told = leaves_of(history.latest.model_dump(mode="json"))
    for i, (_, step, stage) in enumerate(by_epochs(history)):
        key, shares = f"mix.stages.from_epochs.{i}", _shares(stage, history.latest.names)
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
    # Between two edges shares are lines or waves: two of them that agree in as many steps are one.
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
    """Return the first step at which other shards are left out, and of which sources."""
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


def first_other(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the first step that both runs have and that held other samples in them; by digests of their steps."""
    return next((s for s in sorted(one.keys() & other.keys()) if one[s] != other[s]), None)


def leaves_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a mix, as ``model_dump`` gives it, by dotted key; of stages what they wait for alone."""
    stages = content.get("mix", {}).get("stages", ())  # none where there are amounts
    waited = [stage["from_epochs"] for stage in stages if stage.get("from_epochs")]
    dates = ((f"mix.stages.from_epochs.{i}", epochs) for i, epochs in enumerate(waited))
    return dict((*_leaves(content, ""), *dates))


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" != "mix.stages":
            yield f"{prefix}{key}", value


@dataclass(frozen=True, slots=True)
class Refused:
    """What no change of a run can do."""

    at: tuple[str | int, ...]
    """Keys that lead to it in the file."""
    said: str
    """What was found, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a file asks of a run."""

    changes: tuple[Asked, ...] = ()
    """In the order in which they are asked for."""
    refused: tuple[Refused, ...] = ()
    """Where there is any, nothing is asked for."""


def wanted_of(
    file: MixConfig,
    declared: MixConfig,
    history: History,
    step: int,
    placing: tuple[Callable[[SourceConfig], SourceConfig], Callable[[SourceConfig], SourceConfig]],
) -> Wanted:
    """Return what a file asks of a run.

    Args:
        file: What it says.
        declared: What the file of the run said when the run was started.
        history: What holds.
        step: First step that is not planned.
        placing: Give sources of the file, and of the run, the paths that they have from anywhere.

    Raises:
        ConfigError: A change is refused by what holds.
    """
    sources = {name: placing[0](source) for name, source in file.sources.items()}
    held = {name: placing[1](source) for name, source in history.latest.sources.items()}
    refused = [*_fixed(file, declared), *_other_sources(sources, held)]
    if (file.mix.amounts is None) != (history.latest.mix.amounts is None):
        key = "stages" if file.mix.amounts is None else "amounts"
        other = "amounts" if key == "stages" else "weights"
        said = f"the run draws {other}, from its start to its end; give {other}, or start a new run"
        refused.append(Refused(("mix", key), said))
    elif file.mix.amounts is None:
        refused += _other_stages(file, history, step)
    if refused:
        return Wanted(refused=tuple(refused))
    if file.mix.amounts is not None:
        return Wanted(changes=tuple(_wanted_amounts(file, history, step, sources)))
    return Wanted(changes=tuple(_weights(file, history, step, sources)))


def later_keys(file: MixConfig, before: MixConfig) -> list[str]:
    """Return the keys that a file gives other values than before, and that hold from the next start of a run on."""
    now, then = (leaves_of(mix.model_dump(mode="json")) for mix in (file, before))
    changed = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
    of_sources = (f"sources.{name}." for name in file.sources.keys() & before.sources.keys())
    prefixes = (*_LATER, *(p + key for p in of_sources for key in _LATER_OF_SOURCE))
    return [key for key in changed if key.startswith(prefixes)]


def _fixed(file: MixConfig, declared: MixConfig) -> Iterator[Refused]:
    """Yield the keys that a run keeps from its start to its end, where the file has others."""
    now, then = (leaves_of(mix.model_dump(mode="json")) for mix in (file, declared))
    alike = (file.mix.amounts is None) == (declared.mix.amounts is None)
    others = ("sources.", "mix.amounts" if alike else "mix.", *_LATER)
    for key in sorted(now.keys() | then.keys()):
        # A version says how a file is written; what it comes to is compared by the other keys.
        if key == "version" or key.startswith(others):
            continue
        if now.get(key) != then.get(key):
            yield Refused(
                tuple(key.split(".")),
                f"is {_shown(now.get(key))} in the file, and {_shown(then.get(key))} in the run, which keeps it from "
                "its start to its end; put it back, or start a new run",
            )


def _other_sources(
    sources: Mapping[str, SourceConfig], held: Mapping[str, SourceConfig]
) -> Iterator[Refused]:
    """Yield the sources that are other ones under the same name."""
    for name in sorted(sources.keys() & held.keys()):
        now, then = (
            each[name].model_dump(mode="json", exclude=_LATER_OF_SOURCE) for each in (sources, held)
        )
        for key in sorted(now.keys() | then.keys()):
            if now.get(key) != then.get(key):
                yield Refused(
                    ("sources", name, key),
                    f"is {_shown(now.get(key))} in the file, and {_shown(then.get(key))} in the run: that is another "
                    f"source; declare it under another name, and leave {name} out",
                )


def _shown(value: object) -> str:
    return "not given" if value is None else f"{value!r:.60}"


def _other_stages(file: MixConfig, history: History, step: int) -> Iterator[Refused]:
    """Yield the first stage to come that begins at another step, or whose ramp is another one."""
    wanted = stages_from(dated(history, file.mix.stages, step), step)
    held = stages_from(dated(history, history.latest.mix.stages, step), step)
    # Those that are over are cut off in front: what is left has the last numbers of the file.
    first = len(file.mix.stages) - len(wanted)
    said = [[_times(stage) for stage in stages] for stages in (wanted, held)]
    for i in range(max(map(len, said))):
        now, then = (f"{each[i]}" if i < len(each) else "none" for each in said)
        at = ("mix", "stages", max(0, min(first + i, len(file.mix.stages) - 1)))
        if now != then:
            yield Refused(
                at,
                f"from step {step} on the file has a stage {now}, and the run {then}: when stages begin, and how they "
                "are ramped, does not change while it goes on; put it back, or give weights at their step with "
                "omniload mix set --at STEP",
            )
            return
        shares = _shares(wanted[i], file.names), _shares(held[i], file.names)
        if wanted[i].ramp_steps and _differ(*shares):
            yield Refused(
                at,
                f"the ramp {now} leads to other weights in the run, and goes on as it is; put them back, or end it "
                "with omniload mix set",
            )
            return


def _times(stage: Stage) -> str:
    epochs, step = stage.from_epochs or {}, stage.from_step
    begins = f"once {said_epochs(epochs)}" if stage.waits else f"from step {step}"
    return begins + f", {stage.ramp} over {stage.ramp_steps} steps" * bool(stage.ramp_steps)


def _shares(stage: Stage, names: tuple[str, ...]) -> dict[str, float]:
    """Return the shares of a stage whose ramp has ended; of sources that have any."""
    ended = stage.model_copy(update={"from_step": 0, "ramp_steps": 0})
    every = tuple(dict.fromkeys((*names, *stage.weights)))
    found = zip(every, weights_at([ended], every, 0), strict=True)
    return {name: share for name, share in found if share > 0}


def _differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return any(abs(one.get(n, 0.0) - other.get(n, 0.0)) > _SAME for n in one.keys() | other.keys())


def _weights(
    file: MixConfig, history: History, step: int, sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    """Yield changes until every stage has the shares of the file; each is tried on what holds first."""
    wanted = stages_from(dated(history, file.mix.stages, step), step)

    def held() -> list[Stage]:
        return stages_from(dated(history, history.latest.mix.stages, step), step)

    names, shares = history.latest.names, [_shares(stage, file.names) for stage in wanted]
    # One whose weights all lie in the past is drawn no more: there is nothing that it could be added with.
    new = [n for n in file.names if n not in names and any(n in found for found in shares)]
    left = 1 - sum(shares[0].get(name, 0.0) for name in new)
    for name in new:
        i = next(i for i, found in enumerate(shares) if name in found)
        weights = held()[i].weights
        kept = sum(w for n, w in weights.items() if n in file.names and n not in new)
        # Those that stay keep what they have, and the new ones get their shares of the whole.
        whole = kept / left if i == 0 and kept and left > _SAME else sum(weights.values())
        # In twelve digits, as somebody might type it: the rest is rounding.
        weight = float(f"{shares[i][name] * whole:.12g}")
        change: Change = AddSource(name=name, source=sources[name], weight=weight)
        # Tried on what holds with those before it: one that is refused is told before any is asked for.
        history = history.tried(change, _step_of(wanted[i]) if i else step)
        yield change, wanted[i].from_step if i else None
    leaving = [name for name in names if name not in file.names]
    if any(not any(map(stage.weights.get, file.names)) for stage in held()):
        leaving = []  # they are all there is: weights come first, and say 0 of them
    for name in leaving:
        if any(stage.weights.get(name) for stage in held()):
            change = RetireSource(name=name)
            history = history.tried(change, step)
            yield change, None
    for i, stage in enumerate(wanted):
        if _differ(shares[i], _shares(held()[i], file.names)):
            gone = dict.fromkeys(held()[i].weights, 0.0)
            known = {n: w for n, w in stage.weights.items() if n in history.latest.names}
            # Every source of the stage by name: one that is not named keeps its weight.
            change = SetWeights(weights=gone | known)
            history = history.tried(change, _step_of(stage) if i else step)
            yield change, stage.from_step if i else None


def _step_of(stage: Stage) -> int:
    if stage.waits:
        raise ConfigError(
            f"mix.stages: the stage that begins {_times(stage)} has other weights in the run, and nobody knows its "
            "step yet; put them back, and give others once it has begun"
        )
    return stage.from_step


def _wanted_amounts(
    file: MixConfig, history: History, step: int, sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    """Yield changes to the amounts of the file; what is drawn already, only the planner knows."""
    wanted, held = file.mix.amounts or {}, history.latest.mix.amounts or {}
    others = {
        name: amount
        for name, amount in wanted.items()
        if name in history.latest.sources and held.get(name) != amount
    }
    changes: list[Change] = [SetAmounts(amounts=others)] if others else []
    changes += [
        AddSource(name=name, source=sources[name], amount=amount)
        for name, amount in wanted.items()
        if name not in history.latest.sources
    ]
    # Behind those that come: the last source of a run cannot be retired.
    changes += [RetireSource(name=name) for name in held if name not in wanted]
    for change in changes:
        history = history.tried(change, step)
        yield change, None
