"""Amounts as a mix file gives them: how much of each source a run draws, in place of weights.

::

    amounts:                                    web     epochs: 1
      web: {epochs: 1}                          python  tokens: 4.5G
      code:                                     rust    tokens: 0.5G
        tokens: 5G
        of: {python: 9, rust: 1}

Each source counts in the unit of its own amount. So nothing has to be known of lengths, and
amounts can serve as weights too: after every draw the same part of each is drawn.
"""

import difflib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import override

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.quantities import Count
from omniload.mix.schema.splits import Name
from omniload.mix.schema.weights import (
    HOTTEST,
    GroupCap,
    MaxRepetition,
    Weight,
    WeightGroup,
    shares_of,
)

__all__ = ["Amount", "AmountGroup", "Amounts", "faults_of_amounts", "is_amount"]

_MOST_EPOCHS = 1e6
_LARGEST_AMOUNT = 1 << 53
"""What a count may be, and a double holds."""
_KINDS = ("epochs", "samples", "tokens")
_COUNT: TypeAdapter[int] = TypeAdapter(Count)

Number = Annotated[Count, Field(ge=1, le=_LARGEST_AMOUNT)]


class Amount(StrictModel):
    """How much of a source a run draws: exactly one of the three."""

    epochs: Annotated[float, Field(gt=0, le=_MOST_EPOCHS, allow_inf_nan=False)] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """Times that its records are gone through; 0.5 is the first half of the first time, rounded down to a record."""
    samples: Number | None = Field(default=None, exclude_if=lambda value: value is None)
    """Samples, all of them whole."""
    tokens: Number | None = Field(default=None, exclude_if=lambda value: value is None)
    """Tokens: so many at least, and less than a row more."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            said = " and ".join(f"{kind} {getattr(self, kind):g}" for kind in given) or "none"
            raise fault_at(f"the amount has {said}; give one of {', '.join(_KINDS)}", *given[1:2])
        return self

    @property
    def kind(self) -> Literal["epochs", "samples", "tokens"]:
        """The unit that the source counts in; of ``epochs`` that is records."""
        if self.epochs is not None:
            return "epochs"
        return "samples" if self.samples is not None else "tokens"

    def units(self, records: int) -> int:
        """Return the amount of a source of so many records, in its unit: records, samples or tokens."""
        if self.epochs is not None:
            # As it is written: the double nearest to 0.29 is below it, and would lose a record of 100.
            return int(Fraction(repr(self.epochs)) * records)
        return self.samples or self.tokens or 0

    @override
    def __str__(self) -> str:
        amount = getattr(self, self.kind)
        said = f"{amount:,}" if isinstance(amount, int) else f"{amount:,.16g}"
        return f"{said} {self.kind[:-1] if amount == 1 else self.kind}"


class AmountGroup(StrictModel):
    """Sources that share one amount."""

    samples: Number | None = None
    """Samples of all of them."""
    tokens: Number | None = None
    """Tokens of all of them."""
    of: Annotated[dict[Name, Weight | WeightGroup], Field(min_length=1)]
    """Its sources, with their weights within it."""
    temperature: float = Field(default=1.0, gt=0, le=HOTTEST, allow_inf_nan=False)
    """Weights within the group are raised to 1 / temperature."""
    max_repetition: MaxRepetition | None = None
    """Times at most that the run may go through each of its sources."""


def is_amount(entry: object) -> bool:
    """Tell whether an entry of a file says an amount."""
    return isinstance(entry, Mapping) and any(kind in entry for kind in _KINDS)


def faults_of_amounts(
    amounts: Mapping[str, Amount], sources: Mapping[str, Any], groups: Mapping[str, GroupCap]
) -> Iterator[PydanticCustomError]:
    """Yield what amounts and sources ask of each other.

    Args:
        amounts: The amounts by source.
        sources: The sources by name.
        groups: The group that caps how often each source in one is gone through.
    """
    for name in sorted(amounts.keys() - sources.keys()):
        near = difflib.get_close_matches(name, sources, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        yield fault_at(
            f"{name!r} is not among the sources; {meant}declare the source or remove the amount",
            *("mix", "amounts", name),
        )
    for name, source in sources.items():
        if name not in amounts:
            yield fault_at(f"{name!r} has no amount; give it one or remove it", "sources", name)
            continue
        # Of samples and tokens nobody can tell here how often they go through a source.
        cap, wanted = source.max_repetition, amounts[name].epochs
        if cap is not None and wanted is not None and wanted > cap:
            yield fault_at(
                f"{name} wants {wanted:g} epochs, and its max_repetition is {cap:g}; lower one or raise the other",
                *("mix", "amounts", name),
            )
        group = groups.get(name)
        if group is not None and (wanted or 0) > (group.max_repetition or 0):
            yield fault_at(
                f"{name} wants {wanted:g} epochs, and max_repetition of group {group.name} is "
                f"{group.max_repetition:g}; lower one or raise the other",
                *("mix", "amounts", *group.at, "max_repetition"),
            )
        if source.max_fraction is not None:
            yield fault_at(
                f"{name} has max_fraction {source.max_fraction:g}, a cap on shares, and the mix gives amounts; lower "
                "its amount instead, and leave max_fraction out",
                *("sources", name, "max_fraction"),
            )


def _flat(amounts: object) -> object:
    """Return one amount a source; what is no mapping of mappings is left to the model."""
    if not isinstance(amounts, Mapping):
        return amounts
    found: dict[str, object] = {}
    for name, entry in amounts.items():
        members = _members(name, entry) if isinstance(entry, Mapping) and "of" in entry else None
        if members is None and isinstance(entry, Mapping) and "weight" in entry:
            raise fault_at(
                f"weight is {entry['weight']!r:.40} among amounts, which have no length that it could be a share of; "
                "give epochs, samples or tokens",
                *(name, "weight"),
            )
        for inner, amount in ({name: entry} if members is None else members).items():
            if inner in found:
                raise fault_at(f"{inner!r} has two amounts; give it one", name)
            found[inner] = amount
    return found


def _members(name: str, group: Mapping[Any, Any]) -> dict[str, object]:
    """Return the amount of each source of a group; they sum to that of the group."""
    if "epochs" in group:
        raise fault_at(
            f"epochs is {group['epochs']!r:.40} of a group, whose sources are gone through each; give epochs to each "
            "source, or samples or tokens to the group",
            *(name, "epochs"),
        )
    if unknown := sorted(map(str, group.keys() - AmountGroup.model_fields.keys())):
        raise fault_at(
            f"a group has samples or tokens, of and temperature, and may have max_repetition, not {unknown[0]!r}",
            *(name, unknown[0]),
        )
    given = [kind for kind in ("samples", "tokens") if kind in group]
    if len(given) != 1:
        raise fault_at(
            f"the group has {' and '.join(given) or 'no amount'}; give one of samples, tokens", name
        )
    try:
        amount = _COUNT.validate_python(group[given[0]])
    except ValidationError:
        # Told below, with what is a number and out of range.
        amount = 0
    if not 1 <= amount <= _LARGEST_AMOUNT:
        raise fault_at(
            f"{given[0]} is {group[given[0]]!r:.40}; give a whole number from 1 to {_LARGEST_AMOUNT}",
            *(name, given[0]),
        )
    shares = shares_of(group["of"], group.get("temperature", 1.0), (name,))
    for inner, share in shares.items():
        if amount * share < 1:
            raise fault_at(
                f"{inner!r} gets none of {amount:,} {given[0]}; give it more weight, or remove it",
                *(name, "of", inner),
            )
    return {n: {given[0]: whole} for n, whole in _apportioned(amount, shares).items()}


def _apportioned(amount: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Split a whole amount by largest remainder, so that nothing of it is lost."""
    # In twelve digits: powers of a temperature may differ in their last from machine to machine.
    exact = {name: Fraction(f"{share:.12g}") * amount for name, share in shares.items()}
    whole = {name: int(part) for name, part in exact.items()}
    left = amount - sum(whole.values())
    order = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    # Shares that were rounded may sum to more than 1 too: then some have one less.
    for i in range(abs(left)):
        whole[order[i % len(order)]] += 1 if left > 0 else -1
    return whole


Amounts = Annotated[
    dict[str, Amount],
    Field(min_length=1),
    BeforeValidator(_flat, json_schema_input_type=dict[Name, Amount | AmountGroup]),
]
"""One amount a source; written with groups or without."""
