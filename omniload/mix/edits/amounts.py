"""Changes of how much a run draws of its sources: the resulting amounts, and whether they can still be met.

What was drawn stays drawn. The rest of every amount is spread anew from the step at which the edit takes effect::

    web   {epochs: 1} of 900 records, 450 drawn      set web=2epochs      1,350 records are left
    code  {tokens: 60k}, 30k drawn                                        30,000 tokens are left

A source continues in the unit in which it is counted. Its cursor counts records, so any source can be given epochs.
Samples or tokens of a source are known only if they were counted from the first step on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError
from omniload.mix.edits.edit import AddSource, Change, Edit, RetireSource, SetAmounts, SetWeights
from omniload.mix.edits.sources import require_known
from omniload.mix.schedule import drawn_in
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.totals.dividing import apportioned
from omniload.mix.state import MixState

if TYPE_CHECKING:
    from omniload.mix.edits.history import History

__all__ = [
    "amounts_ahead",
    "amounts_under",
    "counted_alike",
    "differing",
    "require_amounts_before",
    "require_drawable",
    "spread_anew",
]


def counted_alike(history: "History", change: Change) -> Change:
    """Return a change in the unit that the run draws by; weights for a run with amounts divide these amounts anew.

    Raises:
        ConfigError: The change gives weights to a run with amounts that they cannot divide, or amounts to a run with
            weights; the message says what to do instead.
    """
    has_amounts = history.base.mix.amounts is not None
    match change:
        case SetWeights(weights=weights) if has_amounts:
            return SetAmounts(amounts=_divided_anew(history, weights))
        case SetAmounts(amounts=amounts) if not has_amounts:
            raise ConfigError(
                f"the run draws by weight, and {next(iter(amounts))} is given {next(iter(amounts.values()))}; say a "
                "weight, as web=0.2: a run draws amounts whose mix file has mix.amounts from the start"
            )
        case AddSource(name=name, amount=amount) if has_amounts != (amount is not None):
            wanted = "--amount, as --amount 2epochs" if has_amounts else "--weight, as --weight 0.3"
            raise ConfigError(
                f"source {name!r} comes with {'a weight' if has_amounts else 'an amount'}, and the run draws "
                f"{'amounts' if has_amounts else 'by weight'}; give {wanted}"
            )
    return change


def _divided_anew(history: "History", weights: Mapping[str, float]) -> dict[str, Amount]:
    """Return the joint amount of some sources, divided by weights; the total stays the same."""
    require_known(weights, history.latest.names)
    held = history.latest.mix.amounts or {}
    amounts = {name: held.get(name) for name in weights}
    kinds = {amount.kind if amount is not None else "none" for amount in amounts.values()}
    if len(weights) < 2 or kinds not in ({"tokens"}, {"samples"}):
        have = ", ".join(f"{name} has {amount or 'none'}" for name, amount in amounts.items())
        raise ConfigError(
            f"the run draws amounts, and {next(iter(weights))}={next(iter(weights.values())):g} is a weight; say how "
            "much is to be drawn in all, as web=2epochs, code=5Gtokens or chat=50ksamples, or give two sources or more "
            f"weights by which to divide what they have together, all in tokens or all in samples ({have})"
        )
    (kind,) = kinds
    together = sum(amount.units(0) for amount in amounts.values() if amount is not None)
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    scale = sum(exact.values()) or Fraction(1)
    parts = apportioned(together, {name: weight / scale for name, weight in exact.items()})
    for name, part in parts.items():
        if not part or weights[name] == 0:
            raise ConfigError(
                f"{name!r} gets none of {together:,} {kind} by weight {weights[name]:g}; give it more, or say omniload "
                f"mix retire RUN {name} to draw no more of it"
            )
    return {name: Amount(**{kind: part}) for name, part in parts.items()}


def amounts_under(
    history: "History", change: Change, undoes: int | None
) -> dict[str, Amount] | None:
    """Return the amounts that apply under a change; ``None`` if the change leaves them as they are.

    Raises:
        ConfigError: The change names an unknown source, or retires a source that is no longer drawn. Or no source
            would be left, or a source would repeat more often than its ``max_repetition``.
    """
    held = history.latest.mix.amounts
    if held is None:
        return None
    sources = dict(history.latest.sources)
    match change:
        case SetAmounts(amounts=amounts):
            require_known(amounts, history.latest.names)
            wanted = {**held, **amounts}
        case AddSource(name=name, amount=Amount() as amount):
            wanted, sources[name] = {**held, name: amount}, change.source
        case RetireSource(name=name):
            require_known([name], history.latest.names)
            wanted = _without(held, name)
        # The amounts before the undone edit. Everything after it is undone already, because the latest edit is undone
        # first.
        case _ if undoes is not None and history.edits[undoes - 1].amounts is not None:
            return history.of_revision(undoes - 1).mix.amounts
        case _:
            return None
    for name, amount in wanted.items():
        cap, whose = sources[name].max_repetition or math.inf, "its max_repetition"
        group = history.base.mix.repetition_caps.get(name)
        if group is not None and group.max_repetition is not None and group.max_repetition < cap:
            cap, whose = group.max_repetition, f"max_repetition of group {group.name}"
        if amount.epochs is not None and amount.epochs > cap:
            raise ConfigError(f"{name} wants {amount}, and {whose} is {cap:g}; lower the amount")
    return wanted


def _without(held: Mapping[str, Amount], name: str) -> dict[str, Amount]:
    if name not in held:
        raise ConfigError(f"source {name!r} has no amount left; it is retired already")
    if len(held) == 1:
        raise ConfigError(
            f"no source would have an amount without {name!r}; end the run, or give one to another source first"
        )
    return {n: amount for n, amount in held.items() if n != name}


def differing(
    before: Mapping[str, Amount], after: Mapping[str, Amount]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the amounts that differ, by source; ``None`` if a source has none."""
    names = [*before, *(name for name in after if name not in before)]
    said_before = {name: str(amount) for name, amount in before.items()}
    said_after = {name: str(amount) for name, amount in after.items()}
    pairs = {name: (said_before.get(name), said_after.get(name)) for name in names}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def require_amounts_before(
    history: "History", change: Change, step: int, undoes: int | None
) -> None:
    """Refuse a change before an existing change of amounts, because it would alter what was drawn by then.

    Raises:
        ConfigError: There is such an edit; the message names it.
    """
    gone = {undoes, *(edit.undoes for edit in history.edits)}
    later = [e for e in history.edits if e.amounts is not None and e.revision not in gone]
    if later and step < later[-1].step:
        raise ConfigError(
            f"step {step} lies before step {later[-1].step}, from which on edit {later[-1].revision} spreads what is "
            f"left of the amounts: with another mix before it, that would be another rest; say --at {later[-1].step} "
            f"or later, or undo that edit first ({change.kind} was asked for)"
        )


