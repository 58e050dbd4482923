"""VeOmni's multi-source file: parallel lists of paths, names and weights.

::

    sources: [/data/web, /data/code]
    names: [web, code]
    schedule:
      - {schedule_type: const, init_token: 0, end_token: 1_000_000_000, weights: [0.8, 0.2]}
      - {schedule_type: const, init_token: 1_000_000_000, weights: [0.5, 0.5]}
    level: token                       # or sample
    stopping_strategy: all_exhausted   # first_exhausted, never_exhausted

Weights apply from ``init_token`` up to ``end_token``; here they become a stage that starts after a number of tokens.
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
    found = Imported(base=Path.cwd(), around="eos")
    asked.report.note(
        "",
        "rows are packed, as by VeOmni's dynamic batches; pack.method none gives each sample a row",
    )
    top = Fields(document if isinstance(document, dict) else {}, "", asked.report)
    paths = top.texts("sources")
    names = top.texts("names") or [Path(path).stem for path in paths]
    if not paths or len(names) != len(paths):
        top.refuse("names", f"holds {len(names)} names of {len(paths)} sources")
    # Not strict, because different lengths are already reported, and later faults are to be reported too.
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
    end: int | None = 0
    for stage in top.items("schedule"):
        end = _read_stage(stage, end, found)
    if not found.stages:
        top.refuse("schedule", "holds no weights")
    if end:
        asked.report.note(
            "schedule", f"ends at {end} tokens; here its last weights hold until the run ends"
        )
    if len(found.stages) > 1:
        found.stages_by = "tokens"
        asked.report.note(
            "schedule",
            "holds several entries, of which a released VeOmni draws by the first alone; here each holds from the "
            "first step before which its init_token tokens were taken, padding among them",
        )
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


def _read_stage(stage: Fields, begins: int | None, found: Imported) -> int | None:
    """Read an entry of the schedule.

    Args:
        stage: The entry.
        begins: End of the entry before; ``None`` if that entry does not give it.
        found: Mix to which the weights are added.

    Returns:
        The end of the entry.
    """
    kind = stage.take("schedule_type", str, "const")
    first = begins if stage.peek("init_token") is None else stage.take("init_token", int, 0)
    stage.take("init_token", int, 0)
    last = None if stage.peek("end_token") is None else stage.take("end_token", int, 0)
    if first is None:
        stage.refuse("init_token", "is missing, and no end_token before it says where this begins")
    elif begins is not None and first != begins:
        said = f"the entry before ends at {begins}" if found.stages else "the first begins at 0"
        stage.refuse("init_token", f"is {first}: {said}")
    elif found.stages and first <= found.stages[-1][0]:
        stage.refuse("init_token", f"is {first}, no later than that of the entry before")
    if last is not None and first is not None and last <= first:
        stage.refuse("end_token", f"is {last}, and the entry begins at {first}")
    if kind != "const":
        # Published code does not show how weights change in an entry of type changing.
        stage.refuse("schedule_type", f"is {kind!r}; const alone is known")
        for key in ("init_weights", "end_weights", "weights"):
            stage.take(key, list, [])
    elif (weights := stage.numbers("weights", len(found.sources))) is not None:
        found.stages.append((first or 0, dict(zip(found.sources, weights, strict=True))))
    stage.end()
    return last


TOOL = Tool(read=_read, sign="sources, a list of paths", holds=has_sources(str))
