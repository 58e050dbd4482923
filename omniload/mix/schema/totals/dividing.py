"""Amounts and weights of one mix: weights share what amounts leave of a total, level by level, to the last token.

::

    total: {tokens: 100G}
    amounts:                                    books   10G
      books: {tokens: 10G}                      web     90G * 3/4             = 67.5G
      web: {weight: 3}                          python  5G
      code:                                     rust    (22.5G - 5G) * 1/1    = 17.5G
        weight: 1
        of: {python: {tokens: 5G}, rust: 1}

What comes out is one amount a source, as if it had been written so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from omniload.base.config import fault_at
from omniload.base.settings.quantities import Count
from omniload.base.units import so_often
from omniload.mix.schema.weights import number_at, shares_of

__all__ = ["KINDS", "LARGEST_AMOUNT", "apportioned", "divided", "is_amount", "with_total_divided"]

LARGEST_AMOUNT = 1 << 53
"""What a count may be, and a double holds."""
KINDS = ("epochs", "samples", "tokens")
_OF_GROUPS = {"samples", "tokens", "weight", "of", "temperature", "max_repetition"}
_DEEPEST = 16
"""Keys that lead to the entries of a group at most: two a level, its name and ``of``."""
_SHOWN, _MOST = 3, 1e6
"""Sources that a message names, and epochs or weights that one is worked out of."""
_COUNT: TypeAdapter[int] = TypeAdapter(Count)


def is_amount(entry: object) -> bool:
    """Tell whether an entry of a file says an amount."""
    return isinstance(entry, Mapping) and any(kind in entry for kind in KINDS)


def with_total_divided(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file says under ``mix`` with amounts alone, where it says a total that weights share.

    Raises:
        PydanticCustomError: As for ``divided``; or the total is none, or has nothing to be divided among.
    """
    if (total := content.get("total")) is None:
        return content
    if (amounts := content.get("amounts")) is None:
        raise fault_at(
            f"total is {total!r:.60}, but the mix has no amounts; give mix.amounts, in which sources may have "
            "weights, or leave total out",
            "total",
        )
    given = [kind for kind in KINDS if isinstance(total, Mapping) and kind in total]
    if given == ["epochs"]:
        raise fault_at(_said_of_epochs(total, amounts), "total", "epochs")
    if given not in (["tokens"], ["samples"]) or len(total) > 1:
        raise fault_at(
            f"total is {total!r:.60}; give one of tokens and samples, as total: {{tokens: 100G}}",
            "total",
        )
    if not isinstance(amounts, Mapping):
        return {key: value for key, value in content.items() if key != "total"}
    whole = _Whole(given[0], _counted(total, given[0], ("total",)), "total", ())
    found: dict[str, object] = {}
    try:
        _divide(amounts, whole, 1.0, found)
    except PydanticCustomError as fault:
        below = (fault.context or {}).get("at", ())
        raise fault_at(fault.message(), *(("amounts", *below) if below else ("total",))) from fault
    # The total is not kept: amounts say it, and a mix is the same one however they were written.
    return {key: value for key, value in content.items() if key != "total"} | {"amounts": found}


def _said_of_epochs(total: Mapping[Any, Any], amounts: object) -> str:
    """Say why a total is not given in epochs, and what to write for the one that is asked for."""
    times = total["epochs"]
    said = f"total is {total!r:.60}, and how many tokens an epoch of each source has only reading it tells"
    is_number = isinstance(times, int | float) and not isinstance(times, bool) and 0 < times < _MOST
    if not is_number or not isinstance(amounts, Mapping) or not amounts:
        return f"{said}; give each source its own under amounts, as web: {{epochs: 2}}, without total and weights"
    names = list(_sources_in(amounts, 0))
    own = ", ".join(f"{name:.40}: {{epochs: {times}}}" for name in names[:_SHOWN])
    own += f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    said += f"; to go through each {so_often(times)} write amounts: {{{own}}} without total"
    weights = {
        str(name): float(entry["weight"])
        for name, entry in amounts.items()
        if isinstance(entry, Mapping) and isinstance(entry.get("weight"), int | float)
    }
    first = next((name for name in weights if name in names), None)
    if (
        first is None
        or len(weights) < len(amounts)
        or not all(0 < w < _MOST for w in weights.values())
    ):
        return said
    share = weights[first] / sum(weights.values())
    return said + (
        f"; to keep the weights, write total: {{tokens: N}}, where N is {times / share:.6g} times what omniload mix "
        f"stats FILE then says of an epoch of {first:.40}, which has {share:.4g} of the weights"
    )


