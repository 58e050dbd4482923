"""Policies as functions: from what a run has shown to the shares that its sources are to have. Pure.

None has a state of its own: what it moves on from are the shares of now, which the run's edits hold. So a
policy that is stopped and started again goes on where it was.

A source whose share is 0 was left out by its file or by somebody, and stays so.

Source:
    Xie et al., "DoReMi: Optimizing Data Mixtures Speeds Up Language Model Pretraining" (2023), for moving weights by
    the exponential of excess losses; Arivazhagan et al., "Massively Multilingual Neural Machine Translation
    in the Wild" (2019), for temperatures; Albalak et al., "Efficient Online Data Mixing For Language Model
    Pre-Training" (2023, arXiv 2312.02406), and the code of its authors, for the bandit, its exploration rate and its
    moving mean; Auer et al., "The Nonstochastic Multiarmed Bandit Problem" (2002), for EXP3 itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import assert_never

from omniload.base.errors import ConfigError
from omniload.base.settings.registry import FAILURES, registered
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import declared_at
from omniload.mix.journal.rewards import SourceRewards
from omniload.mix.schedule import weights_at
from omniload.mix.schema.policies import (
    ConstantPolicy,
    LossPolicy,
    OdmPolicy,
    PolicyConfig,
    RegisteredPolicy,
    RewardPolicy,
    TemperaturePolicy,
)

__all__ = ["GROUP", "PolicyInput", "Turn", "capped", "decide", "seen_at", "turns_that_weigh"]

GROUP = "omniload.policies"
"""Group of entry points."""
_ROUNDING = 1e-9
_LEAST = 1e-12
"""Share that weighs as little as any above 0 can: integer weights sum to 2**30."""
_MOST = 1e12
"""Estimate of a bandit that is as much as any: at the least share of integer weights, a loss of 1000."""
_WEIGHS = 2.0**-20
"""Part of an estimate that is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What some steps in a row showed: as many as lie between two decisions."""

    number: int
    """From 1."""
    shares: Mapping[str, float]
    """Of the sources at the first of its steps."""
    values: Mapping[str, float]
    """What each source was worth of which anything was reported: its mean loss, or reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """What a run has shown since the last decision."""

    step: int
    """First step that a decision can hold at."""
    declared: Mapping[str, float]
    """Share of each source at that step as the mix file says, or the edit that added it."""
    shares: Mapping[str, float]
    """As it would be without a decision."""
    losses: Mapping[str, float]
    """Mean loss of a label of each source of which any was reported."""
    labels: Mapping[str, int]
    """Labels of them."""
    rewards: Mapping[str, SourceRewards] = field(default_factory=dict)
    """Groups of answers, and answers, of each source of which any were reported."""
    turns: Sequence[Turn] = ()
    """For the policy ``odm`` alone: the turns that weigh in what it estimates, oldest first."""


def seen_at(
    history: History,
    step: int,
    losses: Mapping[str, float],
    labels: Mapping[str, int],
    rewards: Mapping[str, SourceRewards],
) -> PolicyInput:
    """Return what a decision for a step goes by; a source that an edit added has what that edit gave it."""
    shares = history.shares_at(step)
    names = history.base.names
    declared_S = weights_at(declared_at(history, step).stages, names, step)
    declared = dict(zip(names, declared_S, strict=True))
    for edit in history.edits:
        if isinstance(edit.change, AddSource):
            name = edit.change.name
            mix = history.of_revision(edit.revision)
            shares_S = weights_at(mix.mix.stages, mix.names, edit.step)
            # All others have made room for it in proportion, as its edit says.
            given = shares_S[mix.names.index(name)]
            declared = {other: share * (1 - given) for other, share in declared.items()}
            declared[name] = given
    return PolicyInput(
        step=step,
        declared={name: declared.get(name, 0.0) for name in shares},
        shares=shares,
        losses=losses,
        labels=labels,
        rewards=rewards,
    )


def decide(
    config: PolicyConfig,
    seen: PolicyInput,
    most: Mapping[str, float],
    groups: Sequence[tuple[frozenset[str], float]] = (),
) -> dict[str, float]:
    """Return the share of each source; they sum to 1.

    Args:
        config: The policy.
        seen: What it decides by.
        most: Largest share of sources that have one.
        groups: Groups of sources that have one together, as for ``capped``.

    Raises:
        ConfigError: A function of a user fails, or gives no shares; or largest shares do not sum to 1.
    """
    found = _decided(config, seen)
    drawn = {name: found[name] for name, share in seen.shares.items() if share > 0}
    # Behind every policy, a user's too: a source at 0 stays out, and none has more than it may.
    whole = capped(drawn, most, groups)
    return {name: whole.get(name, 0.0) for name in seen.shares}


