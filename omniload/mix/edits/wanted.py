"""What a file asks of a run: the changes that lead from the mix that holds to the one that it says.

Changes are those that can be typed, one after the other: sources that are added, sources that are retired, weights of
the next step and of stages to come, or amounts. What no change can do is refused by its key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, SourceConfig, Stage
from omniload.mix.edits.comparison import leaves_of, shares_of
from omniload.mix.edits.edit import AddSource, Change, RetireSource, SetAmounts, SetWeights
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import dated
from omniload.mix.schedule import stage_at, stages_from
from omniload.mix.schema.stages import said_epochs
from omniload.mix.schema.weights import LARGEST_NUMBER

__all__ = ["Asked", "Refused", "Wanted", "later_keys", "wanted_of"]

Asked: TypeAlias = tuple[Change, int | None]
"""A change, and the step that it is to hold at; ``None`` for the next."""
_LATER = ("runtime.", "balance.", "loader.", "batch.micro_tokens")
"""Keys that may differ in every start of a run."""
_LATER_OF_SOURCE = {"tags", "on_error", "max_repetition", "max_fraction"}
_MOST_SHOWN = 160
_SAME = 1e-9
"""Shares that are closer are one."""


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
    over: tuple[Refused, ...] = ()
    """Stages that every step of is planned, with weights that never held: they move nothing."""


def wanted_of(
    file: MixConfig,
    declared: MixConfig,
    history: History,
    step: int,
    placing: tuple[Callable[[SourceConfig], SourceConfig], Callable[[SourceConfig], SourceConfig]],
    spelt: Callable[[SourceConfig], SourceConfig] = lambda source: source,
) -> Wanted:
    """Return what a file asks of a run.

    Args:
        file: What it says.
        declared: What the file of the run said when the run was started.
        history: What holds.
        step: First step that is not planned.
        placing: Give sources of the file, and of the run, the paths that they have from anywhere.
        spelt: Gives a source with such paths one spelling of each: two of one file are no other source.

    Raises:
        ConfigError: A change is refused by what holds.
    """
    sources = {name: placing[0](source) for name, source in file.sources.items()}
    # As they are added, a source has the path that somebody wrote: what a link leads to may change until a resume.
    real = {name: spelt(source) for name, source in sources.items()}
    held = {name: spelt(placing[1](source)) for name, source in history.latest.sources.items()}
    elsewhere = {
        name
        for name, source in file.sources.items()
        if name in held and real[name] != held[name] == spelt(placing[1](source))
    }
    refused = [*_fixed(file, declared), *_other_sources(real, held, elsewhere)]
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
    return Wanted(
        changes=tuple(_wanted_weights(file, history, step, sources)),
        over=tuple(_over(file, history, step)),
    )


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
    sources: Mapping[str, SourceConfig],
    held: Mapping[str, SourceConfig],
    elsewhere: AbstractSet[str],
) -> Iterator[Refused]:
    """Yield the sources that are other ones under the same name.

    Args:
        sources: Of the file.
        held: Of the run.
        elsewhere: Those that would be the same, did the file lie in the folder of the run's own.
    """
    for name in sorted(sources.keys() & held.keys()):
        now, then = (
            each[name].model_dump(mode="json", exclude=_LATER_OF_SOURCE) for each in (sources, held)
        )
        for key in sorted(now.keys() | then.keys()):
            if now.get(key) != then.get(key):
                remedy = (
                    "relative paths start at the file: keep it beside the mix file of the run, or write them absolute"
                    if name in elsewhere
                    else f"declare it under another name, and leave {name} out"
                )
                yield Refused(
                    ("sources", name, key),
                    f"is {_shown(now.get(key))} in the file, and {_shown(then.get(key))} in the run: that is another "
                    f"source; {remedy}",
                )


def _shown(value: object) -> str:
    """Return a value as it is written, its middle left out where it is long: paths differ at their ends."""
    if value is None:
        return "not given"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:60]} ... {text[-60:]}"


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
                f"is, from step {step} on, a stage {now} in the file, and {then} in the run: when stages begin, and "
                "how they are ramped, does not change while it goes on; put it back, or give weights at their step "
                "with omniload mix set --at STEP",
            )
            return
        shares = shares_of(wanted[i], file.names), shares_of(held[i], file.names)
        if wanted[i].ramp_steps and _differ(*shares):
            of_file, of_run = map(_said_shares, shares)
            yield Refused(
                at,
                f"leads to {of_file} in the file, and to {of_run} in the run, by a ramp {now}: where a ramp leads does "
                "not change while the run goes on; write the shares of the run, or end the ramp with omniload mix set",
            )
            return


def _over(file: MixConfig, history: History, step: int) -> Iterator[Refused]:
    """Yield the stages of the file that ended before a step, with shares that the run had at none of theirs."""
    stages = dated(history, file.mix.stages, step)
    held = dated(history, history.latest.mix.stages, step)
    current = stage_at(stages, step)
    for i, (stage, following) in enumerate(pairwise(stages[: current + 1])):
        begins, last = stage.from_step, following.from_step - 1
        shares = shares_of(stage, file.names)
        had = held[stage_at(held, begins) : stage_at(held, last) + 1]
        if all(_differ(shares, shares_of(each, file.names)) for each in had):
            yield Refused(
                ("mix", "stages", i),
                f"is over, of steps {begins} to {last}, and step {step} is the first that is not planned: what it says "
                f"now moves nothing; say it in mix.stages.{current}, which holds",
            )


def _said_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _times(stage: Stage) -> str:
    epochs, step = stage.from_epochs or {}, stage.from_step
    begins = f"once {said_epochs(epochs)}" if stage.waits else f"from step {step}"
    return begins + f", {stage.ramp} over {stage.ramp_steps} steps" * bool(stage.ramp_steps)


def _differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return any(abs(one.get(n, 0.0) - other.get(n, 0.0)) > _SAME for n in one.keys() | other.keys())


@dataclass(slots=True)
class _Trying:
    """What would hold with the changes so far: one that is refused is told before any is asked for."""

    history: History
    step: int
    """First step that is not planned."""

    def stages(self) -> list[Stage]:
        """Return the stages from that step on, as they would hold."""
        return stages_from(self._dated(), self.step)

    def ramp_end(self) -> int | None:
        """Return the step at which a ramp ends that is under way: weights that are set now would cut it off."""
        stages = self._dated()
        ramp = stages[stage_at(stages, self.step)]
        end = ramp.from_step + ramp.ramp_steps
        return end if end > self.step + 1 else None

    def _dated(self) -> Sequence[Stage]:
        return dated(self.history, self.history.latest.mix.stages, self.step)

    def asked(self, change: Change, later: Stage | None = None) -> Asked:
        """Try a change, from the next step on or from that of a later stage.

        Raises:
            ConfigError: It is refused, or nobody knows that step yet.
        """
        self.history = self.history.tried(change, _step_of(later) if later else self.step)
        return change, later.from_step if later else None


def _wanted_weights(
    file: MixConfig, history: History, step: int, sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    """Yield changes until every stage has the shares of the file: sources come, sources leave, weights are set."""
    wanted = stages_from(dated(history, file.mix.stages, step), step)
    trying = _Trying(history, step)
    yield from _coming(trying, file, wanted, sources)
    yield from _leaving(trying, file)
    yield from _set(trying, file, wanted)


def _coming(
    trying: _Trying, file: MixConfig, wanted: list[Stage], sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    held, shares = trying.history.latest.names, [shares_of(stage, file.names) for stage in wanted]
    # One whose weights all lie in the past is drawn no more: there is nothing that it could be added with.
    new = [n for n in file.names if n not in held and any(n in found for found in shares)]
    left = 1 - sum(shares[0].get(name, 0.0) for name in new)
    for name in new:
        i = next(i for i, found in enumerate(shares) if name in found)
        weights = trying.stages()[i].weights
        kept = sum(w for n, w in weights.items() if n in file.names and n not in new)
        # Those that stay keep what they have, and the new ones get their shares of the whole.
        whole = kept / left if i == 0 and kept and left > _SAME else sum(weights.values())
        # In twelve digits, as somebody might type it: the rest is rounding.
        weight = min(float(f"{shares[i][name] * whole:.12g}"), LARGEST_NUMBER)
        change = AddSource(name=name, source=sources[name], weight=weight)
        yield trying.asked(change, wanted[i] if i else None)


def _leaving(trying: _Trying, file: MixConfig) -> Iterator[Asked]:
    if any(not any(map(stage.weights.get, file.names)) for stage in trying.stages()):
        return  # they are all there is: weights come first, and say 0 of them
    for name in trying.history.latest.names:
        if name not in file.names and any(s.weights.get(name) for s in trying.stages()):
            yield trying.asked(RetireSource(name=name))


def _set(trying: _Trying, file: MixConfig, wanted: list[Stage]) -> Iterator[Asked]:
    for i, stage in enumerate(wanted):
        held = trying.stages()[i]
        if _differ(shares_of(stage, file.names), shares_of(held, file.names)):
            if i == 0 and (end := trying.ramp_end()) is not None:
                raise ConfigError(
                    f"mix.stages: the weights that a ramp begins at, which ends at step {end}, are others in the run; "
                    "put them back, or end the ramp with omniload mix set"
                )
            if i and held.ramp_steps:
                raise ConfigError(
                    f"mix.stages: a source that is added now has its share in the stage {_times(held)} too, where the "
                    "file gives it none; to set that would cut the ramp off: add the source once the ramp is over"
                )
            gone = dict.fromkeys(held.weights, 0.0)
            known = {n: w for n, w in stage.weights.items() if n in trying.history.latest.names}
            # Every source of the stage by name: one that is not named keeps its weight.
            yield trying.asked(SetWeights(weights=gone | known), stage if i else None)


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
