"""Start-ups as JSON, for other programs."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from snapshot.startup.attempts import Attempt, NodeStage, Stage
from snapshot.startup.difference import Difference, StageDifference

__all__ = ["VERSION", "attempt_json", "difference_json"]

VERSION = 1
"""Of the document; it changes when a key changes its meaning or goes."""


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt with every stage on every node. Times are seconds from its begin."""
    begin_ns = attempt.begin_ns
    path = [
        {"stage": part.stage, "node": part.node}
        | {"begin_s": (part.begin_ns - begin_ns) / 1e9, "end_s": (part.end_ns - begin_ns) / 1e9}
        for part in attempt.path
    ]
    return _plain(attempt, "number", "end_ns") | {
        "attempt": attempt.number,
        "seconds": attempt.seconds,
        "nodes": list(attempt.nodes),
        "doubt": None if attempt.doubt is None else asdict(attempt.doubt),
        "path": path,
        "stages": [_stage(stage, begin_ns) for stage in attempt.stages],
    }


def difference_json(difference: Difference) -> dict[str, Any]:
    """Return what changed from one start to another, stage by stage."""
    explaining = difference.explaining
    return {
        "seconds": difference.seconds,
        "ratio": difference.ratio,
        "explaining": None if explaining is None else explaining.name,
        "explained": difference.explained,
        "stages": [_changed(each) for each in difference.stages],
    }


def _changed(each: StageDifference) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stage": each.name,
        "path_before_s": each.path_before_s,
        "path_after_s": each.path_after_s,
        "path_s": each.path_s,
        "changed_bytes": dict(each.changed_bytes),
        "changed_facts": {name: list(pair) for name, pair in each.changed_facts.items()},
    }
    for when, stage in (("before", each.before), ("after", each.after)):
        found[f"max_{when}_s"] = stage and stage.max_s
        found[f"straggler_ratio_{when}"] = stage and stage.straggler_ratio
    return found


def _stage(stage: Stage, begin_ns: int) -> dict[str, Any]:
    return _plain(stage, "name") | {
        "stage": stage.name,
        "unfinished": list(stage.unfinished),
        "failed": list(stage.failed),
        "nodes": [_node(node, begin_ns) for node in stage.nodes],
    }


def _node(node: NodeStage, begin_ns: int) -> dict[str, Any]:
    return _plain(node, "begin_ns", "end_ns") | {
        "begin_s": (node.begin_ns - begin_ns) / 1e9,
        "end_s": None if node.end_ns is None else (node.end_ns - begin_ns) / 1e9,
        "runs": len(node.runs),
    }


def _plain(value: Attempt | Stage | NodeStage, *but: str) -> dict[str, Any]:
    """Return the fields that are numbers, texts or maps of them."""
    found = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in but}
    return {
        name: dict(each) if isinstance(each, Mapping) else each
        for name, each in found.items()
        if each is None or isinstance(each, str | int | float | Mapping)
    }
