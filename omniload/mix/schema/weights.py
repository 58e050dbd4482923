"""Weights as a mix file nests them: groups that share one weight, at a temperature.

::

    weights:                          web     6
      web: 6                          python  4 * 9**(1/2) / (9**(1/2) + 1) = 3
      code:                           rust    4 * 1        / (9**(1/2) + 1) = 1
        weight: 4
        temperature: 2
        of: {python: 9, rust: 1}

Everything behind the file knows one weight a source.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from omniload.base.config import StrictModel, fault_at
from omniload.mix.schema.splits import Name

__all__ = [
    "HOTTEST",
    "LARGEST_NUMBER",
    "GroupCap",
    "MaxFraction",
    "MaxRepetition",
    "Weight",
    "WeightGroup",
    "Weights",
    "group_caps",
    "is_nested",
    "number_at",
    "shares_of",
]

LARGEST_NUMBER = 1e12
"""Largest weight or cost; sums of those of all sources and rows are exact enough in a double."""
_DEEPEST = 8
"""Groups within groups at most."""
HOTTEST = 1000.0
"""Highest temperature of a group."""

Weight = Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
"""A relative weight."""
MaxFraction = Annotated[float, Field(gt=0, le=1)]
"""Largest share of a mix."""
MaxRepetition = Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)]
"""Times at most that records are gone through."""
_CAPS: dict[str, TypeAdapter[float]] = {
    "max_fraction": TypeAdapter(MaxFraction),
    "max_repetition": TypeAdapter(MaxRepetition),
}


class WeightGroup(StrictModel):
    """Sources that share one weight."""

    weight: Weight
    """Weight of the group, relative to the sources and groups around it."""
    of: Annotated[dict[Name, "Weight | WeightGroup"], Field(min_length=1)]
    """Sources and groups of this group, with their weights within it."""
    temperature: float = Field(default=1.0, gt=0, le=HOTTEST, allow_inf_nan=False)
    """Weights within the group are raised to the power 1 / temperature. A temperature above 1 evens them out, below 1
    sharpens them."""
    max_fraction: MaxFraction | None = None
    """Largest share of the mix that the sources of the group may have together, in this stage and after any edit of
    it."""
    max_repetition: MaxRepetition | None = None
    """How often the run may go through each source of the group. The cap is for the whole run, whichever stage declares
    it."""


class GroupCap(StrictModel):
    """Caps of the sources of a group."""

    stage: int = Field(ge=0, le=LARGEST_NUMBER)
    """Index in ``mix.stages`` of the stage that holds the group; 0 for a group of amounts."""
    at: tuple[str, ...]
    """Keys that lead to the group, from ``weights`` or ``amounts`` on."""
    names: tuple[str, ...]
    """Every source of the group."""
    max_fraction: MaxFraction | None = None
    """Largest share of the mix that these sources may have together."""
    max_repetition: MaxRepetition | None = None
    """How often the run may go through each of these sources."""

    @property
    def name(self) -> str:
        """Names of the group and of those around it."""
        return ".".join(self.at[::2])


def group_caps(
    weights: object, stage: int, path: tuple[str | int, ...], above: tuple[str, ...] = ()
) -> list[GroupCap]:
    """Return the caps of all groups of weights or amounts, as a file has them; other faults are left to the models.

    Args:
        weights: What the file says.
        stage: Place of the stage that they are of.
        path: Keys that lead to them; a fault names one below.
        above: Keys from there to these.

    Raises:
        PydanticCustomError: A cap is out of range.
    """
    found: list[GroupCap] = []
    for name, entry in weights.items() if isinstance(weights, Mapping) else ():
        at = (*above, str(name))
        if not isinstance(entry, Mapping) or "of" not in entry or len(at) > 2 * _DEEPEST:
            continue
        caps: dict[str, float] = {}
        for key, of_key in _CAPS.items():
            if entry.get(key) is None:
                continue
            try:
                caps[key] = of_key.validate_python(entry[key])
            except ValidationError as error:
                limit = "above 0 and at most 1" if key == "max_fraction" else "from 1 to 1e6"
                raise fault_at(
                    f"{key} is {entry[key]!r:.40}; give a number {limit}", *path, *at, key
                ) from error
        if caps:
            found.append(GroupCap(stage=stage, at=at, names=tuple(_names(entry["of"])), **caps))
        found += group_caps(entry["of"], stage, path, (*at, "of"))
    return found


def _names(members: object) -> Iterator[str]:
    for name, entry in members.items() if isinstance(members, Mapping) else ():
        # Without ``of`` a mapping is the amount, or the weight, of a source.
        if isinstance(entry, Mapping) and "of" in entry:
            yield from _names(entry["of"])
        else:
            yield str(name)


def is_nested(weights: object) -> bool:
    """Tell whether weights hold a group."""
    return isinstance(weights, Mapping) and any(isinstance(w, Mapping) for w in weights.values())


def _flat(weights: object) -> object:
    """Return one weight a source; what is no nested mapping is left to the model."""
    if not isinstance(weights, Mapping) or not is_nested(weights):
        return weights
    found: dict[str, object] = {}
    for name, weight, path in _members(weights, 1.0, ()):
        if name in found:
            raise fault_at(f"{name!r} has a weight in two groups; give it one", *path)
        # Powers may differ in their last digit from machine to machine; what is drawn must not.
        found[name] = float(f"{weight:.12g}") if len(path) > 1 else weight
    return found


def shares_of(members: object, temperature: object, path: tuple[str, ...]) -> dict[str, float]:
    """Return the share of each source below a group, which may hold groups; they sum to 1.

    Args:
        members: What ``of`` says.
        temperature: Its temperature.
        path: Where the group stands; a fault names what lies below.

    Raises:
        PydanticCustomError: A weight is none, or a source is named twice.
    """
    group = {"weight": 1.0, "of": members, "temperature": temperature}
    found: dict[str, float] = {}
    for name, share, at in _members({path[-1]: group}, 1.0, path[:-1]):
        if name in found:
            raise fault_at(f"{name!r} has a weight in two groups; give it one", *at)
        assert isinstance(share, float), "it was worked out"
        if share > 0:
            found[name] = share
    return found


def _members(
    weights: Mapping[Any, Any], scale: float, path: tuple[str, ...]
) -> Iterator[tuple[str, object, tuple[str, ...]]]:
    """Yield each source below, its weight, and where it stands."""
    # Two keys a level: the name of a group, and ``of``.
    if len(path) > 2 * _DEEPEST:
        raise fault_at(f"groups nest deeper than {_DEEPEST}; write the weights out", *path)
    for name, value in weights.items():
        at = (*path, str(name))
        if not isinstance(value, Mapping):
            # On the outermost level the model says what is wrong with a number.
            yield name, (number_at(value, at, 0.0) * scale if path else value), at
            continue
        if unknown := sorted(map(str, value.keys() - WeightGroup.model_fields.keys())):
            near = difflib.get_close_matches(unknown[0], WeightGroup.model_fields, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise fault_at(
                f"a group has weight, of and temperature, and may have max_fraction and max_repetition, not "
                f"{unknown[0]!r}{meant}",
                *at,
                unknown[0],
            )
        if not isinstance(members := value.get("of"), Mapping) or not members:
            raise fault_at(
                f"of is {members!r:.40}; name the sources of the group with their weights", *at
            )
        if "weight" not in value:
            raise fault_at("the group has no weight; give it one, next to of", *at)
        temperature = number_at(value.get("temperature", 1.0), (*at, "temperature"), None)
        weight = scale * number_at(value["weight"], (*at, "weight"), 0.0)
        shares = _shares(members, temperature, (*at, "of"))
        for inner, share in shares.items():
            member = members[inner]
            if isinstance(member, Mapping):
                below = {inner: {**member, "weight": 1.0}}
                yield from _members(below, weight * share, (*at, "of"))
            else:
                yield inner, weight * share, (*at, "of", str(inner))


def _shares(
    members: Mapping[Any, Any], temperature: float, path: tuple[str, ...]
) -> dict[Any, float]:
    """Return the share of each member of a group; they sum to 1."""
    weights: dict[Any, float] = {}
    for name, member in members.items():
        at = (*path, str(name))
        if isinstance(member, Mapping):
            if "weight" not in member:
                raise fault_at("the group has no weight; give it one, next to of", *at)
            at, member = (*at, "weight"), member["weight"]  # noqa: PLW2901 -- its weight stands for it
        weights[name] = number_at(member, at, 0.0)
    largest = max(weights.values())
    if largest == 0:
        raise fault_at(
            "weights of the group are all 0; give one above 0, or the group weight 0", *path
        )
    # Of the largest, which becomes 1: powers of large weights at a cold temperature are infinite.
    heated = {name: (weight / largest) ** (1 / temperature) for name, weight in weights.items()}
    for name, weight in weights.items():
        if weight > 0 and heated[name] == 0:
            raise fault_at(
                f"weight {weight:g} beside {largest:g} is nothing at temperature {temperature:g}: the source would "
                "never be drawn; raise the temperature, or give the weight 0",
                *path,
                str(name),
            )
    total = sum(heated.values())
    return {name: weight / total for name, weight in heated.items()}


def number_at(value: object, path: tuple[str, ...], least: float | None) -> float:
    """Return a number of a group: a weight of at least ``least``, or a temperature where that is ``None``."""
    most = HOTTEST if least is None else LARGEST_NUMBER
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (value > 0 if least is None else value >= least) and value <= most:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    what, limit = ("temperature", "above 0") if least is None else ("weight", "of at least 0")
    raise fault_at(f"{what} is {value!r:.40}; give a number {limit} and at most {most:g}", *path)


Weights = Annotated[
    dict[str, Weight],
    Field(min_length=1),
    BeforeValidator(_flat, json_schema_input_type=dict[Name, Weight | WeightGroup]),
]
"""One weight a source; written with groups or without."""
