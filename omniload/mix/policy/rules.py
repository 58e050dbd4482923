"""Policies as pure functions: from what a run has shown to the new shares of its sources.

A policy has no state of its own. It starts from the current shares, which the run's edits hold. Therefore a policy
that is stopped and started again continues where it was.

A source with a share of 0 was left out by its file or by a user, and stays left out.

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
"""Name of the group of entry points."""
_ROUNDING = 1e-9
_LEAST = 1e-12
"""Smallest share that has an effect, because integer weights sum to 2**30."""
_MOST = 1e12
"""Limit of an estimate of a bandit: the estimate for a loss of 1000 at the smallest share of integer weights."""
_WEIGHS = 2.0**-20
"""Part of an estimate that is neglected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the run showed in the consecutive steps between two decisions."""

    number: int
    """Number of the turn, from 1."""
    shares: Mapping[str, float]
    """Share of each source at the first step of the turn."""
    values: Mapping[str, float]
    """Value of each source for which something was reported: its mean loss, or its mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """What a run has shown since the last decision."""

    step: int
    """First step that a decision can apply to."""
    declared: Mapping[str, float]
    """Share of each source at that step, as declared by the mix file or by the edit that added the source."""
    shares: Mapping[str, float]
    """Share of each source at that step without a decision."""
    losses: Mapping[str, float]
    """Mean loss of a label, for each source with a reported loss."""
    labels: Mapping[str, int]
    """Number of these labels."""
    rewards: Mapping[str, SourceRewards] = field(default_factory=dict)
    """Groups of answers, and answers, of each source for which any were reported."""
    turns: Sequence[Turn] = ()
    """The turns that count in the estimates of the policy ``odm``, oldest first; only that policy has them."""