def require_drawable(
    before: "History", after: "History", state: MixState, records_S: Sequence[int]
) -> None:
    """Refuse the amounts of the last edit of ``after`` if no run can meet them any more.

    Args:
        before: The history without that edit.
        after: The history with it.
        state: State before the first unplanned step.
        records_S: Raw records of each source, including an added source.

    Raises:
        ConfigError: More is drawn already, or the unit of the amount was not counted so far, or more than the amount
            may be drawn by the step of the edit, which is still to come.
    """
    edit = after.edits[-1]
    held = before.latest.mix.amounts or {}
    state = state.widened(len(records_S))
    for s, name in enumerate(after.latest.names):
        wanted, now = (edit.amounts or {}).get(name), held.get(name)
        if wanted is None or wanted == now:
            continue
        if not (units := wanted.units(records_S[s])):
            raise ConfigError(
                f"{name}: {wanted} of {records_S[s]:,} records are less than one record; raise it"
            )
        if name not in before.latest.names:
            continue
        counted = _counted_in(before, name)
        if wanted.kind not in (counted.kind, "epochs"):
            raise ConfigError(
                f"{name} is counted in {_UNITS[counted.kind]} ({counted}), and {wanted} would be {wanted.kind} from "
                f"the first step on, which nobody has counted; give it epochs"
                + ("" if counted.kind == "epochs" else f" or {counted.kind}")
            )
        if edit.step > state.step and (
            wanted.kind != counted.kind or now is None or units < now.units(records_S[s])
        ):
            raise ConfigError(
                f"{name} would have {wanted} in place of {now or 'none'} from step {edit.step} on, and what is drawn "
                f"by then is known when it comes; the next step is {state.step}: say --at next"
            )
        drawn = drawn_in(wanted.kind, state, s)
        # Tokens end with the piece that reaches them, which has at most one row.
        over = after.base.pack.length - 1 if wanted.kind == "tokens" else 0
        if drawn > units + over:
            raise ConfigError(
                f"{name}: {wanted} are {units:,} {_UNITS[wanted.kind]}, and before step {state.step} {drawn:,} are "
                f"drawn; give at least that much, or say omniload mix retire RUN {name} to draw no more of it"
            )


