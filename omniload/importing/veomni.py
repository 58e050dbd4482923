"""VeOmni's multi-source file: parallel lists of paths, names and weights.

::

    sources: [/data/web, /data/code]
    names: [web, code]
    schedule: [{schedule_type: const, weights: [0.8, 0.2]}]
    level: token                       # or sample
    stopping_strategy: all_exhausted   # first_exhausted, never_exhausted
"""

from pathlib import Path
from typing import Literal

from omniload.importing.fields import Fields
from omniload.importing.files import source_of_path
from omniload.importing.imported import Asked, Imported, new_name
from omniload.importing.tools import Tool, has_sources

__all__ = ["TOOL"]

_STOPS: dict[str, Literal["never", "first_exhausted", "all_exhausted"]] = {
    "never_exhausted": "never",
    "first_exhausted": "first_exhausted",
    "all_exhausted": "all_exhausted",
}


def _read(document: object, asked: Asked) -> Imported:
    """Return the mix that ``document``, the file's content, declares."""
    found = Imported(base=Path.cwd())
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    paths = top.texts("sources")
    names = top.texts("names") or [Path(path).stem for path in paths]
    if not paths or len(names) != len(paths):
        top.refuse("names", f"holds {len(names)} names of {len(paths)} sources")
    # Not strict: that they differ is told, and faults further down are too.
    for name, path in zip(names, paths, strict=False):
        found.sources[new_name(name, found.sources)] = source_of_path(path, top, asked)
    level = top.take("level", str, "sample")
    if level not in ("token", "sample"):
        top.refuse("level", f"is {level!r}; known are token and sample")
    found.level = "token" if level == "token" else "sample"
    stop = top.take("stopping_strategy", str, "all_exhausted")
    if stop not in _STOPS:
        top.refuse("stopping_strategy", f"is {stop!r}; known are {', '.join(_STOPS)}")
    found.stop = _STOPS.get(stop, "never")
    for i, stage in enumerate(top.items("schedule")):
        _read_stage(stage, i, found)
    if not found.stages:
        top.refuse("schedule", "holds no weights")
    top.note(
        {
            "multisource_datasets_type": "there is one kind of mix",
            "dataset_type": "sources are always read by position",
            "upstream_multisource": "a matter of another cluster",
            "upstream_sharded": "ranks are dealt their rows by the planner",
            "val_sources": "declare them as an evaluation mix",
        }
    )
    top.end()
    return found


def _read_stage(stage: Fields, number: int, found: Imported) -> None:
    kind = stage.take("schedule_type", str, "const")
    if first := stage.take("init_token", int, 0):
        stage.refuse("init_token", f"is {first}: weights hold from the first token on")
    stage.note({"end_token": "the weights of the only entry hold to the end"})
    weights = stage.numbers("weights", len(found.sources))
    if kind != "const" or number:
        stage.refuse("schedule_type", f"is {kind!r}, entry {number}: one const entry is known")
    elif weights is not None:
        found.stages.append((0, dict(zip(found.sources, weights, strict=True))))
    stage.end()


TOOL = Tool(read=_read, sign="sources, a list of paths", holds=has_sources(str))