def _decided(config: PolicyConfig, seen: PolicyInput) -> Mapping[str, float]:
    match config:
        case ConstantPolicy():
            return seen.declared
        case TemperaturePolicy():
            return _tempered(config, seen)
        case LossPolicy():
            return _by_loss(config, seen)
        case OdmPolicy():
            return _by_bandit(config, seen)
        case RewardPolicy():
            return _by_reward(config, seen)
        case RegisteredPolicy():
            return _asked(config, seen)
        case _:
            assert_never(config)


def _tempered(config: TemperaturePolicy, seen: PolicyInput) -> dict[str, float]:
    done = (seen.step - config.from_step) / (config.to_step - config.from_step)
    temperature = config.start + (config.end - config.start) * min(max(done, 0.0), 1.0)
    highest = max((seen.declared[name] for name, share in seen.shares.items() if share), default=0)

    def heated(share: float) -> float:
        if not 0 < share < highest:
            return float(share > 0)
        # Of the highest, lest all come to 0 where the temperature is low; and not to 0 itself, where a source stays out
        # however warm it gets.
        power: float = (share / highest) ** (1 / temperature)
        return max(power, _LEAST)

    return {name: heated(share) for name, share in seen.declared.items()}


def _by_loss(config: LossPolicy, seen: PolicyInput) -> dict[str, float]:
    excess = {
        name: max(loss - config.reference.get(name, 0.0), 0.0)
        for name, loss in seen.losses.items()
        if seen.shares.get(name)
    }
    if not excess:
        return dict(seen.shares)
    # A source of which nothing was seen moves like the mean; the largest goes out of the exponent.
    mean = sum(excess.values()) / len(excess)
    highest = max(excess.values())
    moved = {
        name: share * math.exp(config.rate * (excess.get(name, mean) - highest))
        for name, share in seen.shares.items()
    }
    return _with_declared(moved, seen, config.declared)


def turns_that_weigh(smoothing: float) -> int:
    """Return how many of the latest turns make all of an estimate but a millionth."""
    return 1 if smoothing <= _WEIGHS else math.ceil(math.log(_WEIGHS) / math.log(smoothing))


def _by_bandit(config: OdmPolicy, seen: PolicyInput) -> dict[str, float]:
    if not seen.turns:
        return dict(seen.shares)
    # A source that no turn told of yet has what the paper's begin with.
    estimates = {name: 0.0 for name, share in seen.shares.items() if share > 0}
    for turn in seen.turns:
        for name in estimates.keys() & turn.values.keys():
            if share := turn.shares.get(name):
                worth = min(max(turn.values[name] / share, -_MOST), _MOST)
                left = config.smoothing * estimates[name]
                estimates[name] = left + (1 - config.smoothing) * worth
    arms, last = len(estimates), seen.turns[-1].number
    explored, before = (_exploration(arms, turn) for turn in (last, last - 1))
    # The largest goes out of the exponent.
    highest = max(estimates.values())
    powers = {name: math.exp(before * (found - highest)) for name, found in estimates.items()}
    total = sum(powers.values())
    moved = {name: (1 - arms * explored) * p / total + explored for name, p in powers.items()}
    return {name: moved.get(name, 0.0) for name in seen.shares}


def _exploration(arms: int, turn: int) -> float:
    """Return the share that each arm has in any case; all of it, before the first turn."""
    return min(1 / arms, math.sqrt(math.log(arms) / (arms * turn))) if turn else 1 / arms


def _by_reward(config: RewardPolicy, seen: PolicyInput) -> dict[str, float]:
    useful = {
        name: found.kept / found.groups
        for name, found in seen.rewards.items()
        if found.groups and seen.shares.get(name)
    }
    # A source of which nothing was seen is drawn like the mean.
    mean = sum(useful.values()) / max(len(useful), 1)
    moved = {
        name: seen.declared[name] * useful.get(name, mean) if share > 0 else 0.0
        for name, share in seen.shares.items()
    }
    if not sum(moved.values()):
        return dict(seen.shares)
    return _with_declared(moved, seen, config.declared)


