"""The mix of a job that is larger than its file: more sources, more tokens a step."""

from typing import Any

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig

__all__ = ["original_of", "with_sources", "with_tokens"]

_MARK = "."


def original_of(name: str, mix: MixConfig) -> str:
    """Return the source that one of ``with_sources`` is a copy of, or itself."""
    return name if name in mix.sources else name.rpartition(_MARK)[0]


def with_sources(mix: MixConfig, count: int) -> MixConfig:
    """Return a mix of ``count`` sources: each is copied equally often, give or take one, and shares its weight.

    Raises:
        ConfigError: There are more sources than that already.
    """
    names = mix.names
    if count < len(names):
        raise ConfigError(
            f"--sources is {count}, and the mix has {len(names)} already; give {len(names)} or more"
        )
    copies = {
        name: (count - place + len(names) - 1) // len(names) for place, name in enumerate(names)
    }
    content: dict[str, Any] = mix.declared()
    content["sources"] = {
        _copy(name, k): {**content["sources"][name], "max_fraction": None, "max_repetition": None}
        for name in names
        for k in range(copies[name])
    }
    readers = content["loader"]["readers"]
    content["loader"]["readers"] = {
        _copy(name, k): count for name, count in readers.items() for k in range(copies[name])
    }
    for stage in content["mix"]["stages"]:
        stage["weights"] = {
            _copy(name, k): weight / copies[name]
            for name, weight in stage["weights"].items()
            for k in range(copies[name])
        }
    return MixConfig.model_validate(content)


def _copy(name: str, number: int) -> str:
    return f"{name}{_MARK}{number + 1}" if number else name


def with_tokens(mix: MixConfig, tokens: int) -> MixConfig:
    """Return a mix whose steps have so many tokens, or the next whole rows.

    Raises:
        ConfigError: They are fewer than a row.
    """
    length = mix.pack.length
    rows = max(1, -(-tokens // length))
    content = mix.declared()
    content["batch"]["tokens"] = rows * length
    content["batch"]["micro_tokens"] = min(content["batch"]["micro_tokens"], rows * length)
    # The steps ahead stay those of the file: they follow from its tokens where it does not say how many.
    content["runtime"]["prefetch_steps"] = mix.runtime.prefetch_steps
    return MixConfig.model_validate(content)
