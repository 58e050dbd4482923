"""What a file asks of a run: the changes that lead from the current mix to the mix of the file.

Each change could also be typed as a command: add sources, retire sources, set weights of the next step and of later
stages, or set amounts. A difference that no change can bring about is refused and named by its key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, SourceConfig, Stage
from omniload.mix.edits.amounts import amounts_ahead
from omniload.mix.edits.comparison import ROUNDING, other_leaves, shares_differ, shares_of, shown
from omniload.mix.edits.edit import AddSource, Change, RetireSource, SetAmounts, SetWeights, said_of
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import dated, edits_ahead, with_scheduled
from omniload.mix.schedule import stage_at, stages_from
from omniload.mix.schema.stages import said_epochs
from omniload.mix.schema.weights import LARGEST_NUMBER

__all__ = ["Asked", "Refused", "Wanted", "later_keys", "wanted_of"]

Asked: TypeAlias = tuple[Change, int | None]
"""A change, and the step that it is to apply to; ``None`` for the next."""
_LATER = ("runtime.", "balance.", "loader.", "batch.micro_tokens")
"""Keys that may differ between the starts of a run."""
_LATER_OF_SOURCE = {"tags", "on_error", "max_repetition", "max_fraction"}


@dataclass(frozen=True, slots=True)
class Refused:
    """A difference that no change of a run can bring about."""

    at: tuple[str | int, ...]
    """Keys that lead to it in the file."""
    said: str
    """What was found, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The requests of a file to a run."""

    changes: tuple[Asked, ...] = ()
    """Changes in the order in which they are requested."""
    refused: tuple[Refused, ...] = ()
    """Differences that are refused; if there are any, no change is requested."""
    over: tuple[Refused, ...] = ()
    """Stages without any effect: all their steps are planned and their weights never applied, or an edit ended
    their ramp."""
    scheduled: tuple[Refused, ...] = ()
    """What edits set for later steps although the file does not have it; it stays."""


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
        file: The mix of the file.
        declared: The mix of the run's file when the run was started.
        history: The mix that applies.
        step: First unplanned step.
        placing: Functions that give the sources of the file, and those of the run, absolute paths.
        spelt: Gives a source with such paths one spelling of each path, so that two paths to one file are equal.

    Raises:
        ConfigError: A change is refused under the current mix.
    """
    sources = {name: placing[0](source) for name, source in file.sources.items()}
    file, ended = _without_ended_ramps(file, history, step)
    # A source is added with the path as written, because the target of a link may change before a resume.
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
        return _wanted_amounts(file, history, step, sources)
    return Wanted(
        changes=tuple(_wanted_weights(file, history, step, sources)),
        over=(*_over(file, history, step), *ended),
        scheduled=tuple(_ahead(file, history, step)),
    )


def later_keys(one: MixConfig, other: MixConfig) -> list[str]:
    """Return the keys with different values in two mixes whose values apply from the next start of a run on."""
    both = (f"sources.{name}." for name in one.sources.keys() & other.sources.keys())
    prefixes = (*_LATER, *(prefix + key for prefix in both for key in _LATER_OF_SOURCE))
    return [each.key for each in other_leaves(one, other) if each.key.startswith(prefixes)]


def _fixed(file: MixConfig, declared: MixConfig) -> Iterator[Refused]:
    """Yield the keys that a run keeps from its start to its end but that have other values in the file."""
    alike = (file.mix.amounts is None) == (declared.mix.amounts is None)
    others = ("sources.", "mix.amounts" if alike else "mix.", *_LATER)
    for each in other_leaves(file, declared):
        # The version only says how a file is written; its meaning is compared by the other keys.
        if each.key == "version" or each.key.startswith(others):
            continue
        yield Refused(
            tuple(each.key.split(".")),
            f"is {shown(each.one)} in the file, and {shown(each.other)} in the run, which keeps it from its start to "
            "its end; put it back, or start a new run",
        )