def _with_declared(moved: Mapping[str, float], seen: PolicyInput, part: float) -> dict[str, float]:
    """Return moved shares of which a part is what the file declares."""
    total = sum(moved.values())
    kept = {name: seen.declared[name] if share > 0 else 0.0 for name, share in seen.shares.items()}
    all_kept = sum(kept.values()) or 1.0
    return {name: (1 - part) * moved[name] / total + part * kept[name] / all_kept for name in moved}


def _asked(config: RegisteredPolicy, seen: PolicyInput) -> dict[str, float]:
    """Call a function of a user, and see that what it gives are shares."""
    called = registered(GROUP, config.function)
    function: Callable[..., Mapping[str, object]] = called.function
    who = f"policy {config.function!r} ({called.distribution})"
    try:
        # A copy: what the function keeps, and changes later, is its own.
        found = dict(function(seen, **config.options))
    except FAILURES as error:
        raise ConfigError(
            f"{who} fails at step {seen.step}: {type(error).__name__}: {error!s:.300}"
        ) from error
    if found.keys() != seen.shares.keys():
        given = sorted(map(str, found))
        raise ConfigError(
            f"{who} gives shares of {given!r:.200}; the mix has {', '.join(seen.shares)}: give one for each"
        )
    shares: dict[str, float] = {}
    for name, share in found.items():
        # Real: numbers of numpy's are numbers too.
        shares[name] = float(share) if isinstance(share, Real) else math.nan
        if not 0 <= shares[name] < math.inf:
            raise ConfigError(
                f"{who} gives {name} the share {share!r:.40}; give a number of at least 0"
            )
    return shares


def capped(
    shares: Mapping[str, float],
    most: Mapping[str, float],
    groups: Sequence[tuple[frozenset[str], float]] = (),
) -> dict[str, float]:
    """Return shares in the same proportions that sum to 1, but for those that would be above their largest.

    Args:
        shares: The shares by source, in any scale.
        most: Largest share of each source that has one.
        groups: Sources that have a largest share together; of two groups one holds the other, or none of it.

    Raises:
        ConfigError: They are all 0, or what is allowed at most sums to less than 1.
    """
    free = {name: share for name, share in shares.items() if share > 0}
    if not free:
        raise ConfigError(
            f"the policy gives every source of {', '.join(shares) or 'none'} the share 0"
        )
    # Of the largest: the sum of large ones is infinite, and every part of it 0.
    largest = max(free.values())
    free = {name: share / largest for name, share in free.items()}
    bounds = {frozenset({name}): most[name] for name in free if name in most}
    for names, cap in groups:
        # Those that nothing is left of take no room in a group.
        drawn = names.intersection(free)
        bounds[drawn] = min(cap, bounds.get(drawn, 1.0))
    whole = _filled(free, 1.0, sorted(bounds.items(), key=lambda bound: len(bound[0])))
    if (given := sum(whole.values())) < 1 - _ROUNDING:
        raise ConfigError(
            f"the sources that the policy draws from may have {given:g} of all together by their max_fraction; "
            "raise one"
        )
    return {name: whole.get(name, 0.0) for name in shares}


def _filled(
    shares: Mapping[str, float], amount: float, bounds: Sequence[tuple[frozenset[str], float]]
) -> dict[str, float]:
    """Deal an amount in proportion, to nobody more than a bound, the narrowest first; less where they allow no more."""
    whole: dict[str, float] = {}
    open_bounds = list(bounds)
    while True:
        free = {name: share for name, share in shares.items() if name not in whole}
        total, left = sum(free.values()), amount - sum(whole.values())
        dealt = whole | {name: left * share / total for name, share in free.items()}
        settled: list[frozenset[str]] = []
        for names, cap in open_bounds:
            # A group waits until nobody in it is over by himself: what they leave may keep it below.
            if any(names & each for each in settled):
                continue
            if sum(dealt[name] for name in sorted(names)) <= cap:
                continue
            # Those settled before too: a group that is over deals to all of its members anew.
            within = [bound for bound in bounds if bound[0] < names]
            members = {name: shares[name] for name in sorted(names)}
            whole |= _filled(members, cap, within) if len(names) > 1 else dict.fromkeys(names, cap)
            settled.append(names)
        if not settled:
            return dealt
        # Those that are over have their largest; what they leave raises others, and groups around them, which may be
        # over then.
        open_bounds = [b for b in open_bounds if not any(b[0] <= each for each in settled)]
