"""Whether a source can be added to a mix that is trained on."""

from pydantic_core import PydanticCustomError

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig, SourceConfig
from omniload.mix.schema.cuts import documents_cut

__all__ = ["require_fits"]


def require_fits(base: MixConfig, latest: MixConfig, name: str, source: SourceConfig) -> None:
    """Refuse a source that the mix file could not have had, or whose samples the run was not opened for.

    Args:
        base: The mix as its file says.
        latest: With every edit.
        name: Name of the source.
        source: What is declared of it.

    Raises:
        ConfigError: With what to do instead.
    """
    if name in latest.sources:
        gives = "an amount" if latest.mix.amounts else "a weight"
        raise ConfigError(
            f"source {name!r} is in the mix already; choose another name, or give it {gives} with "
            f"`omniload mix set RUN {name}={gives.split()[1].upper()}`"
        )
    if source.pair_columns and not any(s.pair_columns for s in latest.sources.values()):
        raise ConfigError(
            f"source {name!r} holds preference pairs, and the run has none: its trainer would train on both "
            "answers; put the source into the mix file and start a run with a loss for pairs"
        )
    if source.images_transform and not any(s.images_transform for s in latest.sources.values()):
        raise ConfigError(
            f"source {name!r} holds images, and the run has none: its trainer would train on their placeholders as "
            "on words; put the source into the mix file and start a run that encodes images"
        )
    every = {**latest.sources, name: source}
    try:
        base.inherited(source)
        for fault in documents_cut(every, latest.pack):
            raise fault
    except PydanticCustomError as fault:
        raise ConfigError(f"source {name!r}: {fault.message()}") from fault
