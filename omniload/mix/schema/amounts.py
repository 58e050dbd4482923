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

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import override

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.quantities import Count
from omniload.mix.schema.splits import Name
from omniload.mix.schema.totals.dividing import KINDS, LARGEST_AMOUNT, divided
from omniload.mix.schema.weights import HOTTEST, GroupCap, MaxRepetition, Weight, WeightGroup

__all__ = [
    "Amount",
    "AmountGroup",
    "AmountShare",
    "Amounts",
    "Total",
    "faults_of_amounts",
]

_MOST_EPOCHS = 1e6

Number = Annotated[Count, Field(ge=1, le=LARGEST_AMOUNT)]


class Amount(StrictModel):
    """How much of a source a run draws: exactly one of the three keys."""

    epochs: Annotated[float, Field(gt=0, le=_MOST_EPOCHS, allow_inf_nan=False)] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )
    """Number of times to go through the records. 0.5 is the first half of the first epoch, rounded down to a record."""
    samples: Number | None = Field(default=None, exclude_if=lambda value: value is None)
    """Number of samples, all of them whole."""
    tokens: Number | None = Field(default=None, exclude_if=lambda value: value is None)
    """Number of tokens: the run draws at least this many, and less than one row more."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            said = " and ".join(f"{kind} {getattr(self, kind):g}" for kind in given) or "none"
            raise fault_at(f"the amount has {said}; give one of {', '.join(KINDS)}", *given[1:2])
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


class Total(StrictModel):
    """What a run draws of all its sources: exactly one of the two keys.

    There is no ``epochs``. Weights share a total in one unit, and only a reading of a source shows how many tokens or
    samples its epoch has. So a file with a total in epochs could not be checked, shown or compared with a journal by
    itself. To go through every source twice, write ``{web: {epochs: 2}, code: {epochs: 2}}`` under ``amounts``, without
    a total. To stop after one epoch of ``web``, with other sources by weight, give a total in ``tokens``: the tokens
    that ``omniload mix stats FILE`` finds in that epoch, divided by the share of ``web`` in the weights.
    """

    samples: Number | None = None
    """Samples of all sources."""
    tokens: Number | None = None
    """Tokens of all sources, as they are drawn. Padding of rows does not count."""


class AmountShare(StrictModel):
    """A source, or a member of a group, that shares what the amounts leave."""

    weight: Weight
    """Weight relative to the other members that share."""


class AmountGroup(StrictModel):
    """Sources that share one amount."""

    samples: Number | None = None
    """Samples of all sources of the group together."""
    tokens: Number | None = None
    """Tokens of all sources of the group together."""
    weight: Weight | None = None
    """In place of an amount: the group's share, relative to other weights, of what the amounts leave."""
    of: Annotated[
        dict[Name, "Weight | AmountShare | Amount | AmountGroup | WeightGroup"],
        Field(min_length=1),
    ]
    """Sources and groups of this group, with their weights within it, or with amounts, which come out of the group's
    own amount first."""
    temperature: float = Field(default=1.0, gt=0, le=HOTTEST, allow_inf_nan=False)
    """Weights within the group are raised to the power 1 / temperature."""
    max_repetition: MaxRepetition | None = None
    """How often the run may go through each source of the group."""


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


Amounts = Annotated[
    dict[str, Amount],
    Field(min_length=1),
    BeforeValidator(divided, json_schema_input_type=dict[Name, Amount | AmountShare | AmountGroup]),
]
"""One amount a source; written with groups or without."""
