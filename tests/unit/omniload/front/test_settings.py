"""The types of ``omniload.open(**settings)`` in editors and type checkers agree with the models of a mix."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import omniload
from omniload.base.units import parse_bytes, parse_count, parse_seconds
from omniload.front.settings import Settings
from omniload.mix.config import MixConfig

SECTIONS = ("pack", "batch", "balance", "loader", "runtime")
WRITTEN = {parse_bytes, parse_count, parse_seconds}
"""Read numbers that may be written as ``16Ki`` or ``2 h``."""


def type_given(kind, metadata=()):
    """Return the type of a caller's value for a field: an easily written one, if the model converts it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return Union[tuple(type_given(each) for each in inner)]  # noqa: UP007 -- of types that are computed
    if origin is tuple:
        return Sequence[type_given(inner[0])]
    if origin is dict:
        return Mapping[str, type_given(get_args(inner[1])[0])]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return Mapping[str, Any]
    if WRITTEN & {getattr(each, "func", None) for each in metadata}:
        return kind | str
    return kind


def settings_of_models():
    """Return name and type of every setting, by section and key, and by the key alone if only one section has it."""
    found, short = {"seed": int}, []
    for section in SECTIONS:
        model = MixConfig.model_fields[section].annotation
        for key, field in model.model_fields.items():
            given = type_given(field.annotation, field.metadata)
            found[f"{section}_{key}"] = given
            short.append((key, given))
    keys = [key for key, _ in short]
    return found | {key: given for key, given in short if keys.count(key) == 1}


def test_every_setting_is_a_keyword_with_the_type_of_its_model():
    own = inspect.signature(omniload.open).parameters
    expected = {name: kind for name, kind in settings_of_models().items() if name not in own}

    assert get_type_hints(Settings) == expected


@pytest.mark.parametrize("opens", [omniload.open, omniload.serve])
def test_whoever_opens_a_mix_takes_them(opens):
    (settings,) = (
        p for p in inspect.signature(opens).parameters.values() if p.kind is p.VAR_KEYWORD
    )

    assert get_args(settings.annotation) == (Settings,)
    assert not Settings.__required_keys__