_UNITS = {"epochs": "records", "samples": "samples", "tokens": "tokens"}


def _counted_in(history: "History", name: str) -> Amount:
    """Return the last amount of a source: its unit is the one that was counted."""
    # Searched from the last revision: a retired source has no amount now, but it was counted all the same.
    for revision in range(len(history.edits), -1, -1):
        amount = (history.of_revision(revision).mix.amounts or {}).get(name)
        if amount is not None:
            return amount
    raise AssertionError(f"{name} had no amount, and is in a mix of amounts")


def amounts_ahead(
    wanted: Mapping[str, Amount], history: "History", step: int
) -> tuple[Edit | None, frozenset[str]]:
    """Return the last edit of amounts after a step, and the sources whose amounts only such edits change.

    For these sources, a file states the amounts that apply before those edits.
    """
    ahead = [edit for edit in history.edits if edit.amounts is not None and edit.step > step]
    if not ahead:
        return None, frozenset()
    now = history.of_revision(ahead[0].revision - 1).mix.amounts or {}
    then = history.latest.mix.amounts or {}
    names = (name for name in wanted.keys() | now.keys() | then.keys())
    return ahead[-1], frozenset(n for n in names if wanted.get(n) == now.get(n) != then.get(n))


def spread_anew(state: MixState, history: "History", edits: Sequence[Edit]) -> MixState:
    """Return ``state`` with the rest of the amounts of ``edits`` spread from its step on.

    Args:
        state: State before the step, of all sources.
        history: All edits.
        edits: The edits that take effect, in order.
    """
    changing = [edit for edit in edits if edit.amounts is not None]
    if not changing:
        return state
    drawn_S = list(state.drawn_S)
    for edit in changing:
        before = history.of_revision(edit.revision - 1).mix.amounts or {}
        for s, name in enumerate(history.of_revision(edit.revision).names):
            now = (edit.amounts or {}).get(name)
            # The source was counted in tokens or samples so far, and is counted in records from here on.
            if now is not None and now.kind == "epochs" and _kind(before, name) != "epochs":
                drawn_S[s] = drawn_in("epochs", state, s)
    return replace(
        state,
        drawn_S=tuple(drawn_S),
        # Empty if all are zero, so that the state keeps the version before.
        since_S=tuple(drawn_S) if any(drawn_S) else (),
        # All credits are 0, because the whole rest is spread from here on.
        credits_S=(0,) * len(drawn_S),
    )


def _kind(amounts: Mapping[str, Amount], name: str) -> str | None:
    return amounts[name].kind if name in amounts else None