def _sources_in(entries: Mapping[Any, Any], depth: int) -> Iterator[str]:
    """Yield the names of the sources among amounts, those of groups too."""
    for name, entry in entries.items():
        inner = entry.get("of") if isinstance(entry, Mapping) else None
        if isinstance(inner, Mapping) and depth < _DEEPEST:
            yield from _sources_in(inner, depth + 1)
        else:
            yield str(name)


def divided(amounts: object) -> object:
    """Return one amount a source, as a mapping each; what is no mapping of mappings is left to the model.

    Raises:
        PydanticCustomError: An entry says none or two of what it may say, amounts and their whole do not agree, or a
            source gets nothing or is named twice; its place is counted from ``amounts``.
    """
    if not isinstance(amounts, Mapping):
        return amounts
    found: dict[str, object] = {}
    for name, entry in amounts.items():
        if not isinstance(entry, Mapping) or not ("of" in entry or "weight" in entry):
            _put(found, {name: entry}, (name,))
            continue
        if "weight" in entry:
            raise fault_at(
                f"weight is {entry['weight']!r:.40} among amounts, which needs a total; write "
                "total: {tokens: ...} beside amounts, or give epochs, samples or tokens",
                *(name, "weight"),
            )
        given = _said_of(entry, (name,))
        _divide_group(entry, _Whole(given, _counted(entry, given, (name,)), name, (name,)), found)
    return found


@dataclass(frozen=True, slots=True)
class _Whole:
    """What a group, or all of a mix, divides among its entries."""

    kind: str
    amount: int
    said: str
    """Its name."""
    at: tuple[str, ...]
    """Keys that lead to it."""


def _said_of(entry: Mapping[Any, Any], at: tuple[str, ...]) -> str:
    """Return which of amounts and weight an entry says."""
    is_group = "of" in entry
    if is_group and "epochs" in entry:
        raise fault_at(
            f"epochs is {entry['epochs']!r:.40} in a group, but each source has epochs of its own; give epochs to "
            "each source, or samples or tokens to the group",
            *(*at, "epochs"),
        )
    known = _OF_GROUPS if is_group else {*KINDS, "weight"}
    if unknown := sorted(map(str, entry.keys() - known)):
        may = (
            "a group has samples, tokens or weight, of and temperature, and may have max_repetition"
            if is_group
            else "an entry has epochs, samples, tokens or weight"
        )
        raise fault_at(f"{may}, not {unknown[0]!r}", *at, unknown[0])
    given = [kind for kind in (*KINDS, "weight") if kind in entry]
    if len(given) != 1:
        may = "samples, tokens, weight" if is_group else "epochs, samples, tokens, weight"
        raise fault_at(
            f"the {'group' if is_group else 'entry'} has {' and '.join(given) or 'no amount'}; give one of {may}",
            *(*at, *given[1:2]),
        )
    return given[0]


def _counted(entry: object, kind: str, at: tuple[str, ...]) -> int:
    """Return the amount that an entry says."""
    said = entry.get(kind) if isinstance(entry, Mapping) else entry
    try:
        amount = _COUNT.validate_python(said)
    except ValidationError:
        amount = 0
    if not 1 <= amount <= LARGEST_AMOUNT:
        raise fault_at(
            f"{kind} is {said!r:.40}; give a whole number from 1 to {LARGEST_AMOUNT}", *at, kind
        )
    return amount


def _put(
    found: dict[str, object], amounts: Mapping[str, object], at: tuple[str, ...], kind: str = ""
) -> None:
    for name, amount in amounts.items():
        if name in found:
            raise fault_at(f"{name!r} has two amounts; give it one", *at)
        found[name] = {kind: amount} if kind else amount


def _divide_group(group: Mapping[Any, Any], whole: _Whole, found: dict[str, object]) -> None:
    """Divide the amount of a group among its sources."""
    members, heat = group["of"], group.get("temperature", 1.0)
    if isinstance(members, Mapping) and _has_amounts(members):
        at = (*whole.at, "of")
        _divide(members, _Whole(whole.kind, whole.amount, whole.said, at), heat, found)
        return
    shares = shares_of(members, heat, whole.at)
    for inner, share in shares.items():
        if whole.amount * share < 1:
            raise fault_at(
                f"{inner!r} gets none of {whole.amount:,} {whole.kind}; give it more weight, or remove it",
                *(*whole.at, "of", inner),
            )
    # In twelve digits: powers of a temperature may differ in their last from machine to machine.
    exact = {name: Fraction(f"{share:.12g}") for name, share in shares.items()}
    _put(found, apportioned(whole.amount, exact), whole.at, whole.kind)


