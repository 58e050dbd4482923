"""A source that is declared in a file of its own, with paths that still lead there from elsewhere."""

from pathlib import Path
from typing import TypeVar

from omniload.mix.schema.transforms import ChatTransform, PreferenceTransform, TransformConfig
from omniload.mix.sources import SourceBase

__all__ = ["placed"]

Source = TypeVar("Source", bound=SourceBase)


def placed(source: Source, folder: Path) -> Source:
    """Return a source whose relative paths start at ``folder`` with absolute ones; URLs stay as they are."""
    paths = tuple(path if "://" in path else str(folder / path) for path in source.paths)
    transforms = tuple(_placed(transform, folder) for transform in source.transforms)
    path = paths[0] if len(paths) == 1 else paths
    drawn = source.drawn_before and str(folder / source.drawn_before)
    return source.model_copy(update={"path": path, "transforms": transforms, "drawn_before": drawn})


def _placed(transform: TransformConfig, folder: Path) -> TransformConfig:
    if isinstance(transform, ChatTransform | PreferenceTransform) and transform.template:
        return transform.model_copy(update={"template": str(folder / transform.template)})
    return transform