def _other_sources(
    sources: Mapping[str, SourceConfig],
    held: Mapping[str, SourceConfig],
    elsewhere: AbstractSet[str],
) -> Iterator[Refused]:
    """Yield the sources that have the same name but differ.

    Args:
        sources: Sources of the file.
        held: Sources of the run.
        elsewhere: Names of sources that would be the same if the file were in the folder of the run's own file.
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
                    f"is {shown(now.get(key))} in the file, and {shown(then.get(key))} in the run: that is another "
                    f"source; {remedy}",
                )


def _other_stages(file: MixConfig, history: History, step: int) -> Iterator[Refused]:
    """Yield the first later stage that begins at another step or has another ramp."""
    wanted, ahead = with_scheduled(file, history, step)
    held = stages_from(dated(history, history.latest.mix.stages, step), step)
    # Stages that are over are cut off at the front, so the remaining stages have the last numbers of the file.
    first = len(file.mix.stages) - (len(wanted) - len(ahead))
    said = [[_times(stage) for stage in stages] for stages in (wanted, held)]
    for i in range(max(map(len, said))):
        now, then = (f"{each[i]}" if i < len(each) else "none" for each in said)
        own = first + i - sum(stage.from_step in ahead for stage in wanted[:i])
        at = ("mix", "stages", max(0, min(own, len(file.mix.stages) - 1)))
        if now != then:
            yield Refused(
                at,
                f"is, from step {step} on, a stage {now} in the file, and {then} in the run: when stages begin, and "
                "how they are ramped, does not change while it goes on; put it back, or give weights at their step "
                "with omniload mix set --at STEP",
            )
            return
        shares = shares_of(wanted[i], file.names), shares_of(held[i], file.names)
        if wanted[i].ramp_steps and shares_differ(*shares):
            of_file, of_run = map(_said_shares, shares)
            yield Refused(
                at,
                f"leads to {of_file} in the file, and to {of_run} in the run, by a ramp {now}: where a ramp leads does "
                "not change while the run goes on; write the shares of the run, or end the ramp with omniload mix set",
            )
            return


def _without_ended_ramps(
    file: MixConfig, history: History, step: int
) -> tuple[MixConfig, list[Refused]]:
    """Return a file without ramps that edits ended and no change brings back, and the stages without effect.

    A stage with the weights that the run was started with gets the current weights; other weights apply at once.
    """
    if file.mix.amounts is not None or history.latest.mix.amounts is not None:
        return file, []
    declared, held = (
        dated(history, mix.mix.stages, step) for mix in (history.base, history.latest)
    )
    by_times = {_times(stage): stage for stage in declared}
    ends = {_ramp_end(stage) for stage in held[stage_at(held, step) :] if stage.ramp_steps}
    stages, found = list(file.mix.stages), []
    for i, stage in enumerate(dated(history, stages, step)):
        # The last step of a ramp has the final weights.
        is_to_come = stage.ramp_steps and not stage.waits and _ramp_end(stage) > step + 1
        if not is_to_come or _ramp_end(stage) in ends or _times(stage) not in by_times:
            continue
        weights = stage.weights
        if not shares_differ(*(shares_of(s, file.names) for s in (stage, by_times[_times(stage)]))):
            now = stages_from(held, max(stage.from_step, step))[0].weights
            weights = {n: w for n, w in now.items() if n in file.names} or weights
            said = (
                f"is a ramp {_times(stage)}, which an edit ended: as it was, it moves nothing; give other weights, or "
                "leave ramp_steps out to have these"
            )
            found.append(Refused(("mix", "stages", i), said))
        ended = {"weights": weights, "ramp_steps": 0, "ramp": "linear", "ramp_done": 0}
        stages[i] = stages[i].model_copy(update=ended)
    mix = file.mix.model_copy(update={"stages": tuple(stages)})
    return file.model_copy(update={"mix": mix}), found


def _ramp_end(stage: Stage) -> int:
    """Return the first step after the ramp of a stage."""
    return stage.from_step + stage.ramp_steps


def _over(file: MixConfig, history: History, step: int) -> Iterator[Refused]:
    """Yield the stages of the file that ended before a step and whose shares the run never had in their steps."""
    stages = dated(history, file.mix.stages, step)
    held = dated(history, history.latest.mix.stages, step)
    current = stage_at(stages, step)
    for i, (stage, following) in enumerate(pairwise(stages[: current + 1])):
        begins, last = stage.from_step, following.from_step - 1
        shares = shares_of(stage, file.names)
        had = held[stage_at(held, begins) : stage_at(held, last) + 1]
        if all(shares_differ(shares, shares_of(each, file.names)) for each in had):
            yield Refused(
                ("mix", "stages", i),
                f"is over, of steps {begins} to {last}, and step {step} is the first that is not planned: what it says "
                f"now moves nothing; say it in mix.stages.{current}, which holds",
            )


def _ahead(file: MixConfig, history: History, step: int) -> Iterator[Refused]:
    """Yield what edits set for later steps if the file has no stage there."""
    stages = dated(history, file.mix.stages, step)
    for edit in edits_ahead(history, with_scheduled(file, history, step)[1]):
        yield Refused(
            ("mix", "stages", stage_at(stages, edit.step)),
            f"holds to step {edit.step - 1}: edit {edit.revision} ({said_of(edit.change)}) is set for step "
            f"{edit.step}, and stays, though the file does not have it; for other weights from there on give the file "
            f"a stage of from_step {edit.step}, or take it back with omniload mix undo",
        )


def _said_shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _times(stage: Stage) -> str:
    epochs, step = stage.from_epochs or {}, stage.from_step
    begins = f"once {said_epochs(epochs)}" if stage.waits else f"from step {step}"
    return begins + f", {stage.ramp} over {stage.ramp_steps} steps" * bool(stage.ramp_steps)


@dataclass(slots=True)
class _Trying:
    """The mix with the changes so far: a refused change is reported before any change is requested."""

    history: History
    step: int
    """First unplanned step."""
    ahead: AbstractSet[int]
    """Steps of the stages that the file does not have."""

    def stages(self) -> list[Stage]:
        """Return the stages from that step on, with the changes so far."""
        return stages_from(self._dated(), self.step)

    def ramp_end(self) -> int | None:
        """Return the step at which an unfinished ramp ends; weights that are set now would cut the ramp off."""
        stages = self._dated()
        ramp = stages[stage_at(stages, self.step)]
        end = _ramp_end(ramp)
        return end if end > self.step + 1 else None

    def _dated(self) -> Sequence[Stage]:
        return dated(self.history, self.history.latest.mix.stages, self.step)

    def asked(self, change: Change, later: Stage | None = None) -> Asked:
        """Try a change, from the next step on or from the step of a later stage.

        Raises:
            ConfigError: The change is refused, or the step of the stage is not known yet.
        """
        self.history = self.history.tried(change, _step_of(later) if later else self.step)
        return change, later.from_step if later else None


def _wanted_weights(
    file: MixConfig, history: History, step: int, sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    """Yield changes until every stage has the shares of the file: add sources, retire sources, then set weights."""
    wanted, ahead = with_scheduled(file, history, step)
    trying = _Trying(history, step, ahead)
    yield from _coming(trying, file, wanted, sources)
    yield from _leaving(trying, file, wanted)
    yield from _set(trying, file, wanted)


def _coming(
    trying: _Trying, file: MixConfig, wanted: list[Stage], sources: Mapping[str, SourceConfig]
) -> Iterator[Asked]:
    held, shares = trying.history.latest.names, [shares_of(stage, file.names) for stage in wanted]
    # A source whose weights all lie in the past is not drawn, so there is no weight to add it with.
    new = [n for n in file.names if n not in held and any(n in found for found in shares)]
    left = 1 - sum(shares[0].get(name, 0.0) for name in new)
    for name in new:
        i = next(i for i, found in enumerate(shares) if name in found)
        weights = trying.stages()[i].weights
        kept = sum(w for n, w in weights.items() if n in file.names and n not in new)
        # The remaining sources keep their weights, and the new sources get their shares of the whole.
        whole = kept / left if i == 0 and kept and left > ROUNDING else sum(weights.values())
        # Twelve digits, as a user might type it; the rest is rounding.
        weight = min(float(f"{shares[i][name] * whole:.12g}"), LARGEST_NUMBER)
        change = AddSource(name=name, source=sources[name], weight=weight)
        yield trying.asked(change, wanted[i] if i else None)


def _leaving(trying: _Trying, file: MixConfig, wanted: list[Stage]) -> Iterator[Asked]:
    if any(not any(map(stage.weights.get, file.names)) for stage in trying.stages()):
        return  # all current sources would leave: weights come first and set them to 0
    for name in trying.history.latest.names:
        pairs = zip(trying.stages(), wanted, strict=True)
        # The file cannot take away what an edit at a later step gives to a source that it adds.
        if name not in file.names and any(
            held.weights.get(name) and not stage.weights.get(name) for held, stage in pairs
        ):
            yield trying.asked(RetireSource(name=name))


def _set(trying: _Trying, file: MixConfig, wanted: list[Stage]) -> Iterator[Asked]:
    for i, stage in enumerate(wanted):
        held = trying.stages()[i]
        if stage.from_step not in trying.ahead and shares_differ(
            shares_of(stage, file.names), shares_of(held, file.names)
        ):
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
            # All sources of the stage are named, because a source that is not named keeps its weight.
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
) -> Wanted:
    """Return changes to the amounts of the file; only the planner knows what is drawn already."""
    wanted, held = file.mix.amounts or {}, history.latest.mix.amounts or {}
    last, ahead = amounts_ahead(wanted, history, step)
    names = [name for name in wanted if name not in ahead and held.get(name) != wanted[name]]
    new = [name for name in names if name not in history.latest.sources]
    others = {name: wanted[name] for name in names if name not in new}
    changes: list[Change] = [SetAmounts(amounts=others)] if others else []
    changes += [AddSource(name=n, source=sources[n], amount=wanted[n]) for n in new]
    # After new sources, because the last source of a run cannot be retired.
    changes += [RetireSource(name=n) for n in held if n not in wanted and n not in ahead]
    # No edit of amounts may come before another, because the rest of the amounts is spread from the step of each.
    at = None if last is None else last.step
    for change in changes:
        history = history.tried(change, step if at is None else at)
    told = []
    if last is not None and ahead:
        said = (
            f"edit {last.revision} ({said_of(last.change)}) is set for step {at}, and stays, though the file does not "
            "have it; to take it back say omniload mix undo"
        )
        told = [Refused(("mix", "amounts"), said)]
    return Wanted(changes=tuple((change, at) for change in changes), scheduled=tuple(told))