def _has_amounts(members: Mapping[Any, Any]) -> bool:
    """Tell whether weights of a group have amounts beside or below them, or are written as such."""
    entries = [entry for entry in members.values() if isinstance(entry, Mapping)]
    return any(
        is_amount(entry)
        or "of" not in entry
        or (isinstance(entry["of"], Mapping) and _has_amounts(entry["of"]))
        for entry in entries
    )


def _divide(
    entries: Mapping[Any, Any], whole: _Whole, temperature: object, found: dict[str, object]
) -> None:
    """Divide an amount among entries of both kinds: what amounts leave goes to the weights, level by level."""
    if len(whole.at) > _DEEPEST:
        raise fault_at("groups nest deeper than 8; write the amounts out", *whole.at)
    parts: dict[str, int] = {}
    weights: dict[str, float] = {}
    for name, entry in entries.items():
        at = (*whole.at, str(name))
        if not isinstance(entry, Mapping):
            if not whole.at:
                raise fault_at(
                    f"{entry!r:.40} is no amount; write {{weight: {entry!r:.40}}}, or say epochs, samples or tokens",
                    *at,
                )
            weights[name] = number_at(entry, at, 0.0)
            continue
        given = _said_of(entry, at)
        if given == "weight":
            weights[name] = number_at(entry["weight"], (*at, "weight"), 0.0)
        elif given != whole.kind:
            raise fault_at(_unlike(given, entry[given], whole), *at, given)
        else:
            parts[name] = _counted(entry, given, at)
    parts |= _shared(whole, sum(parts.values()), weights, temperature)
    for name, entry in entries.items():
        at = (*whole.at, str(name))
        if isinstance(entry, Mapping) and "of" in entry:
            _divide_group(entry, _Whole(whole.kind, parts[name], str(name), at), found)
        else:
            _put(found, {name: parts[name]}, at, whole.kind)


def _unlike(given: str, said: object, whole: _Whole) -> str:
    """Say why an amount cannot be taken from a whole of another unit, and what to do."""
    what = f"{given} is {said!r:.40}, and {whole.said} counts {whole.kind}: how many that is, "
    return what + (
        f"only reading the source tells; give {whole.kind} (omniload mix stats FILE says how many an epoch has), or "
        "leave total and weights out, and give every source an amount"
    )


def _shared(
    whole: _Whole, stated: int, weights: Mapping[str, float], temperature: object
) -> dict[str, int]:
    """Return what each weight comes to, of what stated amounts leave of a whole."""
    rest, kind = whole.amount - stated, whole.kind
    if rest < 0 or (rest == 0) != (not weights):
        wanted = (
            f"{whole.said} is {whole.amount:,} {kind}, and the amounts in it come to {stated:,}"
        )
        remedy = (
            f"raise it to {stated:,} or more, or lower one of them"
            if rest < 0
            else f"nothing is left for {next(iter(weights))!r} and its weight; raise it, or lower an amount"
            if weights
            else f"give a source a weight, for the other {rest:,}, or correct one of them"
        )
        raise fault_at(f"{wanted}; {remedy}", *whole.at)
    if not weights:
        return {}
    # As they are written; powers of a temperature in twelve digits, as they may differ in their last.
    exact = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    if temperature != 1:
        heated = shares_of(weights, temperature, whole.at[:-1])
        exact = {name: Fraction(f"{share:.12g}") for name, share in heated.items()}
    if scale := sum(exact.values()):
        parts = apportioned(rest, {name: share / scale for name, share in exact.items()})
    else:
        parts = {}
    for name in weights:
        if not parts.get(name):
            raise fault_at(
                f"{name!r} gets none of the {rest:,} {kind} that are left of {whole.said}; give it more weight, or "
                "remove it",
                *(*whole.at, str(name)),
            )
    return parts


def apportioned(amount: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Split a whole amount by largest remainder, so that nothing of it is lost; ties go to the earlier name."""
    exact = {name: share * amount for name, share in shares.items()}
    whole = {name: int(part) for name, part in exact.items()}
    left = amount - sum(whole.values())
    order = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    # Shares that were rounded may sum to more than 1 too: then some have one less.
    for i in range(abs(left)):
        whole[order[i % len(order)]] += 1 if left > 0 else -1
    return whole