def seen_at(
    history: History,
    step: int,
    losses: Mapping[str, float],
    labels: Mapping[str, int],
    rewards: Mapping[str, SourceRewards],
) -> PolicyInput:
    """Return the input of a decision for a step; the declared share of an added source is that given by its edit."""
    shares = history.shares_at(step)
    names = history.base.names
    declared_S = weights_at(declared_at(history, step).stages, names, step)
    declared = dict(zip(names, declared_S, strict=True))
    for edit in history.edits:
        if isinstance(edit.change, AddSource):
            name = edit.change.name
            mix = history.of_revision(edit.revision)
            shares_S = weights_at(mix.mix.stages, mix.names, edit.step)
            # The edit took its share from all other sources in proportion.
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
        seen: The input of the decision.
        most: Largest share of each source that has one.
        groups: Groups of sources with a common largest share, as for ``capped``.

    Raises:
        ConfigError: A user's function fails or does not return shares, or the largest shares do not sum to 1.
    """
    found = _decided(config, seen)
    drawn = {name: found[name] for name, share in seen.shares.items() if share > 0}
    # Applied to every policy, also to a user's: a source at 0 stays at 0, and no source exceeds its limit.
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
        # Shares are relative to the highest share, because all powers could become 0 at a low temperature. The power
        # itself is never 0, because a source with a share of 0 would stay out however high the temperature gets.
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
    # A source without a reported loss moves like the mean. The largest is subtracted to keep the exponent small.
    mean = sum(excess.values()) / len(excess)
    highest = max(excess.values())
    moved = {
        name: share * math.exp(config.rate * (excess.get(name, mean) - highest))
        for name, share in seen.shares.items()
    }
    return _with_declared(moved, seen, config.declared)


def turns_that_weigh(smoothing: float) -> int:
    """Return how many of the latest turns make up all but a millionth of an estimate."""
    return 1 if smoothing <= _WEIGHS else math.ceil(math.log(_WEIGHS) / math.log(smoothing))


def _by_bandit(config: OdmPolicy, seen: PolicyInput) -> dict[str, float]:
    if not seen.turns:
        return dict(seen.shares)
    # A source that no turn reported yet has the initial estimate of the paper.
    estimates = {name: 0.0 for name, share in seen.shares.items() if share > 0}
    for turn in seen.turns:
        for name in estimates.keys() & turn.values.keys():
            if share := turn.shares.get(name):
                worth = min(max(turn.values[name] / share, -_MOST), _MOST)
                left = config.smoothing * estimates[name]
                estimates[name] = left + (1 - config.smoothing) * worth
    arms, last = len(estimates), seen.turns[-1].number
    explored, before = (_exploration(arms, turn) for turn in (last, last - 1))
    # The largest is subtracted to keep the exponent small.
    highest = max(estimates.values())
    powers = {name: math.exp(before * (found - highest)) for name, found in estimates.items()}
    total = sum(powers.values())
    moved = {name: (1 - arms * explored) * p / total + explored for name, p in powers.items()}
    return {name: moved.get(name, 0.0) for name in seen.shares}


def _exploration(arms: int, turn: int) -> float:
    """Return the share that each source has in any case; before the first turn, this is an equal share."""
    return min(1 / arms, math.sqrt(math.log(arms) / (arms * turn))) if turn else 1 / arms


def _by_reward(config: RewardPolicy, seen: PolicyInput) -> dict[str, float]:
    useful = {
        name: found.kept / found.groups
        for name, found in seen.rewards.items()
        if found.groups and seen.shares.get(name)
    }
    # A source without reported rewards is drawn like the mean.
    mean = sum(useful.values()) / max(len(useful), 1)
    moved = {
        name: seen.declared[name] * useful.get(name, mean) if share > 0 else 0.0
        for name, share in seen.shares.items()
    }
    if not sum(moved.values()):
        return dict(seen.shares)
    return _with_declared(moved, seen, config.declared)


def _with_declared(moved: Mapping[str, float], seen: PolicyInput, part: float) -> dict[str, float]:
    """Return the moved shares, mixed with a part of the declared shares."""
    total = sum(moved.values())
    kept = {name: seen.declared[name] if share > 0 else 0.0 for name, share in seen.shares.items()}
    all_kept = sum(kept.values()) or 1.0
    return {name: (1 - part) * moved[name] / total + part * kept[name] / all_kept for name in moved}


def _asked(config: RegisteredPolicy, seen: PolicyInput) -> dict[str, float]:
    """Call a user's function, and check that it returns shares."""
    called = registered(GROUP, config.function)
    function: Callable[..., Mapping[str, object]] = called.function
    who = f"policy {config.function!r} ({called.distribution})"
    try:
        # A copy, so that the function may keep and change its own result later.
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
        # ``Real`` includes the numbers of numpy.
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
    """Return the shares scaled to sum to 1, in the same proportions except for shares above their largest.

    Args:
        shares: The shares by source, in any scale.
        most: Largest share of each source that has one.
        groups: Sources with a common largest share; two groups are either disjoint or one contains the other.

    Raises:
        ConfigError: All shares are 0, or the largest shares sum to less than 1.
    """
    free = {name: share for name, share in shares.items() if share > 0}
    if not free:
        raise ConfigError(
            f"the policy gives every source of {', '.join(shares) or 'none'} the share 0"
        )
    # Divided by the largest, because the sum of large shares may be infinite and every part of it 0.
    largest = max(free.values())
    free = {name: share / largest for name, share in free.items()}
    bounds = {frozenset({name}): most[name] for name in free if name in most}
    for names, cap in groups:
        # Sources with a share of 0 do not count in a group.
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
    """Deal an amount in proportion within bounds, the narrowest first; deal less if the bounds allow no more."""
    whole: dict[str, float] = {}
    open_bounds = list(bounds)
    while True:
        free = {name: share for name, share in shares.items() if name not in whole}
        total, left = sum(free.values()), amount - sum(whole.values())
        dealt = whole | {name: left * share / total for name, share in free.items()}
        settled: list[frozenset[str]] = []
        for names, cap in open_bounds:
            # A group waits until no source in it exceeds its own bound, because what these leave may keep it within
            # its own.
            if any(names & each for each in settled):
                continue
            if sum(dealt[name] for name in sorted(names)) <= cap:
                continue
            # The inner bounds include settled ones, because a group over its bound deals to all of its members again.
            within = [bound for bound in bounds if bound[0] < names]
            members = {name: shares[name] for name in sorted(names)}
            whole |= _filled(members, cap, within) if len(names) > 1 else dict.fromkeys(names, cap)
            settled.append(names)
        if not settled:
            return dealt
        # Sources over their bound get the bound. What they leave raises other sources and the groups around them,
        # which may then exceed their bounds.
        open_bounds = [b for b in open_bounds if not any(b[0] <= each for each in settled)]
