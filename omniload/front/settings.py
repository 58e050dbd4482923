"""Settings of a mix, overridden by keyword: ``omniload.open("mix.yaml", prefetch_steps=8)``."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig

__all__ = ["with_settings"]


def with_settings(mix: MixConfig, settings: Mapping[str, object]) -> MixConfig:
    """Return ``mix`` with some of its settings changed, checked as the file is.

    A setting is named by its key where one section alone has it (``prefetch_steps``), or by
    section and key (``pack_method``, ``balance_method``). Sources and weights are not
    settings: they stay in the file.

    Raises:
        ConfigError: No setting of that name, a name that two sections have, or a value refused.
    """
    if not settings:
        return mix
    places = _places(mix)
    changed = mix.declared()
    for name, value in settings.items():
        found = places.get(name, [])
        if len(found) != 1:
            raise ConfigError(_unknown(name, found, places))
        section, key = found[0]
        (changed if section is None else changed[section])[key] = value
    try:
        return MixConfig.model_validate(changed)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the mix'}: {fault['msg']}, found {fault['input']!r:.80}"
            for fault in error.errors()
        )
        raise ConfigError(f"the settings {sorted(settings)} are refused: {faults}") from error


def _places(mix: MixConfig) -> dict[str, list[tuple[str | None, str]]]:
    """Return the place of each setting, by every name it goes by."""
    places: dict[str, list[tuple[str | None, str]]] = {"seed": [(None, "seed")]}
    for section in ("pack", "batch", "balance", "loader", "runtime"):
        part = getattr(mix, section)
        assert isinstance(part, BaseModel)
        for key in type(part).model_fields:
            for name in (key, f"{section}_{key}"):
                places.setdefault(name, []).append((section, key))
    return places


def _unknown(
    name: str, found: list[tuple[str | None, str]], places: Mapping[str, list[Any]]
) -> str:
    if found:
        return f"the setting {name!r} may be {' or '.join(f'{s}_{k}' for s, k in found)}; name one of them"
    near = difflib.get_close_matches(name, places, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    alone = sorted(n for n, p in places.items() if len(p) == 1 and p[0][1] == n)
    return f"no setting is called {name!r}; {meant}settings are {', '.join(alone)}"
