"""Quantities as people write them: ``4MiB``, ``30s``, ``1.5T``."""

import re
from decimal import Decimal

__all__ = [
    "counted",
    "decimal_of",
    "format_bytes",
    "format_count",
    "parse_bytes",
    "parse_count",
    "parse_ports",
    "parse_seconds",
    "so_often",
]

_PORT = re.compile(r"[0-9]{1,5}")
# Only root may listen below the first port.
_FIRST_PORT, _LAST_PORT = 1024, 65_535
_DIGITS = re.compile(r"[0-9]{1,19}")
# Bounded, because a number of a million digits is not a quantity and takes long to convert.
_NUMBER = re.compile(r"^\s*([0-9][0-9_]{0,29}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*$")

_COUNT_OF_SUFFIX = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "b": 10**9,
    "t": 10**12,
    **{unit: 1 << (10 * i) for i, unit in enumerate(("ki", "mi", "gi", "ti"), start=1)},
}
_BYTES_OF_SUFFIX = {
    "": 1,
    "b": 1,
    **{unit: 10 ** (3 * i) for i, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
    **{unit: 1 << (10 * i) for i, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
}
_SECONDS_OF_SUFFIX = {
    "": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


def _split(text: str, suffixes: list[str]) -> tuple[str, str]:
    match = _NUMBER.match(text)
    if match is None or match[2].lower() not in suffixes:
        shown = ", ".join(suffix for suffix in suffixes if suffix)
        raise ValueError(f"{text!r:.60} is not a quantity; write a number with one of {shown}")
    return match[1].replace("_", ""), match[2].lower()


def _whole(text: str, scale_of: dict[str, int]) -> int:
    number, suffix = _split(text, list(scale_of))
    # Decimal, because as a float 1.005k would be 1004.9999999999999.
    value = Decimal(number) * scale_of[suffix]
    if value != int(value):
        raise ValueError(f"{text!r:.60} is not a whole number of units")
    return int(value)


def parse_count(value: object) -> object:
    """Read a count such as ``512k`` (powers of 1000) or ``16Ki`` (of 1024); leave numbers alone.

    Raises:
        ValueError: The text is not a number with a known suffix.
    """
    return _whole(value, _COUNT_OF_SUFFIX) if isinstance(value, str) else value


def parse_bytes(value: object) -> object:
    """Read a size such as ``4MiB`` (1024) or ``4MB`` (1000); leave numbers alone.

    Raises:
        ValueError: The text is not a number with a known suffix.
    """
    return _whole(value, _BYTES_OF_SUFFIX) if isinstance(value, str) else value


def parse_ports(text: str) -> range | None:
    """Return the range of ports that a text such as ``20000-20099`` means; ``None`` for an empty text.

    Raises:
        ValueError: The text is not a range of ports above 1023.
    """
    if not text:
        return None
    first, dash, last = text.partition("-")
    if dash and all(_PORT.fullmatch(part) for part in (first, last)):
        ports = range(int(first), int(last) + 1)
        if ports and _FIRST_PORT <= ports[0] <= ports[-1] <= _LAST_PORT:
            return ports
    raise ValueError(
        f"{text!r:.60} is no range of ports; give the first and the last, {_FIRST_PORT} to {_LAST_PORT}, as 20000-20099"
    )


def parse_seconds(value: object) -> object:
    """Read a duration such as ``250ms``, ``30s`` or ``2h``; leave numbers alone.

    Raises:
        ValueError: The text is not a number with a known suffix.
    """
    if not isinstance(value, str):
        return value
    number, suffix = _split(value, list(_SECONDS_OF_SUFFIX))
    return float(number) * _SECONDS_OF_SUFFIX[suffix]


def decimal_of(text: str) -> int | None:
    """Return the whole number written in ASCII digits; None for any other text, and for more than 19 digits.

    ``str.isdecimal`` and ``str.isdigit`` accept the digits of every script, while ``int`` refuses some of them and
    long texts.
    """
    return int(text) if _DIGITS.fullmatch(text) else None


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun: ``1 rank``, ``2,048 ranks``; give ``plural`` if it is not formed with an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def so_often(count: float) -> str:
    """Write a number of times: ``once``, ``2.5 times``."""
    return "once" if count == 1 else f"{count:g} times"


def format_bytes(size_bytes: float) -> str:
    """Write a size for people, in binary units with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Rounded first, so that 1023.6 is written as 1 of the next unit instead of 1024 of this one.
        if abs(round(size_bytes)) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{_short(size_bytes)} {unit}"
        size_bytes /= 1024
    return f"{_short(size_bytes)} TiB"


def format_count(count: float) -> str:
    """Write a count for people: ``950``, ``12.3k``, ``4.5M``."""
    for suffix in ("", "k", "M", "G"):
        if abs(round(count)) < 1000:
            return f"{count:.0f}" if suffix == "" else f"{_short(count)}{suffix}"
        count /= 1000
    return f"{_short(count)}T"


def _short(value: float) -> str:
    """Write three significant digits without an exponent."""
    # From 999.5 on, three digits would be written as 1e+03.
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
