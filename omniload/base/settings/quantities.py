"""Quantities as fields of configuration files; apart from ``units``, which is also used without pydantic."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from omniload.base.clock import LONGEST_WAIT_S
from omniload.base.units import parse_bytes, parse_count, parse_seconds

__all__ = ["Bytes", "Count", "Seconds"]

_CountRange = Field(ge=0, le=1 << 53)
_BytesRange = Field(ge=0, le=1 << 60)
_SecondsRange = Field(ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False)
Count = Annotated[
    int,
    BeforeValidator(parse_count, json_schema_input_type=Annotated[int, _CountRange] | str),
    _CountRange,
]
"""A count in a configuration file; accepts ``512k`` and ``16Ki``. At most what a double tells apart."""
Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes, json_schema_input_type=Annotated[int, _BytesRange] | str),
    _BytesRange,
]
"""A size in a configuration file; accepts ``4MiB``. At most 1 EiB: offsets are 64-bit numbers."""
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds, json_schema_input_type=Annotated[float, _SecondsRange] | str),
    _SecondsRange,
]
"""A duration in a configuration file; accepts ``30s``. At most 60 years: clocks and waits bear no more."""
